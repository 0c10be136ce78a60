// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Sends back all bytes as they arrive. The protocol has no message boundaries.

#include <shunt/service.h>

static int parse(struct shunt_socket *socket)
{
	__u32 length = shunt_available(socket);

	return length < SHUNT_MAX_MESSAGE ? length : SHUNT_MAX_MESSAGE;
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	shunt_echo(verdict);
}

SHUNT_SERVICE(.name = "echo", .parse = parse, .decide = decide);
