"""Connections that end while the broker is stopped: the other end must see it at once all the same.

    stopped.py closes BROKER ROUNDS   in every way a close can end a connection, at any moment of its being offered
    stopped.py killed BROKER ROUNDS   by the end of the process
    stopped.py polled BROKER ROUNDS   bytes, by an epoll_wait that does not sleep, from a peer without the doorbell

BROKER is its process id. Each end is seen within LIMIT, or never: the broker goes on only afterwards.
"""

import os
import random
import select
import signal
import socket
import struct
import sys
import time

LIMIT = 10
# Much longer than the time after which a silent broker is no longer taken for running.
LATER = 0.1


def connection(listener):
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    server.settimeout(LIMIT)
    return client, server


def exchange(client, server, times):
    for _ in range(times):
        client.sendall(b"ping")
        assert server.recv(4) == b"ping"
        server.sendall(b"pong")
        assert client.recv(4) == b"pong"


def end_of(server):
    try:
        return "end of file" if server.recv(4) == b"" else "bytes"
    except ConnectionResetError:
        return "reset"


def plainly(client, server):
    client.close()


def with_unread(client, server):
    server.sendall(b"late")
    while client.recv(4, socket.MSG_PEEK) != b"late":
        pass
    client.close()


def without_linger(client, server):
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def and_answered(client, server):
    """The server writes to what is closed, and then sees the reset."""
    client.close()
    assert end_of(server) == "end of file"
    server.sendall(b"too late")
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            server.sendall(b"!")
        except OSError:
            return
        time.sleep(0.001)
    sys.exit("a write to a closed connection was not refused")


def registered_by_a_closed_duplicate(client, server):
    """The epoll instance reports nothing of a socket that has no descriptor any more."""
    with select.epoll() as epoll:
        copy = os.dup(client.fileno())
        epoll.register(copy, select.EPOLLIN)
        os.close(copy)
        client.close()
        assert (seen := epoll.poll(0)) == [], f"the closed socket reports {seen}"


WAYS = {
    plainly: "end of file",
    with_unread: "reset",
    without_linger: "reset",
    and_answered: None,
    registered_by_a_closed_duplicate: "end of file",
}


def closes(listener, broker, rounds):
    source = random.Random(7)
    for _ in range(rounds):
        os.kill(broker, signal.SIGCONT)
        # Make sure that the broker is known to be running.
        exchange(*connection(listener), 40)
        for way, expected in WAYS.items():
            client, server = connection(listener)
            operations = source.randrange(1, 12)
            exchange(client, server, operations // 2)
            os.kill(broker, signal.SIGSTOP)
            exchange(client, server, operations - operations // 2)
            way(client, server)
            if expected:
                seen = end_of(server)
                assert seen == expected, f"{way.__name__} after {operations}: {seen} instead of {expected}"
            server.close()
            os.kill(broker, signal.SIGCONT)


def killed(listener, broker, rounds):
    for _ in range(rounds):
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            clients = []
            # The first two may be offered to the broker before it is known to be stopped. The
            # others may not.
            for operations in (40, 16, 16, 16):
                client = socket.create_connection(listener.getsockname())
                clients.append(client)
                for _ in range(operations):
                    client.sendall(b"ping")
                    assert client.recv(4) == b"pong"
                os.write(ready[1], b".")
                os.read(go[0], 1)
            os._exit(1)
        servers = []
        for number in range(4):
            server, _ = listener.accept()
            server.settimeout(LIMIT)
            servers.append(server)
            for _ in range(40 if number == 0 else 16):
                assert server.recv(4) == b"ping"
                server.sendall(b"pong")
            os.read(ready[0], 1)
            if number == 0:
                os.kill(broker, signal.SIGSTOP)
            if number == 1:
                time.sleep(LATER)
            if number < 3:
                os.write(go[1], b".")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for number in (2, 3, 0, 1):
            if number == 0:
                os.kill(broker, signal.SIGCONT)
            seen = end_of(servers[number])
            assert seen == "end of file", f"connection {number}: {seen}"
        for end in (*ready, *go):
            os.close(end)


def polled(listener, broker, rounds):
    instances = []
    for _ in range(rounds):
        client, server = connection(listener)
        for _ in range(4):
            exchange(client, server, 20)
            time.sleep(LATER / 10)
        os.kill(broker, signal.SIGSTOP)
        # The peer gets the doorbell of each instance from the broker.
        instances.append(epoll := select.epoll())
        epoll.register(server, select.EPOLLIN)
        assert epoll.poll(0.001) == []
        client.sendall(b"!")
        seen = epoll.poll(0)
        os.kill(broker, signal.SIGCONT)
        assert seen == [(server.fileno(), select.EPOLLIN)], seen
        client.close()
        server.close()


def main():
    what, broker, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    listener = socket.create_server(("127.0.0.1", 0), backlog=16)
    try:
        {"closes": closes, "killed": killed, "polled": polled}[what](listener, broker, rounds)
    finally:
        os.kill(broker, signal.SIGCONT)
    print("seen", flush=True)


main()
