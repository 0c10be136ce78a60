// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Sends back messages that begin with their length: four bytes, big-endian.

#include <shunt/length.h>

static int parse(struct shunt_socket *socket)
{
	return length_message(socket, 4);
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	shunt_echo(verdict);
}

SHUNT_SERVICE(.name = "length-echo", .parse = parse, .decide = decide);
