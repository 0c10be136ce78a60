"""redis-py through the router: commands alone, in pipelines, and with several keys.

    pyredis.py PORT COUNT
"""

import sys

import redis

client = redis.Redis("127.0.0.1", int(sys.argv[1]), socket_timeout=10)
keys = [f"user:{number}" for number in range(int(sys.argv[2]))]
for number, key in enumerate(keys):
    assert client.set(key, b"v" * number) is True
pipeline = client.pipeline(transaction=False)
for number, key in enumerate(keys):
    pipeline.get(key)
    pipeline.append(key, b"!")
    pipeline.strlen(key)
answers = pipeline.execute()
for number, key in enumerate(keys):
    assert answers[3 * number : 3 * number + 3] == [b"v" * number, number + 1, number + 1], key
assert client.mget(keys) == [b"v" * number + b"!" for number in range(len(keys))]
assert client.mget(keys[:2] + ["nothing"]) == [b"!", b"v!", None]
assert client.exists(*keys, "nothing") == len(keys)
assert client.mset({key: key for key in keys}) is True
assert client.mget(keys) == [key.encode() for key in keys]
assert client.touch("{a}1", "{a}2", *keys) == len(keys)
assert client.delete("nothing", *keys[:10]) == 10
assert client.unlink(*keys[5:20]) == 10
assert client.ping()
assert client.hset("{user:1}:hash", mapping={"a": 1, "b": 2}) == 2
assert client.hgetall("{user:1}:hash") == {b"a": b"1", b"b": b"2"}
for what in [lambda: client.sinter("a", "b"), lambda: client.execute_command("MGET"), lambda: client.keys()]:
    try:
        what()
    except redis.ResponseError as error:
        assert "shunt" in str(error), error
    else:
        sys.exit("an error was due")
assert client.get(keys[30]) == keys[30].encode()
