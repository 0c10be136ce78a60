"""Connections that are busy for a long time, and then end or fall back in each way.

    translated.py serve PORT DIR ENDINGS
    translated.py dial PORT DIR ENDINGS

ENDINGS are separated by commas, with one connection for each. The two ends exchange bytes until DIR/end exists, go on one way after a half-close until
DIR/finish exists, and print what their last calls return.
"""

import ctypes
import os
import select
import socket
import subprocess
import sys
import threading
import time

OPTIONS = {
    "on": (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
    "idle": (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    "interval": (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
    "count": (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
}
BLOCK = 1000
# Prints the options of an inherited socket as the kernel reports them.
READ = f"import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); print([s.getsockopt(*o) for o in {list(OPTIONS.values())}])"


def exists(name):
    return os.path.exists(os.path.join(sys.argv[3], name))


def receive(connection, size):
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise EOFError
        received += part
    return received


def exchange(connection, is_client):
    """Until the client says that it is the last one."""
    goes_on = True
    while goes_on:
        if is_client:
            time.sleep(0.02)
            goes_on = not exists("end")
            connection.sendall(bytes([goes_on]))
            receive(connection, 1)
        else:
            goes_on = receive(connection, 1) == b"\1"
            connection.sendall(b"a")


def go_on_one_way(connection):
    is_last = False
    while not is_last:
        is_last = exists("finish")
        connection.sendall(b"b")
        time.sleep(0.02)
    connection.close()


def read_to_the_end(connection):
    received = set()
    while part := connection.recv(1000):
        received |= set(part)
    return f"{bytes(sorted(received))} and the end, then {connection.recv(1)}"


def watch_by_poll(connection, _):
    poll = select.poll()
    poll.register(connection, select.POLLIN | select.POLLRDHUP)
    return lambda wait: [events for _, events in poll.poll(1000 * wait)]


def watch_by_epoll(connection, flags):
    epoll = select.epoll()
    epoll.register(connection, select.EPOLLIN | select.EPOLLRDHUP | flags)
    return lambda wait: [events for _, events in epoll.poll(wait)]


def watch_by_select(connection, _):
    return lambda wait: [len(ready) for ready in select.select([connection], [], [], wait)]


WATCHED = {
    "closes to poll": (watch_by_poll, 0),
    "closes to epoll": (watch_by_epoll, 0),
    "closes to an edge": (watch_by_epoll, select.EPOLLET),
    "closes to select": (watch_by_select, 0),
}


def watch(connection, action):
    """What is told of the end of a stream: when it comes, and afterwards."""
    way, flags = WATCHED[action]
    ask = way(connection, flags)
    first = ask(30)
    return [first, connection.recv(1), ask(0.1), connection.recv(1)]


def exchange_blocks(connection, is_client):
    for _ in range(50):
        if is_client:
            connection.sendall(b"c" * BLOCK)
        receive(connection, BLOCK)
        if not is_client:
            connection.sendall(b"c" * BLOCK)


def fork():
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    return child


def options(connection):
    return [connection.getsockopt(*option) for option in OPTIONS.values()]


def set_some(connection, notes):
    """Reads and sets the options of keepalive."""
    notes.append(("as it came", options(connection)))
    connection.setsockopt(*OPTIONS["idle"], 1234)
    connection.setsockopt(*OPTIONS["count"], 5)
    notes.append(("set", options(connection)))
    for value in (0, 40000):
        try:
            connection.setsockopt(*OPTIONS["idle"], value)
        except OSError as error:
            notes.append((value, error.errno))
    connection.setsockopt(*OPTIONS["on"], 1)
    notes.append(("on", options(connection)))
    libc = ctypes.CDLL(None, use_errno=True)
    value, size = ctypes.c_uint16(0), ctypes.c_uint(2)
    libc.getsockopt(connection.fileno(), *OPTIONS["idle"], ctypes.byref(value), ctypes.byref(size))
    notes.append(("two bytes", value.value, size.value))


def end(connection, ending, is_client):
    notes = []
    exchange(connection, is_client)
    actor, action = ending.split(maxsplit=1)
    acts = (actor == "client") == is_client
    try:
        if action == "sets options":
            set_some(connection, notes)
            connection.close()
        elif action in WATCHED:
            if acts:
                connection.close()
            else:
                notes += watch(connection, action)
        elif action == "dies":
            if acts:
                os.kill(os.getpid(), 9)
            notes.append(read_to_the_end(connection))
        elif action == "closes":
            if acts:
                connection.close()
            else:
                notes.append(read_to_the_end(connection))
        elif action == "shuts down":
            if acts:
                connection.shutdown(socket.SHUT_WR)
                notes.append(read_to_the_end(connection))
            else:
                notes.append(read_to_the_end(connection))
                go_on_one_way(connection)
        elif action == "forks":
            child = fork() if acts else None
            exchange_blocks(connection, is_client)
            if child:
                os.kill(child, 9)
                os.waitpid(child, 0)
            number = str(connection.fileno())
            raw = subprocess.run([sys.executable, "-SE", "-c", READ, number], pass_fds=[int(number)], env={}, stdout=subprocess.PIPE)
            notes.append(raw.stdout)
            notes.append("done")
    except (OSError, EOFError) as error:
        notes.append(repr(error))
    # Write in one piece, because other threads write too.
    os.write(1, f"{ending} {notes}\n".encode())


def main():
    is_client = sys.argv[1] == "dial"
    address = ("127.0.0.1", int(sys.argv[2]))
    listener = None if is_client else socket.create_server(address)
    print("ready", flush=True)
    threads = []
    # The order is the same at both ends, since one connects after the other.
    for ending in sys.argv[4].split(","):
        connection = socket.create_connection(address) if is_client else listener.accept()[0]
        threads.append(threading.Thread(target=end, args=(connection, ending, is_client)))
        threads[-1].start()
    for thread in threads:
        thread.join()


main()
