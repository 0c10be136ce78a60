// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// memcached's two protocols: binary, and text without the meta commands. A request's first byte
// distinguishes them.

#ifndef SHUNT_MEMCACHED_H
#define SHUNT_MEMCACHED_H

#include "find.h"

#define MEMCACHED_REQUEST 0x80
#define MEMCACHED_RESPONSE 0x81
#define MEMCACHED_HEADER 24

// The most bytes of a line in the text protocol. Clients ask for hundreds of keys in one line.
#define MEMCACHED_LINE SHUNT_MAX_MESSAGE

// The most values of one reply.
#define MEMCACHED_VALUES 64

// A word of a line.
struct memcached_word {
	__u32 offset;
	__u32 length; // 0: there is no such word
};

SHUNT_INLINE __u32 memcached_is_binary(struct shunt_socket *socket)
{
	__u8 first = 0;

	shunt_peek(socket, 0, &first, 1);
	return first == MEMCACHED_REQUEST || first == MEMCACHED_RESPONSE;
}

// ---- binary

struct memcached_header {
	__u8 magic;
	__u8 opcode;
	__u8 key_length[2];
	__u8 extras_length;
	__u8 data_type;
	__u8 status[2];
	__u8 body_length[4];
	__u8 opaque[4];
	__u8 cas[8];
};

SHUNT_INLINE int memcached_binary(struct shunt_socket *socket, __u8 magic, struct memcached_header *header)
{
	__u32 body, key;

	if (shunt_peek(socket, 0, header, sizeof(*header)))
		return 0;
	body = (__u32)header->body_length[0] << 24 | (__u32)header->body_length[1] << 16 |
	       (__u32)header->body_length[2] << 8 | header->body_length[3];
	key = (__u32)header->key_length[0] << 8 | header->key_length[1];
	if (header->magic != magic || key + header->extras_length > body)
		return -SHUNT_MALFORMED;
	return body > SHUNT_MAX_LENGTH - MEMCACHED_HEADER ? -SHUNT_TOO_LONG : (int)(MEMCACHED_HEADER + body);
}

// ---- text

// Returns the offset after the line's LF, 0 if the line is incomplete, or a refusal.
SHUNT_INLINE int memcached_line(struct shunt_socket *socket, __u32 offset)
{
	int end = shunt_find(socket, offset, offset + MEMCACHED_LINE, '\n');

	if (end < 0)
		return shunt_available(socket) >= (__u64)offset + MEMCACHED_LINE ? -SHUNT_TOO_LONG : 0;
	return end + 1;
}

// Advances `word` to the next word of a line that ends at `end`, or to the first if `word` is
// empty. One space separates two words. Returns 0 if there is no other word.
SHUNT_INLINE int memcached_word(struct shunt_socket *socket, __u32 end, struct memcached_word *word)
{
	__u32 begin = word->length ? word->offset + word->length + 1 : word->offset;
	int space;

	if (begin >= end) {
		word->length = 0;
		return 0;
	}
	space = shunt_find(socket, begin, end, ' ');
	word->offset = begin;
	word->length = (space < 0 ? end : (__u32)space) - begin;
	return word->length != 0;
}

// Returns up to 8 letters as a number, for comparisons.
SHUNT_INLINE __u64 memcached_letters(struct shunt_socket *socket, __u32 offset, __u32 length)
{
	union {
		__u8 bytes[8];
		__u64 number;
	} letters;

	shunt_peek_most(socket, offset, letters.bytes, 8, length <= 8 ? length : 0);
	return letters.number;
}

#define MEMCACHED_LETTER(text, at) ((__u64)(__u8)((at) < sizeof(text) - 1 ? (text)[(at) < sizeof(text) ? (at) : 0] : 0) << 8 * (at))
#define MEMCACHED_LETTERS(text)                                                                             \
	(MEMCACHED_LETTER(text, 0) | MEMCACHED_LETTER(text, 1) | MEMCACHED_LETTER(text, 2) |                \
	 MEMCACHED_LETTER(text, 3) | MEMCACHED_LETTER(text, 4) | MEMCACHED_LETTER(text, 5) |                \
	 MEMCACHED_LETTER(text, 6) | MEMCACHED_LETTER(text, 7))

enum memcached_kind {
	MEMCACHED_OTHER,
	MEMCACHED_STORE, // set key flags exptime bytes, followed by the value
	MEMCACHED_GET, // get key...
	MEMCACHED_GET_AND_TOUCH, // gat exptime key...
	MEMCACHED_CHANGE, // delete, incr, decr, touch: a key; the answer is a line
};

SHUNT_INLINE enum memcached_kind memcached_kind(__u64 command)
{
#define IS(text) (command == MEMCACHED_LETTERS(text))
	if (IS("get") || IS("gets"))
		return MEMCACHED_GET;
	if (IS("set") || IS("add") || IS("replace") || IS("append") || IS("prepend") || IS("cas"))
		return MEMCACHED_STORE;
	if (IS("delete") || IS("incr") || IS("decr") || IS("touch"))
		return MEMCACHED_CHANGE;
	if (IS("gat") || IS("gats"))
		return MEMCACHED_GET_AND_TOUCH;
	return MEMCACHED_OTHER;
#undef IS
}

