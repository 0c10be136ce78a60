// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Counts lines by their first word, the client's name, and sends them back. A line of the name and a
// question mark is answered: "anna ?" with the number of anna's lines, and the number of this line in
// its connection.

#include <shunt/line.h>

struct name {
	__u8 bytes[32];
};

struct client {
	__u64 lines;
	__u64 bytes;
};

struct shunt_state {
	SHUNT_COUNTER(lines);
	SHUNT_HISTOGRAM(lengths);
	SHUNT_ARRAY(by_words, __u64, 4);
	SHUNT_LRU_HASH(clients, struct name, struct client, 4096);
};

// The state of a connection.
struct session {
	__u64 lines;
};

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

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct session *session = shunt_session(verdict, struct session);
	__u32 length = shunt_available(socket), end = length - 1;
	struct line_word first, second;
	struct client *client;
	struct name name;
	__u64 *words, lines = 0;

	line_word(socket, 0, end, &first);
	line_word(socket, first.length + 1, end, &second);
	shunt_peek_most(socket, first.offset, &name, sizeof(name), first.length);
	session->lines++;
	shunt_count(verdict, lines, 1);
	shunt_observe(verdict, lengths, length);
	words = shunt_element(verdict, by_words, !!first.length + !!second.length);
	if (words)
		shunt_add(words, 1);
	client = shunt_entry(verdict, clients, &name);
	if (client) {
		lines = shunt_add(&client->lines, 1);
		shunt_add(&client->bytes, length);
	}
	if (shunt_is(socket, second.offset, second.length, "?"))
		answer(verdict, lines, session->lines);
	else
		shunt_echo(verdict);
}

SHUNT_SERVICE(.name = "line-counter", .parse = parse, .decide = decide, .state = sizeof(struct shunt_state),
	      .answers = 1);
