"""A backend and a client in Python.

    main.py serve NAME PORT framed|buffered PORT framed|buffered
    main.py call CLIENT PORT framed|buffered KEYS
"""

import collections
import sys
import threading

from peer import Peer, Wider
from peer.ttypes import Item, Refusal
from thrift.protocol.TBinaryProtocol import TBinaryProtocol, TBinaryProtocolFactory
from thrift.server.TServer import TThreadedServer
from thrift.Thrift import TApplicationException
from thrift.transport.TSocket import TServerSocket, TSocket
from thrift.transport.TTransport import (
    TBufferedTransport,
    TBufferedTransportFactory,
    TFramedTransport,
    TFramedTransportFactory,
)


class Backend:
    def __init__(self, name):
        self.name = name
        self.notes = collections.Counter()

    def whose(self, key, payload):
        return f"{self.name} {payload}"

    def named(self, key, items):
        return f"{self.name} {sum(sum(item.numbers) for list in items.values() for item in list)}"

    def wide(self, key):
        return self.name

    def mirror(self, key, payload):
        return payload

    def fail(self, key):
        raise Refusal(self.name, key)

    def note(self, key, client):
        self.notes[key, client] += 1

    def noted(self, key, client):
        return self.notes[key, client]

    def keyless(self, payload):
        return self.name


def serve(name, *places):
    processor = Peer.Processor(Backend(name))
    threads = []
    for port, form in zip(places[::2], places[1::2]):
        transports = TFramedTransportFactory() if form == "framed" else TBufferedTransportFactory()
        listener = TServerSocket("127.0.0.1", int(port))
        server = TThreadedServer(processor, listener, transports, TBinaryProtocolFactory(), daemon=True)
        threads.append(threading.Thread(target=server.serve))
    for thread in threads:
        thread.start()


def call(client, port, form, keys):
    socket = TSocket("127.0.0.1", int(port))
    transport = TFramedTransport(socket) if form == "framed" else TBufferedTransport(socket)
    transport.open()
    peer = Wider.Client(TBinaryProtocol(transport))
    for key in range(3 * int(keys)):
        print("whose", key, peer.whose(key, f"payload of {client}"))
    for key in range(int(keys)):
        items = {str(at): [Item(str(at), [at, key])] * 3 for at in range(4)}
        print("named", key, peer.named(f"name-{key}", items))
        print("wide", key, peer.wide(key << 33))
        for _ in range(key % 4):
            peer.note(key, client)
        print("noted", key, peer.noted(key, client))
        payload = bytes(at * 7 & 0xFF for at in range(key * key * 100))
        print("mirror", key, peer.mirror(key, payload) == payload)
        try:
            peer.fail(key)
        except Refusal as refusal:
            print("fail", key, refusal.who, refusal.code)
        try:
            peer.keyless("payload")
        except TApplicationException as exception:
            print("keyless", exception.type, exception.message)
        try:
            peer.unknown(key)
        except TApplicationException as exception:
            print("unknown", exception.type)
    payload = bytes(1_000_000)
    print("large", peer.mirror(1, payload) == payload)


{"serve": serve, "call": call}[sys.argv[1]](*sys.argv[2:])
