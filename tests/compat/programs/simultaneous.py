"""One end of a connection that both ends open at the same time.

    simultaneous.py OWN_PORT PEER_PORT DIR

Prints "connecting" once its SYN is on the way, and "connected". Then both ends exchange bytes until DIR/end exists.
"""

import errno
import os
import select
import socket
import sys

own, peer, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
connection = socket.socket()
connection.bind(("127.0.0.1", own))
connection.setblocking(False)
assert connection.connect_ex(("127.0.0.1", peer)) == errno.EINPROGRESS
print("connecting", flush=True)
assert select.select([], [connection], [], 60)[1]
assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
connection.setblocking(True)
print("connected", flush=True)
sent = received = 0
goes_on = True
while goes_on:
    # The end with the lower port decides when to stop.
    if own < peer:
        goes_on = not os.path.exists(os.path.join(directory, "end"))
        connection.sendall(bytes([goes_on]) * 1000)
    part = connection.recv(1000, socket.MSG_WAITALL)
    assert len(part) == 1000 and len(set(part)) == 1, part
    if own > peer:
        connection.sendall(part)
        goes_on = part[0] == 1
print("done", connection.recv(1) if own > peer else connection.close(), flush=True)
