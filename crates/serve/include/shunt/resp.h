// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Redis' protocol: commands as arrays of strings or as bare lines, and replies of every type of
// RESP 2 and 3 except push messages.

#ifndef SHUNT_RESP_H
#define SHUNT_RESP_H

#include "find.h"

// The most parts of a command or a reply. Each nested part counts.
#define RESP_PARTS 16384

struct resp_walk {
	struct shunt_socket socket;
	__u32 offset;
	__u32 left; // values that are still expected
	__u32 in_line; // the rest of a line follows
	int result;
};

// Reads the number of a line that begins with a type, such as "$5\r\n". Returns the line's length,
// 0 if it is incomplete, or -1.
SHUNT_INLINE int resp_number(struct shunt_socket *socket, __u32 offset, __u64 *value)
{
	int line = shunt_number_line(socket, offset + 1, value);

	return line > 0 ? line + 1 : line;
}

SHUNT_INLINE long resp_stop(struct resp_walk *walk, int result)
{
	walk->result = SHUNT_ANY(&walk->socket, result);
	return 1;
}

// Continues after a value, or stops with the message's length if it was the last.
SHUNT_INLINE long resp_go_on(struct resp_walk *walk, __u64 offset, __u64 left)
{
	if (offset > SHUNT_MAX_LENGTH || left > SHUNT_MAX_LENGTH)
		return resp_stop(walk, -SHUNT_TOO_LONG);
	if (!left)
		return resp_stop(walk, offset);
	walk->offset = SHUNT_ANY(&walk->socket, offset);
	walk->left = SHUNT_ANY(&walk->socket, left);
	return 0;
}

// ---- commands

static long resp_argument(__u64 index, void *context)
{
	struct resp_walk *walk = context;
	__u8 type;
	__u64 length;
	int line;

	if (shunt_peek(&walk->socket, walk->offset, &type, 1))
		return resp_stop(walk, 0);
	line = type == '$' ? resp_number(&walk->socket, walk->offset, &length) : -1;
	if (line <= 0)
		return resp_stop(walk, line < 0 ? -SHUNT_MALFORMED : 0);
	return resp_go_on(walk, walk->offset + line + length + 2, walk->left - 1);
}

// The most bytes of a command that is a bare line. People and monitoring programs send these.
#define RESP_LINE 1024

// Returns the length of a bare line, 0 if it is incomplete, or a refusal.
SHUNT_INLINE int resp_line(struct shunt_socket *socket)
{
	int end = shunt_find(socket, 0, RESP_LINE, '\n');

	if (end < 0)
		return shunt_available(socket) >= RESP_LINE ? -SHUNT_MALFORMED : 0;
	return end + 1;
}

// Returns the result of `parse` for a command.
SHUNT_FUNCTION int resp_command(struct shunt_socket *socket)
{
	struct resp_walk walk = { .socket = *socket, .result = -SHUNT_TOO_COMPLEX };
	__u64 count;
	__u8 type;
	int line;

	if (shunt_peek(socket, 0, &type, 1))
		return 0;
	if (type != '*')
		return resp_line(socket);
	line = resp_number(socket, 0, &count);
	if (line <= 0)
		return line < 0 ? -SHUNT_MALFORMED : 0;
	if (!count)
		return -SHUNT_MALFORMED;
	if (count > RESP_PARTS)
		return -SHUNT_TOO_COMPLEX;
	walk.offset = SHUNT_ANY(socket, line);
	walk.left = SHUNT_ANY(socket, count);
	shunt_loop(RESP_PARTS, resp_argument, &walk);
	return walk.result;
}

// ---- replies

