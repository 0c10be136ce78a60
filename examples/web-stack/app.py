"""Counts visits in Redis, and says how many there were."""

import redis
from flask import Flask

app = Flask(__name__)
cache = redis.Redis(host="127.0.0.1", port=6390)


@app.get("/")
def visit():
    return f"visit {cache.incr('visits')}\n"
