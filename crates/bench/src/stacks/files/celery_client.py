# Threads with one pending task each.
import time

from celery import Celery

app = Celery(broker="redis://127.0.0.1:@redis@/0", backend="redis://127.0.0.1:@redis@/1")
times = []


def ask(thread, end):
    while (begin := time.perf_counter()) < end:
        assert app.send_task("add", (thread, 1)).get(timeout=30) == thread + 1
        times.append(time.perf_counter() - begin)
