"""A server and a client of a message channel in one event loop of asyncio."""

import asyncio
import os
import tempfile

import shunt_channel


async def receive(end):
    """Returns the next message of a Receiver, Subscriber or Server."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return end.receive(timeout=0)
        except BlockingIOError:
            ready = loop.create_future()
            loop.add_reader(end, ready.set_result, None)
            try:
                await ready
            finally:
                loop.remove_reader(end)


async def main():
    path = os.path.join(tempfile.mkdtemp(), "calls")
    server = shunt_channel.Server(path)
    client = shunt_channel.Client(path, timeout=5)
    request = asyncio.create_task(receive(server))
    await asyncio.sleep(0)
    client.request(b"hello")
    print(bytes(await request).decode(), end="")


asyncio.run(main())
