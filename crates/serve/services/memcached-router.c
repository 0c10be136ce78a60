// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Forwards memcached's requests, binary or text, to the backend of their key. What concerns no key is answered here;
// what concerns several keys or every server, and what may be answered or not (the quiet commands of the binary
// protocol), is refused.

#include <shunt/memcached.h>

#define SAY(verdict, text) shunt_write_all(verdict, text, sizeof(text) - 1)

enum opcode { QUIT = 0x07, NOOP = 0x0a };

// GET, SET, ADD, REPLACE, DELETE, INCREMENT, DECREMENT; GETK, APPEND, PREPEND; TOUCH, GAT: a bit each.
#define WITH_A_KEY (0x0000007full | 1ull << 0x0c | 1ull << 0x0e | 1ull << 0x0f | 1ull << 0x1c | 1ull << 0x1d)

static int parse(struct shunt_socket *socket)
{
	return memcached_message(socket);
}

static int parse_reply(struct shunt_socket *socket)
{
	return memcached_reply(socket);
}

// A response of the binary protocol to the request that is there.
SHUNT_INLINE void answer(struct shunt_verdict *verdict, struct memcached_header *header, __u8 status, const char *text,
			 __u32 length)
{
	header->magic = MEMCACHED_RESPONSE;
	header->key_length[0] = header->key_length[1] = header->extras_length = 0;
	header->status[0] = 0;
	header->status[1] = status;
	header->body_length[0] = header->body_length[1] = header->body_length[2] = 0;
	header->body_length[3] = length;
	__builtin_memset(header->cas, 0, sizeof(header->cas));
	shunt_write_all(verdict, header, sizeof(*header));
	shunt_write_all(verdict, text, length);
}

SHUNT_INLINE void decide_binary(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct memcached_header header;
	__u32 key;

	if (memcached_binary(socket, MEMCACHED_REQUEST, &header) <= 0) {
		verdict->action = SHUNT_MORE;
		return;
	}
	key = (__u32)header.key_length[0] << 8 | header.key_length[1];
	if (header.opcode < 64 && WITH_A_KEY >> (header.opcode & 63) & 1 && key) {
		if (MEMCACHED_HEADER + header.extras_length + key > shunt_available(socket))
			verdict->action = SHUNT_MORE;
		else
			shunt_forward_by_bytes(verdict, MEMCACHED_HEADER + header.extras_length, key);
	} else if (header.opcode == NOOP) {
		answer(verdict, &header, 0, "", 0);
	} else if (header.opcode == QUIT) {
		verdict->action = SHUNT_CLOSE;
		answer(verdict, &header, 0, "", 0);
	} else {
		shunt_refuse(verdict, SHUNT_UNKNOWN_COMMAND);
	}
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct memcached_request request;

	if (memcached_is_binary(socket)) {
		decide_binary(socket, verdict);
	} else if (memcached_request(socket, &request) <= 0) {
		verdict->action = SHUNT_MORE;
	} else if (request.key.length && !request.several) {
		shunt_forward_by_bytes(verdict, request.key.offset, request.key.length);
		verdict->one_way = request.quiet;
	} else if (request.command == MEMCACHED_LETTERS("version")) {
		SAY(verdict, "VERSION 1.6 shunt\r\n");
	} else if (request.command == MEMCACHED_LETTERS("quit")) {
		shunt_close(verdict);
	} else {
		shunt_refuse(verdict, SHUNT_UNKNOWN_COMMAND);
	}
}

SHUNT_INLINE void refuse_binary(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict)
{
	struct memcached_header header;

	if (shunt_peek(socket, 0, &header, sizeof(header)))
		return;
	switch (why) {
	case SHUNT_UNKNOWN_COMMAND:
		answer(verdict, &header, 0x81, "shunt forwards commands with one key", 36);
		break;
	case SHUNT_TOO_LONG:
		answer(verdict, &header, 0x03, "too large", 9);
		break;
	case SHUNT_NO_BACKEND:
	case SHUNT_BACKEND_GONE:
		answer(verdict, &header, 0x86, "no backend", 10); // temporary failure
		break;
	default:
		answer(verdict, &header, 0x04, "malformed", 9);
	}
}

static void refuse(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict)
{
	if (memcached_is_binary(socket)) {
		refuse_binary(socket, why, verdict);
		return;
	}
	switch (why) {
	case SHUNT_UNKNOWN_COMMAND:
		SAY(verdict, "SERVER_ERROR shunt forwards commands with one key\r\n");
		break;
	case SHUNT_TOO_LONG:
		SAY(verdict, "SERVER_ERROR object too large for cache\r\n");
		break;
	case SHUNT_NO_BACKEND:
		SAY(verdict, "SERVER_ERROR there is no backend\r\n");
		break;
	case SHUNT_BACKEND_GONE:
		SAY(verdict, "SERVER_ERROR the backend is gone\r\n");
		break;
	default:
		SAY(verdict, "CLIENT_ERROR bad command line format\r\n");
	}
}

SHUNT_SERVICE(.name = "memcached-router", .parse = parse, .parse_reply = parse_reply, .decide = decide,
	      .refuse = refuse, .max_message = 1024 * 1024 + 4096);
