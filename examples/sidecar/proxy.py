"""A proxy as beside a program in a mesh: connections arrive by a redirection, and it asks for their destination.

    python3 proxy.py PORT
"""

import selectors
import socket
import struct
import sys

SO_ORIGINAL_DST = 80

selector = selectors.DefaultSelector()


def destination(connection):
    """Returns the address to which the connection was made before it was redirected."""
    answer = connection.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
    port, address = struct.unpack_from("!H4s", answer, 2)
    return socket.inet_ntoa(address), port


def pair(client):
    server = socket.create_connection(destination(client))
    for one, other in ((client, server), (server, client)):
        selector.register(one, selectors.EVENT_READ, other)


def forward(one, other):
    data = one.recv(65536)
    if data:
        other.sendall(data)
        return
    for end in (one, other):
        selector.unregister(end)
        end.close()


listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
selector.register(listener, selectors.EVENT_READ)
while True:
    for key, _ in selector.select():
        if key.fileobj is listener:
            pair(listener.accept()[0])
        elif key.fileobj.fileno() >= 0:
            forward(key.fileobj, key.data)
