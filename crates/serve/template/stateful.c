// NAME: counts lines by their first word, and sends them back. "anna ?" asks for anna's count.
//
//	shunt serve build NAME.c         makes NAME.bpf.o
//	shunt serve check NAME.bpf.o     has the kernel verify it, and runs NAME.tests
//
// The state is shared by the kernel and user space. Other variables cannot be: `build` refuses them.

#include <shunt/line.h>

// The key and the value of a table. Words of 64 bits are changed by shunt_add and similar functions.
struct name {
	__u8 bytes[32];
};

struct client {
	__u64 lines;
	__u64 bytes;
};

// The state of the service: `shunt serve status` shows it.
struct shunt_state {
	SHUNT_COUNTER(lines);
	SHUNT_HISTOGRAM(lengths);
	SHUNT_LRU_HASH(clients, struct name, struct client, 4096);
};

// The state of a connection, zeroed when the client connects. These are ordinary variables.
struct session {
	__u64 lines;
};

// `parse` has no access to the state, because it is called again while a line is incomplete.
static int parse(struct shunt_socket *socket)
{
	return line_message(socket);
}

static void answer(struct shunt_verdict *verdict, __u64 lines, __u64 line)
{
	shunt_write_number(verdict, lines);
	shunt_write_all(verdict, " lines, this is ", 16);
	shunt_write_number(verdict, line);
	shunt_write_all(verdict, "\n", 1);
}

// Called exactly once for each line, in the kernel or in user space.
static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct session *session = shunt_session(verdict, struct session);
	__u32 length = shunt_available(socket), end = length - 1;
	struct line_word first, second;
	struct client *client;
	struct name name;
	__u64 lines = 0;

	line_word(socket, 0, end, &first);
	line_word(socket, first.length + 1, end, &second);
	// A name that is too long counts as an empty one.
	shunt_peek_most(socket, first.offset, &name, sizeof(name), first.length);

	session->lines++;
	shunt_count(verdict, lines, 1);
	shunt_observe(verdict, lengths, length);
	client = shunt_entry(verdict, clients, &name);
	// Null: there is no room, which the status counts.
	if (client) {
		lines = shunt_add(&client->lines, 1);
		shunt_add(&client->bytes, length);
	}
	if (shunt_is(socket, second.offset, second.length, "?"))
		answer(verdict, lines, session->lines);
	else
		shunt_echo(verdict);
}

SHUNT_SERVICE(.name = "NAME", .parse = parse, .decide = decide, .state = sizeof(struct shunt_state));
