// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Apache Thrift's binary protocol: framed and unframed messages with strict and old headers. Fields
// are found by their id, past values of every type. Values are nested up to THRIFT_DEPTH and have
// at most THRIFT_STEPS parts; others are refused as too complex.
//
//	struct thrift_message message;
//	int length = thrift_next(socket, &message); // the result for parse
//	struct thrift_field field;
//	if (thrift_find(socket, &message, 1, &field) > 0 && field.type == THRIFT_I32)
//		... (int)field.number

#ifndef SHUNT_THRIFT_H
#define SHUNT_THRIFT_H

#include "service.h"

#define THRIFT_DEPTH 16
#define THRIFT_STEPS 16384

// The most bytes of a method's name that an answer repeats.
#define THRIFT_NAME 96

enum thrift_type {
	THRIFT_STOP = 0,
	THRIFT_BOOL = 2,
	THRIFT_BYTE = 3,
	THRIFT_DOUBLE = 4,
	THRIFT_I16 = 6,
	THRIFT_I32 = 8,
	THRIFT_I64 = 10,
	THRIFT_STRING = 11, // and binary
	THRIFT_STRUCT = 12,
	THRIFT_MAP = 13,
	THRIFT_SET = 14,
	THRIFT_LIST = 15,
	THRIFT_UUID = 16,
};

enum thrift_kind { THRIFT_CALL = 1, THRIFT_REPLY = 2, THRIFT_EXCEPTION = 3, THRIFT_ONEWAY = 4 };

// The codes of a TApplicationException.
enum thrift_exception {
	THRIFT_UNKNOWN = 0,
	THRIFT_UNKNOWN_METHOD = 1,
	THRIFT_MISSING_RESULT = 5,
	THRIFT_INTERNAL_ERROR = 6,
	THRIFT_PROTOCOL_ERROR = 7,
};

// A message's header. Offsets are relative to the socket's position.
struct thrift_message {
	__u32 framed;
	__u32 strict;
	__u32 kind; // enum thrift_kind
	__u32 sequence;
	__u32 name; // offset of the method's name
	__u32 name_length;
	__u32 body; // offset of the arguments
	__u32 end; // end of the frame; 0 if there is none
};

// A field. `offset` is that of its value, or of a string's first byte, relative to the socket's
// position.
struct thrift_field {
	__u32 type; // enum thrift_type
	__u32 offset;
	__u32 length; // of a string
	__u64 number; // value of a bool or a signed integer; bits of a double
};

SHUNT_INLINE __u32 thrift_u32(const __u8 *bytes)
{
	return (__u32)bytes[0] << 24 | (__u32)bytes[1] << 16 | (__u32)bytes[2] << 8 | bytes[3];
}

// ---- headers

// Reads the header. Returns 1, 0 if more bytes are needed, or a refusal. A frame's length precedes
// the header, so `end` can be set although the result is 0.
SHUNT_FUNCTION int thrift_header(struct shunt_socket *socket, struct thrift_message *message)
{
	__u8 bytes[12];
	__u32 there = shunt_peek_some(socket, 0, bytes, sizeof(bytes));
	__u32 first = thrift_u32(bytes), at = 0;

	message->framed = 0;
	message->strict = 0;
	message->end = 0;
	if (there < 4)
		return 0;
	if (!(first >> 31)) {
		// This is the length of a frame, or of the name in an old header without a frame.
		// In a frame the next byte has the sign bit of a strict header, or is the high
		// byte, 0, of a name's length. In a name it is a character.
		if (first > SHUNT_MAX_LENGTH - 4)
			return -SHUNT_TOO_LONG;
		if (there < 5)
			return 0;
		if (bytes[4] == 0 || bytes[4] >> 7) {
			message->framed = 1;
			message->end = first + 4;
			at = 4;
			if (there < 8)
				return first < 4 ? -SHUNT_MALFORMED : 0;
			first = thrift_u32(bytes + 4);
		}
	}
	if (first >> 31) {
		if (first >> 16 != 0x8001)
			return -SHUNT_UNKNOWN_VERSION;
		message->strict = 1;
		message->kind = first & 0xff;
		at += 4;
		if (shunt_peek(socket, at, bytes, 4))
			return message->framed && message->end < at + 4 ? -SHUNT_MALFORMED : 0;
		first = thrift_u32(bytes);
	}
	// `first` is the name's length now.
	if (first == 0 || first > SHUNT_MAX_MESSAGE)
		return -SHUNT_MALFORMED;
	message->name = at + 4;
	message->name_length = first;
	at += 4 + first;
	message->body = at + (message->strict ? 4 : 5);
	if (message->framed && message->body > message->end)
		return -SHUNT_MALFORMED;
	if (shunt_peek(socket, at, bytes, 5)) {
		if (message->strict && !shunt_peek(socket, at, bytes, 4)) {
			message->sequence = thrift_u32(bytes);
		} else {
			return 0;
		}
	} else if (message->strict) {
		message->sequence = thrift_u32(bytes);
	} else {
		message->kind = bytes[0];
		message->sequence = thrift_u32(bytes + 1);
	}
	if (message->kind < THRIFT_CALL || message->kind > THRIFT_ONEWAY)
		return -SHUNT_MALFORMED;
	return 1;
}

