// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Messages with their length in four bytes in front, the most significant first, and then a key of four bytes, by which
// each goes to its backend. Replies have their length in front too, and a message whose backend is gone is sent to
// another. A message of no more than a length is answered with one.

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
