"""Connections one after the other, each with so many small requests and answers.

    far.py serve ADDRESS PORT
    far.py load ADDRESS PORT CONNECTIONS REQUESTS [SOURCE]     prints "done", and stays
"""

import socket
import sys
import threading
import time

REQUEST = b"request"


def exactly(connection, size):
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            break
        received += part
    return received


def answer(connection):
    with connection:
        while request := exactly(connection, len(REQUEST)):
            connection.sendall(request[::-1])


def serve(address):
    listener = socket.create_server(address)
    print("serving", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def load(address, connections, requests, source):
    for _ in range(connections):
        with socket.create_connection(address, source_address=source) as connection:
            for _ in range(requests):
                connection.sendall(REQUEST)
                assert exactly(connection, len(REQUEST)) == REQUEST[::-1]
    print("done", flush=True)
    time.sleep(3600)


address = (sys.argv[2], int(sys.argv[3]))
if sys.argv[1] == "serve":
    serve(address)
else:
    source = (sys.argv[6], 0) if len(sys.argv) > 6 else None
    load(address, int(sys.argv[4]), int(sys.argv[5]), source)
