"""Bad input for the broker and for a peer.

    rubbish.py broker SOCKET       random messages to the broker's control socket, and truncated real ones
    rubbish.py scribbler PORT DIR  joins an echo server on PORT, then writes rubbish all over every link it shares
"""

import array
import os
import random
import re
import socket
import sys
import time


def connect(path):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(2)
    sock.connect(path)
    return sock


def to_the_broker(path):
    source = random.Random(1)
    read_end, write_end = os.pipe()
    tcp = socket.socket()
    descriptors = [read_end, write_end, tcp.fileno(), os.open("/dev/null", os.O_RDWR), os.memfd_create("rubbish")]
    sent = 0
    for _ in range(300):
        sock = connect(path)
        for _ in range(source.randrange(1, 8)):
            size = source.choice([0, 1, 3, 4, 8, 16, 24, 32, 64, 128, 1000, 4096])
            message = bytearray(source.randbytes(size))
            # Half of the messages begin like a valid one, with small numbers in the header.
            if source.random() < 0.5 and size >= 4:
                message[:4] = bytes([source.randrange(16), 0, source.randrange(4), 0])
            count = source.choice([0, 0, 0, 1, 2, 5])
            rights = array.array("i", source.choices(descriptors, k=count))
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else []
            try:
                sock.sendmsg([message], control)
                sent += 1
            except OSError:
                break  # the broker has hung up on us, as it should
        if source.random() < 0.3:
            sock.setblocking(False)
            try:
                sock.recv(4096)
            except OSError:
                pass
        sock.close()
    # Many clients that send nothing.
    silent = [connect(path) for _ in range(100)]
    for sock in silent:
        sock.close()
    print("sent", sent)


def links():
    """The shared mappings of links in this process."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.s .*memfd:shunt-link", line)
            if match:
                yield int(match[1], 16), int(match[2], 16)


def scribble(port, directory):
    source = random.Random(2)
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    gate = os.path.join(directory, "gate")
    end = time.monotonic() + 10
    while not os.path.exists(gate):
        for sock in socks:
            sock.sendall(b"\0\0\0\x01x")
            got = b""
            while len(got) < 5:
                got += sock.recv(5 - len(got))
        if time.monotonic() > end:
            sys.exit("the connections never came onto shared memory")
    mapped = list(links())
    print("links", len(mapped), flush=True)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for _ in range(3000):
            for start, stop in mapped:
                # Mostly at the front, where the waiters and the headers of the lanes are.
                front = min(stop - start, 32768)
                span = front if source.random() < 0.9 else stop - start
                place = start + source.randrange(span // 8) * 8
                word = source.choice([0, 1, 1 << 63, (1 << 64) - 1, (1 << 63) - 1, source.getrandbits(64), 4096])
                memory.seek(place)
                memory.write(word.to_bytes(8, "little"))
            for sock in socks:
                # Our own connections may break in any way. Those of other processes must not.
                try:
                    sock.send(b"\0\0\0\x01x", socket.MSG_DONTWAIT)
                    sock.recv(64, socket.MSG_DONTWAIT)
                except OSError:
                    pass
    print("scribbled", flush=True)
    os._exit(0)


if sys.argv[1] == "broker":
    to_the_broker(sys.argv[2])
else:
    scribble(int(sys.argv[2]), sys.argv[3])
