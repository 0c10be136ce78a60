# Threads with a connection and one pending message each: published, delivered, acknowledged.
import time

import pika

times = []


def ask(_, end):
    connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", @rabbitmq@))
    channel = connection.channel()
    queue = channel.queue_declare("", exclusive=True).method.queue
    deliveries = channel.consume(queue)
    while (begin := time.perf_counter()) < end:
        channel.basic_publish("", queue, b"x" * 100)
        method, _, body = next(deliveries)
        channel.basic_ack(method.delivery_tag)
        assert body == b"x" * 100
        times.append(time.perf_counter() - begin)
    connection.close()
