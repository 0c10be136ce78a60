# Threads with a producer and one pending record of 100 B each.
import sys
import time

from confluent_kafka import Producer

times = []
failed = []


def produce(producer):
    producer.produce("items", b"x" * 100, callback=lambda error, _: error and failed.append(error))


def flush(producer):
    assert producer.flush(30) == 0 and not failed, failed


def ask(thread, end):
    while (begin := time.perf_counter()) < end:
        produce(producers[thread])
        flush(producers[thread])
        times.append(time.perf_counter() - begin)


# The first record makes the producers look up the topic's broker.
options = {"bootstrap.servers": "127.0.0.1:@kafka@", "acks": "all", "linger.ms": 0}
producers = [Producer(options) for _ in range(int(sys.argv[1]))]
for first in (produce, flush):
    for producer in producers:
        first(producer)
