"""A server with a process for each connection, and its client.

    forking.py PORT                      the server: sends back what it gets
    forking.py PORT CONNECTIONS LINES [GATE]
                                         the client: so many connections at a time, so many lines on each at least, and as
                                         many as it takes until there is a file of that name
"""

import itertools
import os
import socket
import socketserver
import sys


class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while data := self.request.recv(65536):
            self.request.sendall(data)


class Server(socketserver.ForkingTCPServer):
    allow_reuse_address = True
    request_queue_size = 64


def client(port, connections, lines, gate=os.curdir):
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    for line in itertools.count():
        if line >= lines and line % 50 == 0 and os.path.exists(gate):
            break
        for number, sock in enumerate(sockets):
            sock.sendall(b"%d %d %s\n" % (number, line, b"x" * (line % 300)))
        for number, sock in enumerate(sockets):
            want = b"%d %d %s\n" % (number, line, b"x" * (line % 300))
            got = b""
            while len(got) < len(want):
                part = sock.recv(len(want) - len(got))
                assert part, f"connection {number} ended in line {line}"
                got += part
            assert got == want, f"connection {number}, line {line}"
    for sock in sockets:
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    print(connections * lines, "lines")


if len(sys.argv) == 2:
    with Server(("127.0.0.1", int(sys.argv[1])), Echo) as server:
        print("ready", flush=True)
        server.serve_forever()
else:
    client(*map(int, sys.argv[1:4]), *sys.argv[4:])
