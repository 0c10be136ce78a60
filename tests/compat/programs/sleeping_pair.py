"""A connection both of whose ends sleep once a file is there.

sleeping_pair.py server PORT CALL         CALL: recv, poll or epoll
sleeping_pair.py client PORT CALL FILE
"""

import os
import socket
import sys

from clients import receive_by


def serve(port, call):
    listener = socket.create_server(("127.0.0.1", port))
    print("listening", flush=True)
    connection = listener.accept()[0]
    while message := receive_by(call, connection):
        connection.sendall(message)


def connect(port, call, file):
    connection = socket.create_connection(("127.0.0.1", port))
    while not os.path.exists(file):
        connection.sendall(b"hello")
        assert receive_by(call, connection) == b"hello"
    print("sleeps", flush=True)
    receive_by(call, connection)


role = serve if sys.argv[1] == "server" else connect
role(int(sys.argv[2]), *sys.argv[3:])
