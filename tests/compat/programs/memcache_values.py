"""Stores random values of 0 B to 1 MB in memcached over many connections at once and reads them back, each over
another connection than it was written by. Prints one digest of all that came back. Begins when the file GATE exists,
after a few small exchanges on every connection.

    memcache_values.py PORT CONNECTIONS VALUES_PER_CONNECTION GATE
"""

import asyncio
import hashlib
import os
import random
import sys

HOLD = 0.5  # seconds that the connections stay open at the end, so that the status shows them


def value(connection, index):
    source = random.Random(connection * 1000 + index)
    kind = source.random()
    size = source.randrange(0, 4096) if kind < 0.95 else source.randrange(4096, 1_000_000)
    return source.randbytes(size)


async def main(port, connections, count, gate):
    streams = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 21) for _ in range(connections)]

    async def warm_up(connection):
        reader, writer = streams[connection]
        while not os.path.exists(gate):
            writer.write(b"get nothing\r\n")
            if await reader.readline() != b"END\r\n":
                raise ValueError("a value that nobody stored")
            await asyncio.sleep(0.01)

    async def store(connection):
        reader, writer = streams[connection]
        for index in range(count):
            data = value(connection, index)
            writer.write(b"set k%d.%d 0 0 %d\r\n%s\r\n" % (connection, index, len(data), data))
            await writer.drain()
            answer = await reader.readline()
            if answer != b"STORED\r\n":
                raise ValueError(f"set: {answer!r}")

    async def load(connection):
        # Load the values that the next connection has stored.
        other = (connection + 1) % connections
        reader, writer = streams[connection]
        digest = hashlib.sha256()
        for index in range(count):
            writer.write(b"get k%d.%d\r\n" % (other, index))
            head = await reader.readline()
            size = int(head.split()[3])
            data = (await reader.readexactly(size + 2))[:-2]
            end = await reader.readline()
            if end != b"END\r\n" or data != value(other, index):
                raise ValueError(f"get k{other}.{index}: {head!r}, not what was stored")
            digest.update(data)
        return digest.hexdigest()

    await asyncio.gather(*(warm_up(connection) for connection in range(connections)))
    await asyncio.gather(*(store(connection) for connection in range(connections)))
    digests = await asyncio.gather(*(load(connection) for connection in range(connections)))
    await asyncio.sleep(HOLD)
    for _, writer in streams:
        writer.close()
    print(hashlib.sha256("".join(digests).encode()).hexdigest())


asyncio.run(main(*map(int, sys.argv[1:4]), sys.argv[4]))
