"""Trio, and AnyIO on asyncio and on Trio: echoes of half-closed streams, and receives that are cancelled and go on.
structured.py PORT"""
import hashlib
import sys

import anyio
import trio

PORT = int(sys.argv[1])
CLIENTS = 20


async def echo(stream):
    async with stream:
        async for data in stream:
            await stream.send_all(data)


async def pour(number, sums):
    sent, received = hashlib.md5(), hashlib.md5()
    stream = await trio.open_tcp_stream("127.0.0.1", PORT)
    async with stream, trio.open_nursery() as nursery:

        async def send():
            for turn in range(40):
                data = bytes([number, turn]) * (10_000 + number * 500)
                sent.update(data)
                await stream.send_all(data)
            await stream.send_eof()

        nursery.start_soon(send)
        with trio.fail_after(30):
            async for data in stream:
                received.update(data)
    sums[number] = sent.digest() == received.digest()


async def be_cancelled():
    """Nobody has sent anything when the time is over; what is sent afterwards comes whole."""
    cancelled = 0
    async with await trio.open_tcp_stream("127.0.0.1", PORT) as stream:
        for turn in range(100):
            with trio.move_on_after(0.002) as scope:
                await stream.receive_some(10)
            cancelled += scope.cancelled_caught
            await stream.send_all(b"turn %d" % turn)
            assert await stream.receive_some(100) == b"turn %d" % turn
    print("cancelled", cancelled)


async def with_trio():
    async with trio.open_nursery() as nursery:

        async def serve(task_status):
            await trio.serve_tcp(echo, PORT, host="127.0.0.1", task_status=task_status)

        await nursery.start(serve)
        sums = {}
        async with trio.open_nursery() as clients:
            for number in range(CLIENTS):
                clients.start_soon(pour, number, sums)
        print("right", sum(sums.values()))
        await be_cancelled()
        nursery.cancel_scope.cancel()


async def with_anyio():
    async def shout(stream):
        async with stream:
            async for data in stream:
                await stream.send(data.upper())

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=PORT)
    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, shout)
        async with await anyio.connect_tcp("127.0.0.1", PORT) as stream:
            for turn in range(1000):
                await stream.send(b"turn %d" % turn)
                assert await stream.receive() == b"TURN %d" % turn
        group.cancel_scope.cancel()


trio.run(with_trio)
for backend in ("asyncio", "trio"):
    anyio.run(with_anyio, backend=backend)
    print(backend)
