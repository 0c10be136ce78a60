"""A connection whose reader pauses, beside another that goes on for long.

    spilled_once.py serve PORT
    spilled_once.py ask PORT FILE

The client reads once the server has sent all. The second connection goes on until FILE is there.
"""
import os
import socket
import sys
import time

BEFORE = 30
MUCH = 3 << 20

role, port = sys.argv[1], int(sys.argv[2])
if role == "serve":
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("listening", flush=True)
        long, _ = listener.accept()
        short, _ = listener.accept()
        for _ in range(BEFORE):
            short.sendall(short.recv(4096))
            long.sendall(long.recv(4096))
        short.sendall(bytes(MUCH))
        long.sendall(b"sent")
        assert not short.recv(1)
        short.close()
        print("closed", flush=True)
        while data := long.recv(4096):
            long.sendall(data)
else:
    long = socket.create_connection(("127.0.0.1", port))
    short = socket.create_connection(("127.0.0.1", port))
    for _ in range(BEFORE):
        for one in short, long:
            one.sendall(b"before")
            assert one.recv(4096) == b"before"
        time.sleep(0.01)
    assert long.recv(4) == b"sent"
    left = MUCH
    while left:
        left -= len(short.recv(min(left, 1 << 16)))
    short.close()
    while not os.path.exists(sys.argv[3]):
        long.sendall(b"x")
        assert long.recv(1) == b"x"
        time.sleep(0.01)
