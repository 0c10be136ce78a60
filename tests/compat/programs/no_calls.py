"""A server with a set, and a client that makes no calls for two seconds once both have exchanged enough to share memory.

    no_calls.py serve PORT
    no_calls.py silent PORT FILE

The client goes on once FILE is there.
"""

import os
import select
import socket
import sys
import time

EXCHANGES = 100


def serve(address):
    listener = socket.create_server(address)
    print("listening", flush=True)
    connection, _ = listener.accept()
    for _ in range(EXCHANGES):
        connection.sendall(connection.recv(5, socket.MSG_WAITALL))
    # Its doorbell is new, and the client does not hear of it.
    epoll = select.epoll()
    epoll.register(connection, select.EPOLLIN)
    while True:
        epoll.poll()
        got = connection.recv(1000)
        if not got:
            break
        connection.sendall(got)


def silent(address):
    client = socket.create_connection(address)
    for _ in range(EXCHANGES):
        client.sendall(b"hello")
        assert client.recv(5, socket.MSG_WAITALL) == b"hello"
        time.sleep(0.005)
    client.sendall(b"hello")
    time.sleep(2)
    print("slept", flush=True)
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    assert client.recv(5, socket.MSG_WAITALL) == b"hello"
    for _ in range(100):
        client.sendall(b"x" * 100)
        assert client.recv(100, socket.MSG_WAITALL) == b"x" * 100


{"serve": serve, "silent": silent}[sys.argv[1]](("127.0.0.1", int(sys.argv[2])))
