"""gRPC without generated code: calls with one answer and calls with streams both ways.

    calls_grpc.py server PORT
    calls_grpc.py client PORT CHANNELS CALLS GATE
"""

import hashlib
import os
import sys
from concurrent import futures

import grpc

from clients import digest_of

PATIENCE = 10


def one(request, context):
    return hashlib.md5(request).digest() + request


def many(requests, context):
    for request in requests:
        yield one(request, context)


def serve(port):
    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(one),
        "Many": grpc.stream_stream_rpc_method_handler(many),
    }
    server = grpc.server(futures.ThreadPoolExecutor(16))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def ask(port, number, count, gate):
    # Channels with the same arguments share one connection.
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("test.number", number)]) as channel:
        call_one, call_many = channel.unary_unary("/Test/One"), channel.stream_stream("/Test/Many")
        is_over = False
        while not is_over:
            is_over = os.path.exists(gate)
            digest = hashlib.md5()
            requests = [b"%d.%d some bytes " % (number, turn) * (1 + turn * 7 % 997) for turn in range(count)]
            for request in requests:
                answer = call_one(request, timeout=PATIENCE)
                assert answer == one(request, None)
                digest.update(answer)
            for request, answer in zip(requests, call_many(iter(requests), timeout=PATIENCE), strict=True):
                assert answer == one(request, None)
                digest.update(answer)
    return digest.hexdigest()


def main():
    port = int(sys.argv[2])
    if sys.argv[1] == "server":
        return serve(port)
    channels, count, gate = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    digest_of(channels, lambda number: ask(port, number, count, gate))


main()
