"""A connection that is used for a while, and then by somebody else who waits for it: a new thread, by a call of its own kind.

late_waiter.py server PORT DIRECTORY CALL    CALL: recv, poll or epoll
late_waiter.py client PORT DIRECTORY
"""

import os
import socket
import sys
import threading
import time

from clients import receive_by

ROUNDS = 300


def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)


def serve(port, directory, call):
    listener = socket.create_server(("127.0.0.1", port))
    print("listening", flush=True)
    connection = listener.accept()[0]
    for _ in range(ROUNDS):
        connection.sendall(connection.recv(64))
    print("used", flush=True)
    wait_for(f"{directory}/restarted")

    def waits():
        print(f"thread {threading.get_native_id()}", flush=True)
        connection.sendall(receive_by(call, connection))

    thread = threading.Thread(target=waits)
    thread.start()
    thread.join()


def connect(port, directory):
    connection = socket.create_connection(("127.0.0.1", port))
    for number in range(ROUNDS):
        exchange(connection, number)
    wait_for(f"{directory}/again")
    exchange(connection, ROUNDS)
    print("done", flush=True)


def exchange(connection, number):
    message = str(number).encode()
    connection.sendall(message)
    assert connection.recv(64) == message


if sys.argv[1] == "server":
    serve(int(sys.argv[2]), sys.argv[3], sys.argv[4])
else:
    connect(int(sys.argv[2]), sys.argv[3])