// A request's line: its kind, its key, and what follows.
struct memcached_request {
	enum memcached_kind kind;
	__u64 command; // MEMCACHED_LETTERS
	__u32 end; // offset after the line's LF
	struct memcached_word key; // length 0: there is none
	__u32 several; // there are more keys
	__u32 quiet; // noreply
};

// Parses a request's line. Returns 1, 0 if the line is incomplete, or a refusal.
SHUNT_FUNCTION int memcached_request(struct shunt_socket *socket, struct memcached_request *request)
{
	struct memcached_word word = {};
	__u32 text;
	__u8 before;
	int end = memcached_line(socket, 0);

	if (end <= 0)
		return end;
	text = end - 1;
	if (text && !shunt_peek(socket, text - 1, &before, 1) && before == '\r')
		text--;
	request->end = end;
	request->key.length = 0;
	request->several = 0;
	request->quiet = 0;
	memcached_word(socket, text, &word);
	request->command = memcached_letters(socket, 0, word.length);
	request->kind = memcached_kind(request->command);
	if (request->kind == MEMCACHED_OTHER)
		return 1;
	if (request->kind == MEMCACHED_GET_AND_TOUCH && !memcached_word(socket, text, &word))
		return -SHUNT_MALFORMED;
	if (!memcached_word(socket, text, &word))
		return -SHUNT_MALFORMED;
	request->key = word;
	if (request->kind == MEMCACHED_GET || request->kind == MEMCACHED_GET_AND_TOUCH)
		request->several = word.offset + word.length < text;
	else if (text >= 8)
		request->quiet = memcached_letters(socket, text - 8, 8) == MEMCACHED_LETTERS(" noreply");
	return 1;
}

// Returns the length of the value that a line announces, with its CR and LF, or a refusal. The
// length is the word after `before` and `skipped` other words, as BYTES in "set key flags exptime
// BYTES".
SHUNT_INLINE int memcached_value(struct shunt_socket *socket, __u32 end, const struct memcached_word *before,
				 __u32 skipped)
{
	struct memcached_word word = *before;
	struct shunt_digits digits;

	for (__u32 at = 0; at < skipped; at++) {
		if (!memcached_word(socket, end, &word))
			return -SHUNT_MALFORMED;
	}
	word.offset += word.length + 1;
	if (word.offset >= end)
		return -SHUNT_MALFORMED;
	shunt_digits(socket, word.offset, &digits);
	if (!digits.count || digits.count > 9 || (digits.next != ' ' && digits.next != '\r' && digits.next != '\n'))
		return -SHUNT_MALFORMED;
	return digits.value + 2;
}

// Returns the result of `parse` for a request of either protocol.
SHUNT_FUNCTION int memcached_message(struct shunt_socket *socket)
{
	struct memcached_request request;
	struct memcached_header header;
	int result;

	if (memcached_is_binary(socket))
		return memcached_binary(socket, MEMCACHED_REQUEST, &header);
	result = memcached_request(socket, &request);
	if (result <= 0)
		return result;
	if (request.kind != MEMCACHED_STORE)
		return request.end;
	result = memcached_value(socket, request.end, &request.key, 2);
	return result < 0 ? result : (int)request.end + result;
}

struct memcached_walk {
	struct shunt_socket socket;
	__u32 offset;
	int result;
};

static long memcached_stop(struct memcached_walk *walk, int result)
{
	walk->result = SHUNT_ANY(&walk->socket, result);
	return 1;
}

// Walks over one line of a reply: "VALUE key flags bytes" and its value, or the last line.
static long memcached_reply_line(__u64 index, void *context)
{
	struct memcached_walk *walk = context;
	struct memcached_word word = { .offset = walk->offset };
	int end = memcached_line(&walk->socket, walk->offset), value;

	if (end <= 0)
		return memcached_stop(walk, end);
	if (memcached_letters(&walk->socket, walk->offset, 6) != MEMCACHED_LETTERS("VALUE "))
		return memcached_stop(walk, end);
	memcached_word(&walk->socket, end, &word);
	value = memcached_value(&walk->socket, end, &word, 2);
	if (value < 0)
		return memcached_stop(walk, value);
	if ((__u64)(__u32)end + (__u32)value > SHUNT_MAX_LENGTH)
		return memcached_stop(walk, -SHUNT_TOO_LONG);
	walk->offset = SHUNT_ANY(&walk->socket, end + value);
	return 0;
}

// Returns the result of `parse_reply` for a reply of either protocol.
SHUNT_FUNCTION int memcached_reply(struct shunt_socket *socket)
{
	struct memcached_walk walk = { .socket = *socket, .result = -SHUNT_TOO_COMPLEX };
	struct memcached_header header;

	if (memcached_is_binary(socket))
		return memcached_binary(socket, MEMCACHED_RESPONSE, &header);
	shunt_loop(MEMCACHED_VALUES, memcached_reply_line, &walk);
	return walk.result;
}

#endif
