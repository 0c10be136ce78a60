"""Unread bytes at the moment the reader changes: exec without the shim, a descriptor or an epoll set sent on, splice.

    give_back.py server PORT HOW
    give_back.py client PORT HOW

The client sends numbered lines and then waits. The server reads a few of them, enough for the connection to be on
shared memory, and leaves the rest to a reader that the shim does not see. Prints a digest of everything that was read.
"""

import hashlib
import os
import select
import socket
import sys

LINES = 2000
READER = """
import os, hashlib, sys
digest = hashlib.sha256()
while chunk := os.read(0, 65536):
    digest.update(chunk)
print(digest.hexdigest(), flush=True)
"""
RECEIVER = """
import os, socket
_, fds, _, _ = socket.recv_fds(socket.socket(fileno=0), 1, 1)
os.dup2(fds[0], 0)
os.close(fds[0])
"""
WATCHER = """
import select
print([events for _, events in select.epoll.fromfd(0).poll(10)], flush=True)
"""


def line(number):
    return b"%06d %s\n" % (number, b"x" * (number % 50))


def client(port, late):
    sock = socket.create_connection(("127.0.0.1", port))
    for number in range(20):
        sock.sendall(line(number))
        assert sock.recv(1) == b"."
    sock.sendall(b"".join(line(number) for number in range(20, LINES)))
    # The server leaves the rest to another reader. Nothing more is sent afterwards.
    assert sock.recv(1) == b"!"
    if late:
        # Long enough for the other reader to exist before the end of file.
        select.select([sock], [], [], 1)
    sock.shutdown(socket.SHUT_WR)
    while sock.recv(100):
        pass


def send_on(what, program):
    """Sends a descriptor to another program, which has it as its standard input, and waits for its end."""
    near, far = socket.socketpair()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", RECEIVER + program],
        {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        file_actions=[(os.POSIX_SPAWN_DUP2, far.fileno(), 0)],
    )
    far.close()
    socket.send_fds(near, [b"x"], [what.fileno()])
    os.waitpid(child, 0)


def server(port, how):
    listener = socket.create_server(("127.0.0.1", port))
    print("ready", flush=True)
    sock, _ = listener.accept()
    for number in range(20):
        want = line(number)
        got = b""
        while len(got) < len(want):
            got += sock.recv(len(want) - len(got))
        assert got == want
        sock.sendall(b".")
    part = b""
    while len(part) < 5000:
        part += sock.recv(5000 - len(part))
    print(hashlib.sha256(part).hexdigest(), flush=True)
    sock.sendall(b"!")
    if how == "exec":
        os.dup2(sock.fileno(), 0)
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        os.execve(sys.executable, [sys.executable, "-c", READER], environment)
    if how == "pass":
        send_on(sock, READER)
    if how == "set":
        epoll = select.epoll()
        epoll.register(sock, select.EPOLLIN)
        epoll.poll(1)
        send_on(epoll, WATCHER)
        digest = hashlib.sha256()
        while epoll.poll(10) and (chunk := sock.recv(65536)):
            digest.update(chunk)
        print(digest.hexdigest(), flush=True)
    if how == "splice":
        digest = hashlib.sha256()
        out, into = os.pipe()
        import ctypes

        splice = ctypes.CDLL(None, use_errno=True).splice
        while True:
            count = splice(sock.fileno(), None, into, None, 65536, 0)
            assert count >= 0, os.strerror(ctypes.get_errno())
            if count == 0:
                break
            while count > 0:
                chunk = os.read(out, count)
                count -= len(chunk)
                digest.update(chunk)
        print(digest.hexdigest(), flush=True)


if sys.argv[1] == "server":
    server(int(sys.argv[2]), sys.argv[3])
else:
    client(int(sys.argv[2]), sys.argv[3] != "splice")
