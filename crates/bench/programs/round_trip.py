"""Round trips with asyncio streams: `serve ADDRESS SIZE` or `load ADDRESS SIZE SECONDS`. Speaks to the bench as its own loads
do. ADDRESS is HOST:PORT or the path of a Unix socket."""

import asyncio
import json
import sys
import time

WARM = 0.3


async def serve(address, size):
    async def one(reader, writer):
        try:
            while True:
                writer.write(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    if "/" in address:
        server = await asyncio.start_unix_server(one, address)
        print("ready", address, flush=True)
    else:
        host, port = address.rsplit(":", 1)
        server = await asyncio.start_server(one, host, int(port))
        print("ready", "%s:%d" % server.sockets[0].getsockname()[:2], flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def load(address, size, seconds):
    if "/" in address:
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
    message = bytes(size)

    async def run(limit, latencies):
        before = time.perf_counter_ns()
        end = before + int(limit * 1e9)
        while before < end:
            writer.write(message)
            await reader.readexactly(size)
            now = time.perf_counter_ns()
            latencies.append(now - before)
            before = now

    await run(WARM, [])
    print("begin", flush=True)
    latencies = []
    begin = time.perf_counter()
    await run(seconds, latencies)
    elapsed = time.perf_counter() - begin
    latencies.sort()
    count = len(latencies)
    print(json.dumps({
        "operations": count,
        "seconds": elapsed,
        "p50_us": latencies[count // 2] / 1000,
        "p99_us": latencies[count * 99 // 100] / 1000,
    }), flush=True)
    sys.stdin.read()
    writer.close()


role, address, size, *rest = sys.argv[1:]
asyncio.run(serve(address, int(size)) if role == "serve" else load(address, int(size), float(rest[0])))
