// NAME: forwards lines to the backend of their first word, and answers "hello" by itself.
//
//	shunt serve build NAME.c         makes NAME.bpf.o
//	shunt serve check NAME.bpf.o     has the kernel verify it, and runs NAME.tests
//
// A service keeps no state: the same bytes always get the same verdict. It runs in the kernel and in user space, and
// cannot tell which. It sees bytes only through shunt_peek and its like, which never read beyond what is there.

#include <shunt/line.h>

#define HELLO "hello yourself\n"

// How long is the message that begins here? Its length, if that can be told; 0 if more bytes are needed first; or why it
// cannot be served, as in -SHUNT_MALFORMED: then the connection is closed.
static int parse(struct shunt_socket *socket)
{
	return line_message(socket);
}

// How long is the reply that begins here, from a backend? One for each message that was forwarded.
static int parse_reply(struct shunt_socket *socket)
{
	return line_message(socket);
}

// What to do with a message? `socket` has its bytes, and no others.
static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	__u32 end = shunt_available(socket) - 1; // without the line feed
	struct line_word word;

	line_word(socket, 0, end, &word);
	if (word.length == 0) {
		// It gets what refuse says, below; the connection goes on.
		shunt_refuse(verdict, SHUNT_MISSING_FIELD);
	} else if (shunt_is(socket, word.offset, word.length, "hello")) {
		shunt_write_all(verdict, HELLO, sizeof(HELLO) - 1);
	} else {
		// Or shunt_echo, shunt_drop, shunt_close, shunt_forward_by_number, shunt_forward_to.
		shunt_forward_by_bytes(verdict, word.offset, word.length);
	}
}

// What to answer to a message that cannot be served? `socket` has its first bytes. Without an answer it is closed.
static void refuse(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict)
{
	if (why == SHUNT_MISSING_FIELD)
		shunt_write_all(verdict, "error: no word\n", 15);
	if (why == SHUNT_NO_BACKEND || why == SHUNT_BACKEND_GONE)
		shunt_write_all(verdict, "error: no backend\n", 18);
}

SHUNT_SERVICE(.name = "NAME", .parse = parse, .parse_reply = parse_reply, .decide = decide, .refuse = refuse);
