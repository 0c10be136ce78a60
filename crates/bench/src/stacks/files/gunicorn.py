# Serves a row from PostgreSQL and a value from Redis, with a connection to each for every thread.
import threading

import flask
import psycopg2
import redis

app = flask.Flask(__name__)
ours = threading.local()


@app.get("/item/<int:number>")
def item(number):
    if not hasattr(ours, "database"):
        ours.database = psycopg2.connect("host=127.0.0.1 port=@postgres@ user=postgres dbname=postgres sslmode=disable")
        ours.database.autocommit = True
        ours.cache = redis.Redis(host="127.0.0.1", port=@redis@)
    with ours.database.cursor() as cursor:
        cursor.execute("select name, price from items where id = %s", (number,))
        name, price = cursor.fetchone()
    seen = ours.cache.incr(f"seen:{number}")
    return {"name": name, "price": price, "seen": seen}
