"""An echo server on gevent: libev, greenlets, and the standard library patched.

    echo_gevent.py PORT
"""

import sys

from gevent import monkey

monkey.patch_all()

import socket  # noqa: E402
import threading  # noqa: E402


def echo(stream):
    while data := stream.recv(65536):
        stream.sendall(data)
    stream.close()


listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=64)
while True:
    stream, _ = listener.accept()
    threading.Thread(target=echo, args=(stream,)).start()