// ---- values

// The state of a walk over values. Each level is a struct, or a container with its remaining
// values: bits 0-31 count them, 32-39 are the next type, 40-47 the type after that, 48 is set for a
// struct.
#define THRIFT_IS_STRUCT (1ull << 48)

struct thrift_walk {
	struct shunt_socket socket;
	__u32 offset;
	__u32 end;
	__u32 depth;
	__s32 wanted; // the id of a field of the outermost struct, or THRIFT_NOTHING_WANTED
	__s32 result; // 1: at the wanted field; 2: at the end of the struct
	struct thrift_field field;
	__u64 levels[THRIFT_DEPTH];
};

#define THRIFT_NOTHING_WANTED (-0x10000)

// The size of each type below 16, in four bits each: 0 if it varies, 15 if there is no such type.
#define THRIFT_SIZES 0x000008f4f2f811ffull
#define THRIFT_NO_TYPE 15

// Returns the size of a type. A table instead of a switch gives the verifier only one path.
SHUNT_INLINE __u32 thrift_size(__u32 type)
{
	if (type == THRIFT_UUID)
		return 16;
	return type > THRIFT_UUID ? THRIFT_NO_TYPE : THRIFT_SIZES >> (type * 4 & 63) & 15;
}

SHUNT_INLINE long thrift_stop(struct thrift_walk *walk, int result)
{
	walk->result = SHUNT_ANY(&walk->socket, result);
	return 1;
}

// Stops for lack of bytes: more may arrive, unless the frame ends before.
SHUNT_INLINE long thrift_short(struct thrift_walk *walk, __u32 needed)
{
	return thrift_stop(walk, walk->end && walk->offset + (__u64)needed > walk->end ? -SHUNT_MALFORMED : 0);
}

// Skips `length` bytes.
SHUNT_INLINE long thrift_skip(struct thrift_walk *walk, __u64 length)
{
	__u64 offset = walk->offset + length;

	if (walk->end && offset > walk->end)
		return thrift_stop(walk, -SHUNT_MALFORMED);
	if (offset > SHUNT_MAX_LENGTH)
		return thrift_stop(walk, -SHUNT_TOO_LONG);
	walk->offset = SHUNT_ANY(&walk->socket, offset);
	return 0;
}

// Enters a struct or a container.
SHUNT_INLINE long thrift_enter(struct thrift_walk *walk, __u64 level)
{
	__u32 depth = walk->depth + 1;

	if (depth >= THRIFT_DEPTH)
		return thrift_stop(walk, -SHUNT_TOO_COMPLEX);
	walk->levels[depth & (THRIFT_DEPTH - 1)] = level;
	walk->depth = SHUNT_ANY(&walk->socket, depth);
	return 0;
}

// Skips a value, or enters it if its size is unknown.
SHUNT_INLINE long thrift_value(struct thrift_walk *walk, __u32 type)
{
	__u8 bytes[6];
	__u32 size = thrift_size(type), there, count;

	if (size == THRIFT_NO_TYPE)
		return thrift_stop(walk, -SHUNT_MALFORMED);
	if (size)
		return thrift_skip(walk, size);
	if (type == THRIFT_STRUCT)
		return thrift_enter(walk, THRIFT_IS_STRUCT);
	there = shunt_peek_some(&walk->socket, walk->offset, bytes, sizeof(bytes));
	if (type == THRIFT_STRING) {
		if (there < 4)
			return thrift_short(walk, 4);
		count = thrift_u32(bytes);
		if (count >> 31)
			return thrift_stop(walk, -SHUNT_MALFORMED);
		return thrift_skip(walk, 4ull + count);
	}
	if (type == THRIFT_MAP) {
		if (there < 6)
			return thrift_short(walk, 6);
		count = thrift_u32(bytes + 2);
		if (count >> 31)
			return thrift_stop(walk, -SHUNT_MALFORMED);
		if (!count)
			return thrift_skip(walk, 6);
		__u32 key = thrift_size(bytes[0]), value = thrift_size(bytes[1]);

		if (key == THRIFT_NO_TYPE || value == THRIFT_NO_TYPE)
			return thrift_stop(walk, -SHUNT_MALFORMED);
		if (key && value)
			return thrift_skip(walk, 6 + (__u64)count * (key + value));
		if (count > SHUNT_MAX_LENGTH)
			return thrift_stop(walk, -SHUNT_TOO_LONG);
		if (thrift_skip(walk, 6))
			return 1;
		return thrift_enter(walk, (__u64)bytes[1] << 40 | (__u64)bytes[0] << 32 | count * 2);
	}
	if (there < 5)
		return thrift_short(walk, 5);
	count = thrift_u32(bytes + 1);
	if (count >> 31)
		return thrift_stop(walk, -SHUNT_MALFORMED);
	if (!count)
		return thrift_skip(walk, 5);
	size = thrift_size(bytes[0]);
	if (size == THRIFT_NO_TYPE)
		return thrift_stop(walk, -SHUNT_MALFORMED);
	if (size)
		return thrift_skip(walk, 5 + (__u64)count * size);
	if (thrift_skip(walk, 5))
		return 1;
	return thrift_enter(walk, (__u64)bytes[0] << 40 | (__u64)bytes[0] << 32 | count);
}

