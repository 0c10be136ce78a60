// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Forwards Redis commands to the backend of their key, the first argument.
//
// If the key has braces, only the text in the first pair counts, as in a Redis cluster. DEL,
// EXISTS, UNLINK, TOUCH, MGET and MSET with several keys are split into one command for each key,
// and the answers are joined, so these commands are not atomic. PING and QUIT are answered here.
// All other commands are refused.

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

// Returns true for commands with one key, their first argument, and one reply.
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

// Returns true for commands that have only keys as arguments and that can be split by key.
SHUNT_FUNCTION int has_only_keys(struct resp_name *name)
{
	return IS("DEL") || IS("EXISTS") || IS("UNLINK") || IS("TOUCH") || IS("MGET");
#undef IS
}

// Forwards by the text in the key's first braces, or by the whole key if there is none.
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

// Decides about a bare line, which people and monitoring programs send. Empty lines are dropped.
SHUNT_INLINE void decide_line(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct resp_argument argument = { .length = shunt_available(socket) };
	struct resp_name name;
	__u8 last = 0;

	if (!argument.length || shunt_peek(socket, --argument.length, &last, 1) || last != '\n') {
		verdict->action = SHUNT_MORE;
		return;
	}
	if (argument.length && !shunt_peek(socket, argument.length - 1, &last, 1) && last == '\r')
		argument.length--;
	resp_name(socket, &argument, &name);
	if (resp_is(&name, "PING")) {
		SAY(verdict, PONG);
	} else if (resp_is(&name, "QUIT")) {
		verdict->action = SHUNT_CLOSE;
		SAY(verdict, OK);
	} else if (argument.length) {
		shunt_refuse(verdict, SHUNT_UNKNOWN_COMMAND);
	}
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct resp_argument argument = {};
	struct resp_name name;
	__u32 count = resp_count(socket);

	if (!count) {
		decide_line(socket, verdict);
		return;
	}
	if (!resp_next(socket, &argument) || !is_there(socket, &argument)) {
		verdict->action = SHUNT_MORE;
		return;
	}
	resp_name(socket, &argument, &name);
	if ((count >= 2 && has_one_key(&name)) || (count == 2 && (has_only_keys(&name) || resp_is(&name, "PFCOUNT"))) ||
	    (count == 3 && resp_is(&name, "MSET"))) {
		if (resp_next(socket, &argument) && is_there(socket, &argument))
			forward(socket, argument.offset, argument.length, verdict);
		else
			verdict->action = SHUNT_MORE;
	} else if ((count > 2 && has_only_keys(&name)) || (count > 3 && count % 2 && resp_is(&name, "MSET"))) {
		shunt_split(verdict);
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
		SAY(verdict, "-ERR shunt forwards commands with a key, as their first argument; see docs/serve.md\r\n");
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
	case SHUNT_NO_REPLY:
		SAY(verdict, "-ERR shunt: the backend does not answer\r\n");
		break;
	default:
		SAY(verdict, "-ERR Protocol error\r\n");
	}
}

// Builds the command for the next key, with the value if it is MSET.
static int part(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece)
{
	struct resp_argument argument = {};
	struct resp_name name;
	__u8 bytes[16], is_mset;
	__u32 begin, length;

	if (!resp_next(socket, &argument))
		return 0;
	resp_name(socket, &argument, &name);
	is_mset = resp_is(&name, "MSET");
	length = argument.length;
	if (length > sizeof(bytes) || shunt_peek(socket, argument.offset, bytes, length))
		return 0;
	if (share->state)
		argument.next = share->state;
	begin = argument.next;
	if (!resp_next(socket, &argument) || (is_mset && !resp_next(socket, &argument)))
		return 0;
	share->state = argument.next;
	shunt_put(piece, is_mset ? "*3\r\n$" : "*2\r\n$", 5);
	shunt_put_number(piece, length);
	shunt_put(piece, "\r\n", 2);
	shunt_put(piece, bytes, length);
	shunt_put(piece, "\r\n", 2);
	shunt_take(piece, begin, argument.next - begin);
	return 1;
}

// Joins the replies: arrays of one value become one array, integers their sum, and OKs one OK.
static int join(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece)
{
	__u32 length = shunt_available(socket);
	__u8 type = 0;
	__u64 number;

	shunt_peek(socket, 0, &type, 1);
	if (type == '*' && shunt_is(socket, 0, 4, "*1\r\n")) {
		if (!share->index) {
			shunt_put(piece, "*", 1);
			shunt_put_number(piece, share->count);
			shunt_put(piece, "\r\n", 2);
		}
		shunt_take(piece, 4, length - 4);
		return 1;
	}
	if (type == ':' && resp_number(socket, 0, &number) > 0) {
		share->state += number;
		if (share->index + 1 == share->count) {
			shunt_put(piece, ":", 1);
			shunt_put_number(piece, share->state);
			shunt_put(piece, "\r\n", 2);
		}
		return 1;
	}
	if (type == '+') {
		if (share->index + 1 == share->count)
			shunt_take(piece, 0, length);
		return 1;
	}
	shunt_take(piece, 0, length);
	return 0;
}

SHUNT_SERVICE(.name = "redis-router", .parse = parse, .parse_reply = parse_reply, .decide = decide,
	      .refuse = refuse, .part = part, .join = join, .max_message = 1024 * 1024);
