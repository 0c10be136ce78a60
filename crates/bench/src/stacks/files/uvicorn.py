# Serves a row from PostgreSQL and a value from Redis, with connection pools.
import asyncpg
import fastapi
import redis.asyncio

app = fastapi.FastAPI()


@app.on_event("startup")
async def begin():
    app.database = await asyncpg.create_pool(
        host="127.0.0.1", port=@postgres@, user="postgres", database="postgres", ssl=False, min_size=1, max_size=16
    )
    app.cache = redis.asyncio.Redis(host="127.0.0.1", port=@redis@)


@app.get("/item/{number}")
async def item(number: int):
    row = await app.database.fetchrow("select name, price from items where id = $1", number)
    seen = await app.cache.incr(f"seen:{number}")
    return {"name": row["name"], "price": row["price"], "seen": seen}
