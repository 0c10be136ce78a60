"""A hostile peer of an echo server: it joins as any program under shunt does, and then writes anything to everything that
it can reach: the words and rings of the lanes that it shares, the waiters' words, its page, the doorbells, and the control
socket.

    hostile.py PORT SEED ROUNDS VERSION

Each round makes a connection, brings it onto shared memory, spoils it, and leaves it in some way. What becomes of these
connections is of no interest; that nobody else's suffer is. Afterwards it keeps what it still has, and does nothing.
"""

import array
import fcntl
import os
import random
import re
import signal
import socket
import struct
import sys
import time

LANES, LANE, CONNS = 4096 + 2 * 64 * 64, 256, 64
START, WORDS = 64, [0, 64, 72, 80, 88, 128, 192, 200]
RINGS = LANES + CONNS * 2 * LANE
RING = 256 * 1024
TOP = (1 << 64) - 1

source = None


def mappings(name):
    with open("/proc/self/maps") as maps:
        for line in maps:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.s .*memfd:" + name, line)
            if match:
                yield int(match[1], 16), int(match[2], 16)


class Memory:
    """All shared memory of this process, past the shim."""

    def __init__(self):
        self.file = open("/proc/self/mem", "r+b", buffering=0)

    def read(self, at):
        self.file.seek(at)
        return int.from_bytes(self.file.read(8), "little")

    def write(self, at, word):
        try:
            self.file.seek(at)
            self.file.write((word & TOP).to_bytes(8, "little"))
        except OSError:
            pass  # the link has just been unmapped

    def spoil(self, at):
        now = self.read(at)
        near = source.choice([1, 2, 63, 64, 4095, 4096, RING - 1, RING, RING + 1, 1 << 32])
        flags = source.choice([1 << 63, 1 << 62, 3 << 62])
        words = [0, 1, 2, 63, 64, 65, TOP, now + near, now - near, now | flags, now & ~flags, now ^ flags]
        self.write(at, source.choice(words + [source.getrandbits(64), source.getrandbits(32)]))


def spoil_lanes(memory, links):
    for _ in range(source.randrange(1, 16)):
        base, _ = source.choice(links)
        used = [conn for conn in range(CONNS) if any(memory.read(base + LANES + (2 * conn + s) * LANE + START) for s in (0, 1))]
        conn = source.choice(used) if used and source.random() < 0.9 else source.randrange(CONNS)
        memory.spoil(base + LANES + (2 * conn + source.randrange(2)) * LANE + source.choice(WORDS))


def spoil_beginnings(memory, links):
    """Lanes on which nothing has been sent yet begin where TCP will never come to, and have bytes."""
    for base, _ in links:
        for lane in range(2 * CONNS):
            at = base + LANES + lane * LANE
            if not memory.read(at + START):
                memory.write(at + START, 1 << source.choice([20, 40, 60]))
                memory.write(at, 100)
        for slot in range(2 * 64):
            memory.write(base + 4096 + slot * 64, TOP)


def spoil_waiters(memory, links):
    for _ in range(source.randrange(1, 8)):
        base, _ = source.choice(links)
        if source.random() < 0.1:
            memory.spoil(base + source.choice([0, 8]))
        else:
            slot = source.randrange(6) if source.random() < 0.8 else source.randrange(64)
            memory.spoil(base + 4096 + (source.randrange(2) * 64 + slot) * 64 + source.choice([0, 8]))


