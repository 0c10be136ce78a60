"""A connection both of whose ends sleep once a file is there.

sleeping_pair.py server PORT CALL         CALL: recv, poll or epoll
sleeping_pair.py client PORT CALL FILE
"""

import os
import select
import socket
import sys


def wait(call, connection):
    """Sleeps until there is something to receive."""
    if call == "poll":
        waiter = select.poll()
        waiter.register(connection, select.POLLIN)
        assert waiter.poll()
    elif call == "epoll":
        waiter = select.epoll()
        waiter.register(connection, select.EPOLLIN)
        assert waiter.poll()
    return connection.recv(64)


def serve(port, call):
    listener = socket.create_server(("127.0.0.1", port))
    print("listening", flush=True)
    connection = listener.accept()[0]
    while message := wait(call, connection):
        connection.sendall(message)


def connect(port, call, file):
    connection = socket.create_connection(("127.0.0.1", port))
    while not os.path.exists(file):
        connection.sendall(b"hello")
        assert wait(call, connection) == b"hello"
    print("sleeps", flush=True)
    wait(call, connection)


role = serve if sys.argv[1] == "server" else connect
role(int(sys.argv[2]), *sys.argv[3:])