static long resp_value(__u64 index, void *context)
{
	struct resp_walk *walk = context;
	struct shunt_socket *socket = &walk->socket;
	__u8 bytes[4];
	__u64 number = 0;
	__u32 there;
	int line;

	if (walk->in_line) {
		line = shunt_find(socket, walk->offset, walk->offset + SHUNT_MAX_MESSAGE, '\n');
		if (line < 0)
			return resp_stop(walk, shunt_available(socket) >= walk->offset + (__u64)SHUNT_MAX_MESSAGE ?
						       -SHUNT_TOO_LONG : 0);
		walk->in_line = SHUNT_ANY(socket, 0);
		return resp_go_on(walk, (__u64)line + 1, walk->left - 1);
	}
	there = shunt_peek_some(socket, walk->offset, bytes, sizeof(bytes));
	if (!there)
		return resp_stop(walk, 0);
	switch (bytes[0]) {
	case '+':
	case '-':
	case ':':
	case '_':
	case '#':
	case ',':
	case '(':
		walk->in_line = SHUNT_ANY(socket, 1);
		return 0;
	case '$':
	case '!':
	case '=':
	case '*':
	case '~':
	case '%':
	case '|':
		break;
	default:
		return resp_stop(walk, -SHUNT_MALFORMED);
	}
	// "$-1" and "*-1" are null.
	if (there > 1 && bytes[1] == '-') {
		walk->in_line = SHUNT_ANY(socket, 1);
		return 0;
	}
	line = resp_number(socket, walk->offset, &number);
	if (line <= 0)
		return resp_stop(walk, line < 0 ? -SHUNT_MALFORMED : 0);
	switch (bytes[0]) {
	case '*':
	case '~':
		return resp_go_on(walk, walk->offset + line, walk->left - 1 + number);
	case '%':
		return resp_go_on(walk, walk->offset + line, walk->left - 1 + 2 * number);
	case '|':
		// Attributes precede the value that they describe.
		return resp_go_on(walk, walk->offset + line, walk->left + 2 * number);
	}
	return resp_go_on(walk, walk->offset + line + number + 2, walk->left - 1);
}

// Returns the result of `parse_reply` for a value of any type.
SHUNT_FUNCTION int resp_reply(struct shunt_socket *socket)
{
	struct resp_walk walk = { .socket = *socket, .result = -SHUNT_TOO_COMPLEX };

	walk.left = SHUNT_ANY(socket, 1);
	shunt_loop(RESP_PARTS, resp_value, &walk);
	return walk.result;
}

// ---- what a service calls

// An argument of a command. Offsets are relative to the socket's position.
struct resp_argument {
	__u32 offset;
	__u32 length;
	__u32 next; // the offset of the next argument
};

// Advances to the next argument, or to the first, the command's name, if `argument->next` is 0.
// Returns 0 if its line is not available.
SHUNT_FUNCTION int resp_next(struct shunt_socket *socket, struct resp_argument *argument)
{
	__u64 length = 0;
	int line;

	if (!argument->next) {
		line = resp_number(socket, 0, &length);
		if (line <= 0)
			return 0;
		argument->next = line;
	}
	line = resp_number(socket, argument->next, &length);
	if (line <= 0 || length > SHUNT_MAX_LENGTH)
		return 0;
	argument->offset = argument->next + line;
	argument->length = length;
	argument->next = argument->offset + length + 2;
	return 1;
}

// Returns the number of arguments including the command's name, or 0 for a bare line.
SHUNT_INLINE __u32 resp_count(struct shunt_socket *socket)
{
	__u64 count = 0;
	__u8 type = 0;

	shunt_peek(socket, 0, &type, 1);
	return type == '*' && resp_number(socket, 0, &count) > 0 ? count : 0;
}

// Up to 16 letters in upper case as two numbers, for comparisons.
struct resp_name {
	__u64 first;
	__u64 second;
};

SHUNT_INLINE void resp_name(struct shunt_socket *socket, const struct resp_argument *argument, struct resp_name *name)
{
	union {
		__u8 bytes[16];
		struct resp_name name;
	} letters;

	shunt_peek_most(socket, argument->offset, letters.bytes, sizeof(letters.bytes),
			argument->length <= 16 ? argument->length : 0);
	// Convert to upper case. Other characters become characters that are not letters either.
	letters.name.first &= ~0x2020202020202020ull;
	letters.name.second &= ~0x2020202020202020ull;
	*name = letters.name;
}

#define RESP_LETTER(text, at) ((__u64)(__u8)((at) < sizeof(text) - 1 ? (text)[(at) < sizeof(text) ? (at) : 0] : 0) << 8 * ((at) & 7))
#define RESP_LETTERS(text, from)                                                                            \
	(RESP_LETTER(text, from) | RESP_LETTER(text, from + 1) | RESP_LETTER(text, from + 2) |              \
	 RESP_LETTER(text, from + 3) | RESP_LETTER(text, from + 4) | RESP_LETTER(text, from + 5) |          \
	 RESP_LETTER(text, from + 6) | RESP_LETTER(text, from + 7))

// Compares a name with a literal in upper case.
#define resp_is(name, text)                                                                                 \
	((name)->first == RESP_LETTERS(text, 0) && (name)->second == RESP_LETTERS(text, 8))

#endif
