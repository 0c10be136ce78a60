// A row of PostgreSQL's and a value of Redis', by a pool and one connection.
const express = require("express");
const { Pool } = require("pg");
const { createClient } = require("redis");

const database = new Pool({ host: "127.0.0.1", port: @postgres@, user: "postgres", database: "postgres", max: 16 });
const cache = createClient({ url: "redis://127.0.0.1:@redis@" });
const app = express();

app.get("/item/:number", async (request, response) => {
  const number = Number(request.params.number);
  const { rows } = await database.query("select name, price from items where id = $1", [number]);
  const seen = await cache.incr(`seen:${number}`);
  response.json({ ...rows[0], seen });
});

cache.connect().then(() => app.listen(@node@, "127.0.0.1"));
