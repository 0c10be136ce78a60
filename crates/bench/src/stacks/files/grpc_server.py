# An echo server with gRPC's threads.
from concurrent import futures

import grpc

echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("bench.Echo", {"Echo": echo})])
server.add_insecure_port("127.0.0.1:@server@")
server.start()
server.wait_for_termination()
