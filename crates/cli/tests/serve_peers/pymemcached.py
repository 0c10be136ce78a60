"""pymemcache through the router: every command of a client, with answers and without.

    pymemcached.py PORT
"""

import sys

from pymemcache.client.base import Client

client = Client(("127.0.0.1", int(sys.argv[1])), timeout=10)
keys = [f"py-{number}" for number in range(60)]
for quiet in [True, False]:
    for number, key in enumerate(keys):
        # Makes many requests without an answer, and then one with an answer.
        assert client.set(key, b"x" * number, noreply=quiet)
    assert client.get_many(keys) == {key: b"x" * number for number, key in enumerate(keys)}
    assert client.add(keys[0], b"no", noreply=False) is False
    assert client.replace(keys[0], b"5", noreply=quiet)
    assert client.append(keys[0], b"0", noreply=quiet)
    assert client.incr(keys[0], 7) == 57
    assert client.decr(keys[0], 60) == 0
    value, token = client.gets(keys[1])
    assert client.cas(keys[1], b"changed", token, noreply=False)
    assert client.cas(keys[1], b"again", token, noreply=False) is False
    assert client.touch(keys[2], 100, noreply=quiet)
    assert client.delete(keys[1], noreply=quiet)
    assert client.get(keys[1]) is None
    client.delete_many(keys, noreply=quiet)
    assert client.get_many(keys) == {}
assert client.version() == b"1.6 shunt"
client.quit()
