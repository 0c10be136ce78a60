"""ZeroMQ: workers behind a broker in the middle, asked by many, and what is published to subscribers.

    zero.py server PORT     a ROUTER for those who ask, on PORT; workers on PORT + 1; a PUB socket on PORT + 2
    zero.py worker PORT
    zero.py client PORT CLIENTS MESSAGES GATE
"""

import hashlib
import os
import sys

import zmq

from clients import digest_of

PATIENCE_MS = 10_000


def address(port):
    return f"tcp://127.0.0.1:{port}"


def serve(port):
    context = zmq.Context()
    front, back, news = context.socket(zmq.ROUTER), context.socket(zmq.DEALER), context.socket(zmq.PUB)
    for number, sock in enumerate((front, back, news)):
        sock.bind(address(port + number))
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    while True:
        for sock, _ in poller.poll():
            parts = sock.recv_multipart()
            (back if sock is front else front).send_multipart(parts)
            if sock is back:
                news.send_multipart([parts[-2], parts[-1]])


def work(port):
    sock = zmq.Context().socket(zmq.REP)
    sock.connect(address(port + 1))
    while True:
        name, message = sock.recv_multipart()
        sock.send_multipart([name, hashlib.md5(message).hexdigest().encode() + message[:100]])


def ask(context, port, client, count, gate):
    news, sock = context.socket(zmq.SUB), context.socket(zmq.REQ)
    for each in (news, sock):
        each.rcvtimeo = PATIENCE_MS
        each.linger = 0
    name = b"client %d." % client
    news.subscribe(name)
    news.connect(address(port + 2))
    sock.connect(address(port))
    is_over = False
    while not is_over:
        is_over = os.path.exists(gate)
        digest = hashlib.md5()
        for turn in range(count):
            message = b"%d.%d some bytes " % (client, turn) * (1 + turn * 7 % 997)
            sock.send_multipart([name, message])
            answer = sock.recv_multipart()
            assert answer == [name, hashlib.md5(message).hexdigest().encode() + message[:100]], answer
            digest.update(answer[1])
    # A subscription takes time, so read until the last published message arrives.
    heard = news.recv_multipart()
    while heard != answer:
        heard = news.recv_multipart()
    return digest.hexdigest()


def main():
    role, port = sys.argv[1], int(sys.argv[2])
    if role != "client":
        return {"server": serve, "worker": work}[role](port)
    clients, count, gate = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    context = zmq.Context()
    digest_of(clients, lambda client: ask(context, port, client, count, gate))


main()
