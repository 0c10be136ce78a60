// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Sends back each line.

#include <shunt/line.h>

static int parse(struct shunt_socket *socket)
{
	return line_message(socket);
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	shunt_echo(verdict);
}

SHUNT_SERVICE(.name = "line-echo", .parse = parse, .decide = decide);
