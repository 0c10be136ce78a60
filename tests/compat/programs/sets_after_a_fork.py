"""An epoll set that a child has inherited, which has become another program since.

    sets_after_a_fork.py PORT inherited|not-inherited

A connection of this process, with both ends in one set among many others, is changed there and used. Says whether a change of
the set is cheap, by how much is read from files meanwhile, and what has come.
"""

import os
import select
import socket
import sys
import time

OTHERS = 150
CHANGES = 1000
LOOKS_ALLOWED = 8
# Programs that do not want to inherit descriptors close them all at their start.
CHILD = "import os, sys; os.closerange(3, 4096); print(flush=True); sys.stdin.readline()"


def connect(listener):
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for one in (client, server):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client, server


def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def main():
    port, inherited = int(sys.argv[1]), sys.argv[2] == "inherited"
    listener = socket.create_server(("127.0.0.1", port))
    crowd = socket.create_server(("127.0.0.1", 0))
    others = [connect(crowd) for _ in range(OTHERS)]
    watched = select.epoll()
    os.set_inheritable(watched.fileno(), inherited)
    for _, server in others:
        watched.register(server, select.EPOLLIN)

    told, tell = os.pipe()
    told_back, tell_back = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(told, 0)
        os.dup2(tell_back, 1)
        os.execvp("python3", ["python3", "-c", CHILD])
    os.read(told_back, 1)

    client, server = connect(listener)
    watched.register(server, select.EPOLLIN)
    got = 0
    for turn in range(2000):
        client.sendall(b"x" * 1000)
        for fd, _ in watched.poll(5):
            got += len(os.read(fd, 1000))
        server.sendall(b"y")
        client.recv(1)
        if turn % 20 == 0:
            time.sleep(0.002)
    print("received", got)

    one_look = sum(len(line) for line in open(f"/proc/self/fdinfo/{watched.fileno()}"))
    before = bytes_read()
    for change in range(CHANGES):
        watched.modify(others[change % OTHERS][1], select.EPOLLIN | (select.EPOLLOUT if change & 1 else 0))
    read = bytes_read() - before
    print("a change is cheap" if read < LOOKS_ALLOWED * one_look else f"{CHANGES} changes have read {read} bytes")

    os.write(tell, b"\n")
    print("child", os.waitpid(child, 0)[1])


main()
