// NAME: forwards lines to the backend of their first word, and answers "hello" itself.
//
//	shunt serve build NAME.c         makes NAME.bpf.o
//	shunt serve check NAME.bpf.o     has the kernel verify it, and runs NAME.tests
//
// This service keeps no state; `shunt serve new --stateful` makes one that does. It runs in the kernel
// and in user space, without a difference that it can see. It reads bytes only with shunt_peek and
// similar functions, which never read beyond the available bytes.

#include <shunt/line.h>

#define HELLO "hello yourself\n"

// Returns the length of the message at the beginning of the socket's bytes; 0 if more bytes are
// needed to find it; or a negative refusal such as -SHUNT_MALFORMED, which closes the connection.
static int parse(struct shunt_socket *socket)
{
	return line_message(socket);
}

// Returns the length of a backend's reply in the same form. Each forwarded message has one reply.
static int parse_reply(struct shunt_socket *socket)
{
	return line_message(socket);
}

// Decides about a message. `socket` has exactly the message's bytes.
static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	__u32 end = shunt_available(socket) - 1; // without the line feed
	struct line_word word;

	line_word(socket, 0, end, &word);
	if (word.length == 0) {
		// `refuse`, below, makes the answer. The connection stays open.
		shunt_refuse(verdict, SHUNT_MISSING_FIELD);
	} else if (shunt_is(socket, word.offset, word.length, "hello")) {
		shunt_write_all(verdict, HELLO, sizeof(HELLO) - 1);
	} else {
		// Alternatives: shunt_echo, shunt_drop, shunt_close, shunt_forward_by_number,
		// shunt_forward_to.
		shunt_forward_by_bytes(verdict, word.offset, word.length);
	}
}

// Answers a message that cannot be served. `socket` has its first bytes. Without an answer the
// connection is closed.
static void refuse(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict)
{
	if (why == SHUNT_MISSING_FIELD)
		shunt_write_all(verdict, "error: no word\n", 15);
	if (why == SHUNT_NO_BACKEND || why == SHUNT_BACKEND_GONE)
		shunt_write_all(verdict, "error: no backend\n", 18);
}

SHUNT_SERVICE(.name = "NAME", .parse = parse, .parse_reply = parse_reply, .decide = decide, .refuse = refuse);
