"""Celery: tasks through Redis to the processes of a worker, and their results back.

    celery --app tasks worker ...          with REDIS_PORT in the environment
    tasks.py TASKS                         the client
"""

import hashlib
import os
import sys

from celery import Celery, chord, group

address = f"redis://127.0.0.1:{os.environ['REDIS_PORT']}/0"
app = Celery("tasks", broker=address, backend=address)
app.conf.worker_prefetch_multiplier = 4

PATIENCE = 20


@app.task(name="tasks.digest")
def digest(text):
    return hashlib.md5(text.encode()).hexdigest()


@app.task(name="tasks.join")
def join(parts):
    return digest("".join(parts))


def main():
    texts = [f"{number} some text " * (1 + number * 7 % 97) for number in range(int(sys.argv[1]))]
    want = [hashlib.md5(text.encode()).hexdigest() for text in texts]
    # Tasks one after the other, many in parallel, and one that waits for many.
    one_by_one = [digest.delay(text).get(timeout=PATIENCE) for text in texts[:10]]
    assert one_by_one == want[:10], one_by_one
    at_once = group(digest.s(text) for text in texts)().get(timeout=PATIENCE)
    assert at_once == want, at_once
    print(chord(digest.s(text) for text in texts)(join.s()).get(timeout=PATIENCE))


if __name__ == "__main__":
    main()