// Reads the value of the wanted field.
SHUNT_INLINE long thrift_take(struct thrift_walk *walk, __u32 type)
{
	__u8 bytes[8];
	__u32 size = type == THRIFT_STRING ? 4 : thrift_size(type);
	__u64 number = 0;

	walk->field.type = SHUNT_ANY(&walk->socket, type);
	walk->field.offset = walk->offset;
	if (size == THRIFT_NO_TYPE)
		return thrift_stop(walk, -SHUNT_MALFORMED);
	if (walk->end && walk->offset + size > walk->end)
		return thrift_stop(walk, -SHUNT_MALFORMED);
	if (size > sizeof(bytes))
		size = sizeof(bytes);
	if (shunt_peek_some(&walk->socket, walk->offset, bytes, sizeof(bytes)) < size)
		return thrift_short(walk, size);
	for (int at = 0; at < 8; at++)
		number = number << 8 | bytes[at];
	// A value of variable size, such as a struct, has no number.
	walk->field.number = size ? (__s64)number >> ((64 - 8 * size) & 63) : 0;
	if (type == THRIFT_STRING) {
		__u32 length = number >> 32;

		if (length >> 31)
			return thrift_stop(walk, -SHUNT_MALFORMED);
		walk->field.offset = SHUNT_ANY(&walk->socket, walk->offset + 4);
		walk->field.length = SHUNT_ANY(&walk->socket, length);
		if (thrift_skip(walk, 4ull + length))
			return 1;
		if (walk->offset > shunt_available(&walk->socket))
			return thrift_stop(walk, 0);
	}
	return thrift_stop(walk, 1);
}

static long thrift_step(__u64 index, void *context)
{
	struct thrift_walk *walk = context;
	__u32 depth = walk->depth;
	__u64 level;
	__u32 type;

	if (depth >= THRIFT_DEPTH)
		return thrift_stop(walk, 2);
	level = walk->levels[depth & (THRIFT_DEPTH - 1)];
	if (level & THRIFT_IS_STRUCT) {
		__u8 bytes[3];
		__u32 there = shunt_peek_some(&walk->socket, walk->offset, bytes, sizeof(bytes));

		if (!there)
			return thrift_short(walk, 1);
		type = bytes[0];
		if (type == THRIFT_STOP) {
			if (thrift_skip(walk, 1))
				return 1;
			walk->depth = SHUNT_ANY(&walk->socket, depth - 1);
			return depth == 0 ? thrift_stop(walk, 2) : 0;
		}
		if (there < 3)
			return thrift_short(walk, 3);
		if (thrift_skip(walk, 3))
			return 1;
		if (depth == 0 && walk->wanted == (__s16)((__u16)bytes[1] << 8 | bytes[2]))
			return thrift_take(walk, type);
	} else {
		if (!(__u32)level) {
			walk->depth = SHUNT_ANY(&walk->socket, depth - 1);
			return 0;
		}
		type = level >> 32 & 0xff;
		walk->levels[depth & (THRIFT_DEPTH - 1)] =
			(level >> 40 & 0xff) << 32 | (__u64)type << 40 | ((__u32)level - 1);
	}
	return thrift_value(walk, type);
}

// Walks over the struct at `offset`, to the field `wanted` or to its end. Returns 1 at the field; 2
// at the end, with `offset` after it; 0 if more bytes are needed; or a refusal. `end` is the
// frame's end, or 0.
SHUNT_FUNCTION int thrift_walk(struct shunt_socket *socket, __u32 *offset, __u32 end, int wanted,
			       struct thrift_field *field)
{
	struct thrift_walk walk = {
		.socket = *socket, .offset = *offset, .end = end, .wanted = wanted, .result = -SHUNT_TOO_COMPLEX
	};

