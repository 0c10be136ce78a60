"""A broker that lies to every program that comes: messages of wrong kinds and lengths, wrong descriptors or none, memory of
another size or that could still shrink, answers that nobody asked for, floods. It seems to be awake, so that it is shown
sockets. The one lie that it does not tell is a whole link with a pair on it: that is what a broker is trusted with.

    false_broker.py SOCKET SEED VERSION
"""

import fcntl
import mmap
import os
import random
import select
import socket
import struct
import sys

MAGIC = 0x544E4853
LINK_BYTES = 4096 + 2 * 64 * 64 + 64 * 2 * 128 + 64 * 2 * 4096
F_ADD_SEALS, SHRINK_AND_GROW, WRITERS = 1033, 2 | 4, 16 | 1


def memory(source):
    """A memfd that is no link: of another size, or not sealed."""
    fd = os.memfd_create("false", os.MFD_ALLOW_SEALING)
    if source.random() < 0.5:
        os.ftruncate(fd, LINK_BYTES)
        fcntl.fcntl(fd, F_ADD_SEALS, source.choice([0, 2, 4]))
    else:
        os.ftruncate(fd, source.choice([0, 4096, LINK_BYTES - 4096, LINK_BYTES + 4096]))
        fcntl.fcntl(fd, F_ADD_SEALS, SHRINK_AND_GROW)
    return fd


def lie(source, version, tickets):
    ticket = source.choice(tickets + [source.getrandbits(64)])
    descriptor = source.choice([memory, lambda _: os.eventfd(0), lambda _: os.open("/dev/null", os.O_RDWR)])
    messages = [
        (1, struct.pack("<Q", 1), 1),
        (2, struct.pack("<QQQII", source.randrange(3), 1, source.choice([4096, 0, 3, 1 << 40, 262144]), source.randrange(3), 0), 1),
        (3, struct.pack("<QII", source.randrange(3), source.choice([0, 63, 64, 1 << 31]), 0), 1),
        (4, struct.pack("<QQQIIII", ticket, 0, source.randrange(3), source.choice([0, 63, 64, 1 << 31]), source.randrange(3), *[source.choice([0, 1, 60, 1 << 31]) for _ in range(2)]), 0),
        (5, struct.pack("<QII", ticket, source.choice([0, 5, 9, 77, 1 << 20]), 0), 0),
        (6, struct.pack("<Q", source.randrange(3)), 0),
        (8, struct.pack("<QII", source.randrange(3), source.randrange(3), 0), 0),
        (16, struct.pack("<Q", 10), 0),
    ]
    kind, body, count = source.choice(messages)
    message = struct.pack("<IHH", MAGIC, version, kind) + body
    # Most wrong messages are whole, because the program closes the connection after one that is
    # not.
    spoil = source.random()
    if spoil < 0.01:
        message = message[: source.randrange(len(message))]
    elif spoil < 0.02:
        message += bytes(source.randrange(1, 600))
    elif spoil < 0.03:
        message = struct.pack("<IHH", source.choice([0, MAGIC]), source.randrange(20), source.randrange(30)) + body
    elif spoil < 0.05:
        count = source.randrange(6)
    return message, [descriptor(source) for _ in range(count)]


def welcome(client, version):
    """Shows the program a board, as a broker does, so that it seems to be awake."""
    fd = os.memfd_create("false-board", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    board = mmap.mmap(fd, 4096)
    fcntl.fcntl(fd, F_ADD_SEALS, SHRINK_AND_GROW | WRITERS)
    try:
        socket.send_fds(client, [struct.pack("<IHHQ", MAGIC, version, 1, 1)], [fd])
        struct.pack_into("<Q", board, 0, 1)
    except OSError:
        pass
    os.close(fd)
    return board


def serve(listener, source, version):
    poll, clients = select.poll(), {}
    poll.register(listener, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                client, _ = listener.accept()
                client.setblocking(False)
                poll.register(client, select.POLLIN)
                clients[client.fileno()] = [client, None, 0, [0]]
                continue
            client, board, taken, tickets = clients[fd]
            try:
                message, fds, _, _ = socket.recv_fds(client, 4096, 8)
            except OSError:
                message, fds = b"", []
            if not message:
                poll.unregister(client)
                client.close()
                del clients[fd]
                continue
            kind = struct.unpack_from("<H", message, 6)[0]
            if kind == 1 and fds:
                clients[fd][1] = board = welcome(client, version)
            if kind == 2:
                tickets.append(struct.unpack_from("<Q", message, 8)[0])
            for one in fds:
                os.close(one)
            clients[fd][2] = taken = taken + 1
            for _ in range(source.choice([0, 1, 2, 5, 500])):
                message, fds = lie(source, version, tickets)
                try:
                    socket.send_fds(client, [message], fds)
                    sent = struct.unpack_from("<Q", board, 0)[0] + 1 if board else 0
                except OSError:
                    sent = source.getrandbits(64)
                if board:
                    struct.pack_into("<Q", board, 0, sent)
                    struct.pack_into("<Q", board, 8, source.choice([taken, taken, taken, 0, (1 << 64) - 1]))
                    struct.pack_into("<Q", board, 16, source.randrange(4))
                for one in fds:
                    os.close(one)
            if source.random() < 0.05:
                poll.unregister(client)
                client.close()
                del clients[fd]


def main():
    path, seed, version = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    print("lying", flush=True)
    serve(listener, random.Random(seed), version)


main()
