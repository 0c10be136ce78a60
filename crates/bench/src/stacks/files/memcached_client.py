# Threads with a connection each, which set a value and get ten in one request, from both servers.
import time

from pymemcache.client.base import Client

times = []


def ask(thread, end):
    client = Client(("127.0.0.1", @twemproxy@), no_delay=True)
    values = {f"{thread}:{key}": b"x" * 100 for key in range(10)}
    client.set_many(values, noreply=False)
    while (begin := time.perf_counter()) < end:
        assert client.set(f"{thread}:0", b"x" * 100, noreply=False)
        assert client.get_many(values) == values
        times.append(time.perf_counter() - begin)
    client.close()
