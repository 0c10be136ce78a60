// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Forwards Redis' commands to the backend of their key: those with one key, which is their first argument. Of a key with
// braces only what is in the first braces counts, as in a Redis cluster. What concerns no key is answered here, and what
// concerns several, or the connection itself, is refused.

#include <shunt/resp.h>

#define OK "+OK\r\n"
#define PONG "+PONG\r\n"

#define SAY(verdict, text) shunt_write_all(verdict, text, sizeof(text) - 1)

static int parse(struct shunt_socket *socket)
{
	return resp_command(socket);
}

static int parse_reply(struct shunt_socket *socket)
{
	return resp_reply(socket);
}

// Commands with one key, which is their first argument, and one reply.
SHUNT_FUNCTION int has_one_key(struct resp_name *name)
{
#define IS(text) resp_is(name, text)
	return IS("GET") || IS("SET") || IS("INCR") || IS("DECR") || IS("INCRBY") || IS("DECRBY") || IS("APPEND") ||
	       IS("SETEX") || IS("SETNX") || IS("PSETEX") || IS("GETSET") || IS("GETDEL") || IS("GETEX") ||
	       IS("STRLEN") || IS("GETRANGE") || IS("SETRANGE") || IS("INCRBYFLOAT") || IS("GETBIT") ||
	       IS("SETBIT") || IS("BITCOUNT") || IS("BITPOS") || IS("EXPIRE") || IS("EXPIREAT") || IS("PEXPIRE") ||
	       IS("PEXPIREAT") || IS("TTL") || IS("PTTL") || IS("PERSIST") || IS("TYPE") || IS("DUMP") ||
	       IS("RESTORE") || IS("HGET") || IS("HSET") || IS("HSETNX") || IS("HMGET") || IS("HMSET") ||
	       IS("HDEL") || IS("HLEN") || IS("HKEYS") || IS("HVALS") || IS("HGETALL") || IS("HEXISTS") ||
	       IS("HINCRBY") || IS("HINCRBYFLOAT") || IS("HSTRLEN") || IS("HSCAN") || IS("LPUSH") || IS("RPUSH") ||
	       IS("LPUSHX") || IS("RPUSHX") || IS("LPOP") || IS("RPOP") || IS("LLEN") || IS("LINDEX") ||
	       IS("LINSERT") || IS("LRANGE") || IS("LREM") || IS("LSET") || IS("LTRIM") || IS("LPOS") ||
	       IS("SADD") || IS("SREM") || IS("SCARD") || IS("SISMEMBER") || IS("SMISMEMBER") || IS("SMEMBERS") ||
	       IS("SPOP") || IS("SRANDMEMBER") || IS("SSCAN") || IS("ZADD") || IS("ZREM") || IS("ZCARD") ||
	       IS("ZCOUNT") || IS("ZINCRBY") || IS("ZRANGE") || IS("ZREVRANGE") || IS("ZRANGEBYSCORE") ||
	       IS("ZRANK") || IS("ZREVRANK") || IS("ZSCORE") || IS("ZMSCORE") || IS("ZPOPMIN") || IS("ZPOPMAX") ||
	       IS("ZSCAN") || IS("XADD") || IS("XLEN") || IS("XRANGE") || IS("XDEL") || IS("PFADD") ||
	       IS("GEOADD") || IS("GEOPOS") || IS("GEODIST");
}

// Commands with keys only. With one key they are as the others.
SHUNT_FUNCTION int has_only_keys(struct resp_name *name)
{
	return IS("DEL") || IS("EXISTS") || IS("UNLINK") || IS("TOUCH") || IS("MGET") || IS("PFCOUNT");
#undef IS
}

// What is in the first braces, if there is something.
SHUNT_INLINE void forward(struct shunt_socket *socket, __u32 offset, __u32 length, struct shunt_verdict *verdict)
{
	int open = shunt_find(socket, offset, offset + length, '{');

	if (open >= 0) {
		int close = shunt_find(socket, open, offset + length, '}');

		if (close > open + 1) {
			shunt_forward_by_bytes(verdict, open + 1, close - open - 1);
			return;
		}
	}
	shunt_forward_by_bytes(verdict, offset, length);
}

SHUNT_INLINE int is_there(struct shunt_socket *socket, const struct resp_argument *argument)
{
	return argument->offset + (__u64)argument->length <= shunt_available(socket);
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct resp_argument argument = {};
	struct resp_name name;
	__u32 count = resp_count(socket);

	if (!resp_next(socket, &argument) || !is_there(socket, &argument)) {
		verdict->action = SHUNT_MORE;
		return;
	}
	resp_name(socket, &argument, &name);
	if ((count >= 2 && has_one_key(&name)) || (count == 2 && has_only_keys(&name))) {
		if (resp_next(socket, &argument) && is_there(socket, &argument))
			forward(socket, argument.offset, argument.length, verdict);
		else
			verdict->action = SHUNT_MORE;
	} else if (resp_is(&name, "PING") && count == 1) {
		SAY(verdict, PONG);
	} else if (resp_is(&name, "QUIT")) {
		verdict->action = SHUNT_CLOSE;
		SAY(verdict, OK);
	} else {
		shunt_refuse(verdict, SHUNT_UNKNOWN_COMMAND);
	}
}

static void refuse(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict)
{
	switch (why) {
	case SHUNT_UNKNOWN_COMMAND:
		SAY(verdict, "-ERR shunt forwards commands with one key, as their first argument\r\n");
		break;
	case SHUNT_TOO_LONG:
		SAY(verdict, "-ERR shunt: the command is too long\r\n");
		break;
	case SHUNT_NO_BACKEND:
		SAY(verdict, "-ERR shunt: there is no backend\r\n");
		break;
	case SHUNT_BACKEND_GONE:
		SAY(verdict, "-ERR shunt: the backend is gone\r\n");
		break;
	default:
		SAY(verdict, "-ERR Protocol error\r\n");
	}
}

SHUNT_SERVICE(.name = "redis-router", .parse = parse, .parse_reply = parse_reply, .decide = decide,
	      .refuse = refuse, .max_message = 1024 * 1024);
