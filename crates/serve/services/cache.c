// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The kernel half of the cache: answers `get KEY` from the content store. It leaves every other
// command to user space (src/cache).

#define SHUNT_WITH_CONTENTS
#include <shunt/service.h>
#include <shunt/find.h>

// The most bytes of a line that is answered here, with a key of 250 bytes.
#define LINE 256

struct session {
	__u64 swallow; // bytes of data to discard
	__u64 get; // keys of a get follow
};

static int parse(struct shunt_socket *socket)
{
	__u32 length = shunt_available(socket);

	if (length < 7 || length > LINE || !shunt_is(socket, 0, 4, "get ") || !shunt_is(socket, length - 2, 2, "\r\n"))
		return -SHUNT_UNKNOWN_COMMAND;
	return length;
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct session *session = shunt_session(verdict, struct session);

	if (session->swallow || session->get) {
		shunt_leave_to_user(verdict);
		return;
	}
	shunt_write_all(verdict, "END\r\n", 5);
	shunt_answer_from_contents(verdict, 4, shunt_available(socket) - 6);
}

SHUNT_SERVICE(.name = "cache", .parse = parse, .decide = decide, .answers = 1);
