// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Routes messages that begin with their length and a key, each four bytes, big-endian. The key
// selects the backend. Replies begin with their length too. A message whose backend failed is sent
// to another one. A message that consists of its length alone is answered with an empty message.

#include <shunt/length.h>

static int parse(struct shunt_socket *socket)
{
	return length_message(socket, 4);
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	__u8 key[4] = {}, nothing[4] = {};

	if (shunt_available(socket) == sizeof(nothing))
		shunt_write_all(verdict, nothing, sizeof(nothing));
	else if (shunt_peek(socket, 4, key, sizeof(key)))
		shunt_refuse(verdict, SHUNT_MISSING_FIELD);
	else
		shunt_forward_by_number(verdict, (__u32)key[0] << 24 | key[1] << 16 | key[2] << 8 | key[3]);
}

SHUNT_SERVICE(.name = "length-router", .parse = parse, .parse_reply = parse, .decide = decide, .retry = 1);
