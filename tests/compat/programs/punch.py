"""A peer of an echo server that tries to punch holes into the memory that it shares with the server and with the broker.

    punch.py PORT

It exchanges messages until it has a link, and until that has been used. Then it says for each mapping what the kernel answered.
"""

import ctypes
import os
import re
import socket
import struct
import sys

MADV_REMOVE = 9
ROUNDS = 300

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mappings():
    with open("/proc/self/maps") as maps:
        for line in maps:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) (....) .*memfd:shunt-(link|page|board)", line)
            if match:
                yield match[4], int(match[1], 16)


def exchange(sock):
    sock.sendall(struct.pack(">I", 1000) + bytes(1000))
    got = 0
    while got < 1004:
        part = sock.recv(65536)
        assert part, "the server hung up"
        got += len(part)


def main():
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
        for _ in range(ROUNDS):
            exchange(sock)
        for name, start in mappings():
            failed = libc.madvise(start, 4096, MADV_REMOVE) != 0
            answer = os.strerror(ctypes.get_errno()) if failed else "punched"
            print(f"{name}: {answer}", flush=True)
        exchange(sock)


main()