def spoil_rings(memory, links):
    for _ in range(source.randrange(1, 64)):
        base, end = source.choice(links)
        memory.write(base + RINGS + source.randrange((end - base - RINGS) // 8) * 8, source.getrandbits(64))


def spoil_page(memory):
    for base, end in mappings("shunt-page"):
        for _ in range(8):
            place = source.choice([0, 8, source.randrange(8, 160) * 8, source.randrange(80, (end - base) // 8) * 8])
            memory.spoil(base + place)


def descriptors(kind):
    """Copies of ours of that kind, which the shim does not know to be its own."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if kind in os.readlink(f"/proc/self/fd/{name}"):
                yield os.dup(int(name))
        except OSError:
            pass


def ring_doorbells():
    for bell in descriptors("anon_inode:[eventfd]"):
        for _ in range(source.randrange(4)):
            flags = source.choice([0, os.O_NONBLOCK])
            fcntl.fcntl(bell, fcntl.F_SETFL, flags)
            try:
                if source.random() < 0.5:
                    os.preadv(bell, [bytearray(8)], -1, os.RWF_NOWAIT)
                else:
                    fcntl.fcntl(bell, fcntl.F_SETFL, os.O_NONBLOCK)
                    os.write(bell, source.choice([0, 1, 1 << 62, TOP - 1]).to_bytes(8, "little"))
            except OSError:
                pass
        os.close(bell)


def talk_to_the_broker(version):
    for fd in descriptors("socket:"):
        sock = socket.socket(fileno=fd)
        if sock.family == socket.AF_UNIX and sock.type == socket.SOCK_SEQPACKET:
            for _ in range(source.randrange(8)):
                kind, body, rights = source.choice(messages())
                message = struct.pack("<IHH", 0x544E4853, version, kind) + body
                control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", rights))] if rights else []
                try:
                    sock.sendmsg([message], control, socket.MSG_DONTWAIT)
                except OSError:
                    pass
                for right in rights:
                    os.close(right)
        sock.close()


def messages():
    conn = source.randrange(64 if source.random() < 0.99 else 66)
    lies = [
        (3, struct.pack("<Q", source.getrandbits(32)), []),
        (4, struct.pack("<QII", source.randrange(12), conn, 0), []),
        (6, bytes(8), []),
        (8, struct.pack("<QII", source.randrange(12), source.randrange(2), source.randrange(2)), []),
        (16, bytes(8), []),
    ]
    if source.random() < 0.2:
        lies.append((5, struct.pack("<II", source.randrange(64), 0), [os.eventfd(source.randrange(3))]))
    if source.random() < 0.02:
        lies.append((source.randrange(20), source.randbytes(source.randrange(300)), []))
    return lies


def exchange(sock, size):
    sock.sendall(struct.pack(">I", size) + bytes(size))
    got = 0
    while got < size + 4:
        part = sock.recv(65536)
        if not part:
            return False
        got += len(part)
    return True


def poke(sock):
    sock.setblocking(False)
    try:
        if source.random() < 0.5:
            sock.send(struct.pack(">I", 100) + bytes(source.randrange(1, 100)))
        if source.random() < 0.5:
            sock.recv(source.choice([1, 100, 100_000]))
    except OSError:
        pass


def leave(sock, kept):
    way = source.random()
    if way < 0.15:
        kept.append(sock)
        return
    try:
        if way < 0.3:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way < 0.45:
            sock.shutdown(source.choice([socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR]))
    except OSError:
        pass
    sock.close()


def main():
    global source
    port, seed, rounds, version = map(int, sys.argv[1:])
    source = random.Random(seed)
    memory, kept, silent, spoilt = Memory(), [], [], 0
    for number in range(rounds):
        sock = socket.create_connection(("127.0.0.1", port))
        # A short timeout, because this program's own doorbells may be broken.
        sock.settimeout(0.1)
        try:
            # The connection is most likely on shared memory. Other states are tested too.
            for _ in range(4 if number % 20 == 0 else source.randrange(4, 24)):
                exchange(sock, source.choice([1, 10, 1000, 5000]))
        except OSError:
            pass
        links = list(mappings("shunt-link"))
        spoilt += bool(links)
        if links and number % 20 == 0:
            # The connection is paired in the meantime, and never used again.
            time.sleep(0.01)
            spoil_beginnings(memory, links)
            silent.append(sock)
            continue
        for _ in range(source.randrange(1, 4)):
            # The link may be removed during a write. There is nothing to corrupt then.
            links = list(mappings("shunt-link"))
            try:
                if links:
                    source.choice([spoil_lanes] * 6 + [spoil_waiters] * 2 + [spoil_rings])(memory, links)
                if source.random() < 0.3:
                    ring_doorbells()
                if source.random() < 0.1:
                    spoil_page(memory)
                # The broker disconnects a client that sends invalid messages, and gives it no links
                # for a while.
                if number >= rounds * 2 // 3 and source.random() < 0.3:
                    talk_to_the_broker(version)
            except OSError:
                pass
            poke(sock)
            for other in source.sample(kept, min(len(kept), 2)):
                poke(other)
        leave(sock, kept)
        if len(kept) > 16:
            kept.pop(source.randrange(len(kept))).close()
    print(f"spoilt {spoilt}", flush=True)
    signal.pause()


main()
