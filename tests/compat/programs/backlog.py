"""A server that sends much before its client reads any of it, and a little ever after; the client reads slowly.

    backlog.py serve PORT FILE
    backlog.py ask PORT FILE

The server sends on until the client says that it has read enough. Both end once FILE is there.
"""
import os
import select
import socket
import sys
import time

MUCH, LITTLE, PIECE = 500_000, 100, 10_000
# Longer than the unread timeout of a receiver about which nothing is known.
PAUSE = 0.07

role, port, over = sys.argv[1], int(sys.argv[2]), sys.argv[3]


def wait_for_the_end():
    while not os.path.exists(over):
        time.sleep(0.02)


if role == "serve":
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("listening", flush=True)
        connection, _ = listener.accept()
    with connection:
        for _ in range(MUCH // LITTLE):
            connection.sendall(b"x" * LITTLE)
        while not select.select([connection], [], [], 0.01)[0]:
            connection.sendall(b"y" * LITTLE)
        connection.recv(100)
        connection.sendall(b"z")
        wait_for_the_end()
else:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        got = b""
        while b"y" not in got:
            got += connection.recv(PIECE)
            time.sleep(PAUSE)
        connection.sendall(b"enough")
        while not got.endswith(b"z"):
            got += connection.recv(PIECE)
        assert got.startswith(b"x" * MUCH) and set(got[MUCH:-1]) == {ord("y")}
        print("every byte came", flush=True)
        wait_for_the_end()
