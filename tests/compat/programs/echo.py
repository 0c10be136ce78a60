"""Echo server and verifying clients: blocking sockets with threads, or asyncio streams.

    echo.py server threads|asyncio|asyncio-poll|uvloop PORT
    echo.py client threads|asyncio|uvloop PORT CONNECTIONS MESSAGES [SECONDS|FILE]

A message is a 4-byte big-endian length and that many bytes; the server sends back the same. The client compares
each with what it sent, and prints one digest over all connections, which depends on its arguments only. With
SECONDS or FILE it repeats the messages on the same connections until that time has passed, or there is that file. ECHO_HOST in the environment is
another address than 127.0.0.1.
"""

import asyncio
import hashlib
import os
import random
import selectors
import socket
import struct
import sys
import threading
import time

HOST = os.environ.get("ECHO_HOST", "127.0.0.1")
HOLD = 0.5  # seconds that the connections stay open after the last message, so that the status shows them


def until(word):
    """Whether it is over, to be asked again and again."""
    try:
        end = time.monotonic() + float(word)
        return lambda: time.monotonic() >= end
    except ValueError:
        return lambda: os.path.exists(word)


def messages(connection, count):
    """The messages of one connection: mostly small, a few large."""
    source = random.Random(connection)
    for _ in range(count):
        kind = source.random()
        size = source.randrange(1, 2000) if kind < 0.9 else source.randrange(1, 70_000)
        if kind > 0.995:
            size = source.randrange(500_000, 1_000_000)
        yield source.randbytes(size)


def receive_exactly(sock, size):
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 65536))
        if not part:
            raise EOFError(f"end of file after {len(parts)} of {size} bytes")
        parts += part
    return bytes(parts)


def serve_threads(port):
    def serve(sock):
        with sock:
            while True:
                head = sock.recv(4)
                if not head:
                    return
                if len(head) < 4:
                    head += receive_exactly(sock, 4 - len(head))
                (size,) = struct.unpack(">I", head)
                sock.sendall(head + receive_exactly(sock, size))

    listener = socket.create_server((HOST, port), backlog=128)
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


def client_threads(port, connections, count, is_over):
    digests = [None] * connections

    def run(connection):
        with socket.create_connection((HOST, port)) as sock:
            first = True
            while first or not is_over():
                digest = hashlib.sha256()
                for message in messages(connection, count):
                    # A separate thread sends large messages, so that neither end has to buffer them
                    # whole.
                    whole = struct.pack(">I", len(message)) + message
                    if len(whole) > 60_000:
                        sender = threading.Thread(target=sock.sendall, args=(whole,))
                        sender.start()
                    else:
                        sender = None
                        sock.sendall(whole)
                    answer = receive_exactly(sock, len(whole))
                    if sender:
                        sender.join()
                    if answer != whole:
                        raise ValueError(f"connection {connection}: other bytes came back")
                    digest.update(answer)
                digests[connection] = digest.hexdigest()
                first = False
            time.sleep(HOLD)

    threads = [threading.Thread(target=run, args=(connection,)) for connection in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return digests


async def serve_asyncio(port):
    async def serve(reader, writer):
        try:
            while True:
                head = await reader.readexactly(4)
                writer.write(head + await reader.readexactly(struct.unpack(">I", head)[0]))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            writer.close()

    server = await asyncio.start_server(serve, HOST, port, backlog=128)
    await server.serve_forever()


async def client_asyncio(port, connections, count, is_over):

    async def run(connection):
        reader, writer = await asyncio.open_connection(HOST, port)
        first = True
        while first or not is_over():
            digest = hashlib.sha256()
            for message in messages(connection, count):
                whole = struct.pack(">I", len(message)) + message
                writer.write(whole)
                answer = await reader.readexactly(len(whole))
                await writer.drain()
                if answer != whole:
                    raise ValueError(f"connection {connection}: other bytes came back")
                digest.update(answer)
            first = False
        await asyncio.sleep(HOLD)
        writer.close()
        await writer.wait_closed()
        return digest.hexdigest()

    return await asyncio.gather(*(run(connection) for connection in range(connections)))


def with_uvloop(work):
    import uvloop

    return uvloop.run(work)


def main():
    role, style, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "server":
        if style == "threads":
            return serve_threads(port)
        if style == "uvloop":
            return with_uvloop(serve_asyncio(port))
        selector = selectors.PollSelector() if style == "asyncio-poll" else selectors.DefaultSelector()
        loop = asyncio.SelectorEventLoop(selector)
        return loop.run_until_complete(serve_asyncio(port))
    connections, count = int(sys.argv[4]), int(sys.argv[5])
    is_over = until(sys.argv[6] if len(sys.argv) > 6 else "0")
    if style == "threads":
        digests = client_threads(port, connections, count, is_over)
    elif style == "uvloop":
        digests = with_uvloop(client_asyncio(port, connections, count, is_over))
    else:
        digests = asyncio.run(client_asyncio(port, connections, count, is_over))
    if None in digests:
        sys.exit("some connections failed")
    print(hashlib.sha256("".join(digests).encode()).hexdigest())


main()
