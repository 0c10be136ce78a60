// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Answers lines from a content store, which it fills from its clients and from a backend.
//
//	get KEY		the content of the key, which is a line. If there is none, the backend of the key
//			is asked, and its answer is stored
//	put KEY TEXT	stores TEXT and the line's end: "ok"
//	del KEY		deletes it: "ok"
//	add ADDRESS	adds a backend, if --allow-register permits it: "ok" says that it was asked for
//	remove ADDRESS	removes one: "ok"
//
// A key has up to 32 bytes. In the kernel, a `get` of a line of up to 2 KiB that is stored is answered
// without user space.

#include <shunt/line.h>

// The longest line that is stored.
#define LONGEST 4096

struct name {
	__u8 bytes[32];
};

struct shunt_state {
	SHUNT_COUNTER(hits);
	SHUNT_COUNTER(misses);
	SHUNT_CONTENTS(contents, struct name, LONGEST, 1024);
};

// The words of a line.
struct command {
	struct line_word verb, key;
	__u32 text; // the offset of the bytes after the key
	struct name name;
};

static int parse(struct shunt_socket *socket)
{
	return line_message(socket);
}

// Reads a line. Returns -1 if its key is missing or too long.
static int read_command(struct shunt_socket *socket, struct command *command)
{
	__u32 end = shunt_available(socket) - 1;

	line_word(socket, 0, end, &command->verb);
	line_word(socket, command->verb.length + 1, end, &command->key);
	command->text = command->key.offset + command->key.length + 1;
	shunt_peek_most(socket, command->key.offset, &command->name, sizeof(command->name), command->key.length);
	return command->key.length && command->key.length <= sizeof(command->name) ? 0 : -1;
}

#define SAY(verdict, text) shunt_write_all(verdict, text, sizeof(text) - 1)

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	__u32 length = shunt_available(socket);
	struct command command;

	if (read_command(socket, &command)) {
		shunt_refuse(verdict, SHUNT_MISSING_FIELD);
	} else if (shunt_is(socket, command.verb.offset, command.verb.length, "get")) {
		if (!shunt_answer_content(verdict, contents, &command.name)) {
			shunt_count(verdict, hits, 1);
			return;
		}
		shunt_count(verdict, misses, 1);
		shunt_forward_by_bytes(verdict, command.key.offset, command.key.length);
	} else if (shunt_is(socket, command.verb.offset, command.verb.length, "put") && command.text < length) {
		if (shunt_put_content(verdict, contents, &command.name, socket, command.text, length - command.text))
			shunt_refuse(verdict, SHUNT_TOO_LONG);
		else
			SAY(verdict, "ok\n");
	} else if (shunt_is(socket, command.verb.offset, command.verb.length, "del")) {
		shunt_delete(verdict, contents, &command.name);
		SAY(verdict, "ok\n");
	} else if (shunt_is(socket, command.verb.offset, command.verb.length, "add")) {
		if (!shunt_write_from(verdict, socket, command.key.offset, command.key.length, 64) &&
		    !shunt_register(verdict, 1))
			SAY(verdict, "ok\n");
	} else if (shunt_is(socket, command.verb.offset, command.verb.length, "remove")) {
		if (!shunt_write_from(verdict, socket, command.key.offset, command.key.length, 64) &&
		    !shunt_unregister(verdict))
			SAY(verdict, "ok\n");
	} else {
		shunt_refuse(verdict, SHUNT_UNKNOWN_COMMAND);
	}
}

// The answer of a backend to a `get`.
static void replied(struct shunt_socket *message, struct shunt_socket *reply, struct shunt_verdict *verdict)
{
	struct command command;

	if (!read_command(message, &command))
		shunt_put_content(verdict, contents, &command.name, reply, 0, shunt_available(reply));
}

static void refuse(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict)
{
	if (why == SHUNT_NO_BACKEND)
		SAY(verdict, "none\n");
	else if (why == SHUNT_TOO_LONG)
		SAY(verdict, "error: too long\n");
	else
		SAY(verdict, "error\n");
}

SHUNT_SERVICE(.name = "line-cache", .parse = parse, .parse_reply = parse, .decide = decide, .refuse = refuse,
	      .replied = replied, .state = sizeof(struct shunt_state), .answers = 1);
