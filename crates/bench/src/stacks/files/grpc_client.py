# Threads with a channel and one pending call each.
import time

import grpc

times = []


def ask(_, end):
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel("127.0.0.1:@server@", options) as channel:
        echo = channel.unary_unary("/bench.Echo/Echo")
        while (begin := time.perf_counter()) < end:
            assert echo(b"x" * 100) == b"x" * 100
            times.append(time.perf_counter() - begin)