	walk.levels[0] = THRIFT_IS_STRUCT;
	shunt_loop(THRIFT_STEPS, thrift_step, &walk);
	*offset = walk.offset;
	*field = walk.field;
	return walk.result;
}

// ---- what a service calls

// Returns the result of `parse` for a message, framed or not. The header is valid if
// `message->body` is not 0.
SHUNT_INLINE int thrift_next(struct shunt_socket *socket, struct thrift_message *message)
{
	struct thrift_field field;
	int result;
	__u32 end;

	__builtin_memset(message, 0, sizeof(*message));
	result = thrift_header(socket, message);
	if (result < 0)
		return result;
	if (message->end)
		return message->end;
	if (!result)
		return 0;
	end = message->body;
	result = thrift_walk(socket, &end, 0, THRIFT_NOTHING_WANTED, &field);
	return result == 2 ? (int)end : result;
}

// Finds an argument by its id. Returns 1 and sets `field`; 0 if more bytes are needed;
// -SHUNT_MISSING_FIELD if it is absent; or another refusal. `message` comes from thrift_next or
// thrift_header.
SHUNT_INLINE int thrift_find(struct shunt_socket *socket, const struct thrift_message *message, int id,
			     struct thrift_field *field)
{
	__u32 offset = message->body;
	int result = thrift_walk(socket, &offset, message->end, id, field);

	return result == 2 ? -SHUNT_MISSING_FIELD : result;
}

// Takes the message whose length thrift_next returned, so that its next call returns the next one.
SHUNT_INLINE int thrift_discard(struct shunt_socket *socket, int length)
{
	return length > 0 ? shunt_discard(socket, length) : -1;
}

// Forwards the message to the backend of a field: an integer by its value, a string by its bytes.
SHUNT_INLINE void thrift_forward(const struct thrift_message *message, const struct thrift_field *field,
				 struct shunt_verdict *verdict)
{
	switch (field->type) {
	case THRIFT_STRING:
		shunt_forward_by_bytes(verdict, field->offset, field->length);
		break;
	case THRIFT_BOOL:
	case THRIFT_BYTE:
	case THRIFT_I16:
	case THRIFT_I32:
	case THRIFT_I64:
		shunt_forward_by_number(verdict, field->number);
		break;
	default:
		shunt_refuse(verdict, SHUNT_MISSING_FIELD);
		return;
	}
	verdict->one_way = message->kind == THRIFT_ONEWAY;
}

// ---- answering

SHUNT_INLINE int thrift_write_u32(struct shunt_verdict *verdict, __u32 value)
{
	__u8 bytes[4] = { value >> 24, value >> 16, value >> 8, value };

	return shunt_write_all(verdict, bytes, sizeof(bytes));
}

// Answers with a TApplicationException: { 1: string message, 2: i32 code }. One-way messages are
// dropped. If the header cannot be parsed, the connection is closed. `text` is a string literal.
#define thrift_refuse(socket, verdict, code, text) thrift_answer(socket, verdict, code, text, sizeof(text) - 1)

SHUNT_INLINE void thrift_answer(struct shunt_socket *socket, struct shunt_verdict *verdict, __u32 code,
				const char *text, __u32 length)
{
	const __u8 message_field[3] = { THRIFT_STRING, 0, 1 }, code_field[3] = { THRIFT_I32, 0, 2 };
	const __u8 kind = THRIFT_EXCEPTION, stop = THRIFT_STOP;
	struct thrift_message message = {};
	__u32 name_length;

	verdict->action = SHUNT_CLOSE;
	if (thrift_header(socket, &message) <= 0)
		return;
	verdict->action = SHUNT_DROP;
	if (message.kind == THRIFT_ONEWAY)
		return;
	name_length = message.name_length < THRIFT_NAME ? message.name_length : THRIFT_NAME;
	if (message.framed)
		thrift_write_u32(verdict, (message.strict ? 12 : 9) + name_length + 7 + length + 8);
	if (message.strict)
		thrift_write_u32(verdict, 0x80010000 | THRIFT_EXCEPTION);
	thrift_write_u32(verdict, name_length);
	shunt_write_from(verdict, socket, message.name, name_length, THRIFT_NAME);
	if (!message.strict)
		shunt_write_all(verdict, &kind, 1);
	thrift_write_u32(verdict, message.sequence);
	shunt_write_all(verdict, message_field, 3);
	thrift_write_u32(verdict, length);
	shunt_write_all(verdict, text, length);
	shunt_write_all(verdict, code_field, 3);
	thrift_write_u32(verdict, code);
	shunt_write_all(verdict, &stop, 1);
}

#endif
