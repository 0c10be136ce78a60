"""Requests whose answers take a known time.

    latency.py server PORT
    latency.py client PORT GATE DONE

The client sends quick requests until the file GATE exists, and then requests whose answers take 50 ms. It makes the file GATE.slow
after the first of these, and ends when the file DONE exists.
"""

import os
import socket
import sys
import threading
import time

QUICK, SLOW = b"q" * 64, b"s" * 64


def receive(sock):
    got = b""
    while len(got) < 64:
        part = sock.recv(64 - len(got))
        if not part:
            return b""
        got += part
    return got


def serve(port):
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            threading.Thread(target=answer, args=[listener.accept()[0]], daemon=True).start()


def answer(sock):
    with sock:
        while request := receive(sock):
            if request == SLOW:
                time.sleep(0.05)
            sock.sendall(request)


def ask(port, gate, done):
    with socket.create_connection(("127.0.0.1", port)) as sock:
        request = QUICK
        while not os.path.exists(done):
            if request == QUICK and os.path.exists(gate):
                request = SLOW
            sock.sendall(request)
            assert receive(sock) == request
            if request == SLOW and not os.path.exists(gate + ".slow"):
                open(gate + ".slow", "w").close()


if sys.argv[1] == "server":
    serve(int(sys.argv[2]))
else:
    ask(int(sys.argv[2]), sys.argv[3], sys.argv[4])
