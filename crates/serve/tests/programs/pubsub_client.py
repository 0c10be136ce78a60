"""Publishes and subscribes with the client of redis-py. Prints what it gets."""

import sys

import redis

client = redis.Redis(port=int(sys.argv[1]), socket_timeout=20)
print(client.ping(), client.publish("news", "nobody"))
subscriber = client.pubsub()
subscriber.subscribe("news", "other")
subscriber.psubscribe("n?ws")


def show():
    message = subscriber.get_message(timeout=20)
    print(message["type"], message["pattern"], message["channel"], message["data"])


for _ in range(3):
    show()
print(client.publish("news", b"\x00binary\r\n"))
show()
show()
print(client.pubsub_numsub("news", "none"), sorted(client.pubsub_channels()), client.pubsub_numpat())
subscriber.unsubscribe("other")
show()
subscriber.ping()
show()
subscriber.close()
