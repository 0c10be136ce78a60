"""A server with a thread for each connection, of which few wait at a time, and a client that uses all of them.

many_threads.py server PORT DIRECTORY CONNECTIONS
many_threads.py client PORT DIRECTORY CONNECTIONS
"""

import os
import select
import socket
import sys
import threading
import time

ROUNDS = 40
AT_A_TIME = 8


def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)


def serve(connection, may_wait, all_answered, waiter):
    for turn in range(ROUNDS):
        with may_wait:
            if turn % 2:
                waiter.poll()
            message = connection.recv(64)
        connection.sendall(message)
        all_answered.wait()


def server(port, directory, count):
    listener = socket.create_server(("127.0.0.1", port), backlog=count)
    print("listening", flush=True)
    may_wait, all_answered = threading.Semaphore(AT_A_TIME), threading.Barrier(count)
    threads = []
    for _ in range(count):
        connection = listener.accept()[0]
        waiter = select.poll()
        waiter.register(connection, select.POLLIN)
        threads.append(threading.Thread(target=serve, args=(connection, may_wait, all_answered, waiter)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    print("done", flush=True)
    wait_for(f"{directory}/end")


def client(port, directory, count):
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    for _ in range(ROUNDS):
        # Let the waiting threads sleep.
        time.sleep(0.01)
        for connection in connections:
            connection.sendall(b"question")
        for connection in connections:
            assert connection.recv(64) == b"question"
    wait_for(f"{directory}/end")


def main():
    role, port, directory, count = sys.argv[1:]
    {"server": server, "client": client}[role](int(port), directory, int(count))


main()
