"""Connections that one end closes, or shuts down, by a system call that no library sees, with bytes unread. The other end tells what
it is told of each.

raw_end.py server PORT DIRECTORY
raw_end.py client PORT DIRECTORY CALL    CALL: close or shutdown
"""

import ctypes
import mmap
import os
import select
import socket
import sys
import time

CONNECTIONS = 20
ROUNDS = 100
CLOSE, SHUTDOWN = 3, 48


def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.02)


def raw(number, fd, how):
    """The system call itself: its number into eax, syscall, ret."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8" + number.to_bytes(4, "little") + b"\x0f\x05\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    call = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long)(address)
    assert call(fd, how) == 0


def serve(port, directory):
    listener = socket.create_server(("127.0.0.1", port), backlog=CONNECTIONS)
    print("listening", flush=True)
    connections = [listener.accept()[0] for _ in range(CONNECTIONS)]
    for _ in range(ROUNDS):
        for connection in connections:
            connection.sendall(connection.recv(64))
    waiter = select.epoll()
    for connection in connections:
        connection.setblocking(False)
        # Bytes that are sent must arrive immediately.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        waiter.register(connection, select.EPOLLIN)
    print("used", flush=True)
    wait_for(f"{directory}/send")
    for connection in connections:
        connection.sendall(b"x" * 100)
    print("sent", flush=True)
    told = {}
    by_number = {connection.fileno(): connection for connection in connections}
    while by_number:
        for number, _ in waiter.poll():
            connection = by_number.pop(number)
            try:
                what = "an end" if connection.recv(64) == b"" else "bytes"
            except OSError as error:
                what = os.strerror(error.errno)
            told[what] = told.get(what, 0) + 1
            waiter.unregister(number)
    print(told, flush=True)


def connect(port, directory, call):
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    for number in range(ROUNDS):
        for connection in connections:
            connection.sendall(str(number).encode())
            assert connection.recv(64) == str(number).encode()
    wait_for(f"{directory}/end")
    for connection in connections:
        if call == "close":
            raw(CLOSE, connection.fileno(), 0)
        else:
            raw(SHUTDOWN, connection.fileno(), socket.SHUT_WR)
    wait_for(f"{directory}/over")
    for connection in connections:
        if call == "close":
            connection.detach()
        else:
            assert connection.recv(200) == b"x" * 100
    print("done", flush=True)


if sys.argv[1] == "server":
    serve(int(sys.argv[2]), sys.argv[3])
else:
    connect(int(sys.argv[2]), sys.argv[3], sys.argv[4])
