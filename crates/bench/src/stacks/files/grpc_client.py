# So many threads, each with a channel of its own and one call under way.
import json
import sys
import threading
import time

import grpc

threads, seconds = int(sys.argv[1]), float(sys.argv[2])
times = []


def ask(end):
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel("127.0.0.1:@server@", options) as channel:
        echo = channel.unary_unary("/bench.Echo/Echo")
        while (begin := time.perf_counter()) < end:
            assert echo(b"x" * 100) == b"x" * 100
            times.append(time.perf_counter() - begin)


begin = time.perf_counter()
running = [threading.Thread(target=ask, args=(begin + seconds,)) for _ in range(threads)]
for thread in running:
    thread.start()
for thread in running:
    thread.join()
took = time.perf_counter() - begin
times.sort()
percentile = lambda part: times[int(part * (len(times) - 1))] * 1e6
print(json.dumps({"operations": len(times), "seconds": took, "p50_us": percentile(0.5), "p99_us": percentile(0.99)}))
