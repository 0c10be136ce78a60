// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The native half of a service: a table that the user-space engine finds by its symbol. service.h
// includes this file.

#ifndef SHUNT_NATIVE_H
#define SHUNT_NATIVE_H

// Incremented when the table, struct shunt_service or a struct in a call changes.
#define SHUNT_NATIVE_VERSION 6

// Builtin services override the symbol, because all are linked into one program.
#ifndef SHUNT_NATIVE
#define SHUNT_NATIVE shunt_native
#endif

// src/service/native.rs has the same layout.
struct shunt_native {
	__u32 version;
	__u32 verdict_size;
	const struct shunt_service *service;
	int (*parse)(const __u8 *bytes, __u32 length);
	int (*parse_reply)(const __u8 *bytes, __u32 length);
	void (*decide)(const __u8 *bytes, __u32 length, struct shunt_verdict *verdict);
	void (*refuse)(const __u8 *bytes, __u32 length, __u32 why, struct shunt_verdict *verdict);
	void (*accepted)(struct shunt_verdict *verdict);
	int (*part)(const __u8 *bytes, __u32 length, struct shunt_share *share, struct shunt_piece *piece);
	int (*join)(const __u8 *bytes, __u32 length, struct shunt_share *share, struct shunt_piece *piece);
	void (*timer)(__u64 context, struct shunt_verdict *verdict);
	void (*service_timer)(__u64 context, struct shunt_verdict *verdict);
	void (*closed)(struct shunt_verdict *verdict);
	void (*started)(struct shunt_verdict *verdict);
	void (*replied)(const __u8 *message, __u32 message_length, const __u8 *reply, __u32 reply_length,
			struct shunt_verdict *verdict);
	// Stores a content for the key in the verdict, or deletes it if `bytes` is null. Returns 0 if it
	// has done that.
	int (*put)(const struct shunt_table *table, const __u8 *bytes, __u32 length, struct shunt_verdict *verdict);
};

static int shunt_native_parse(const __u8 *bytes, __u32 length)
{
	struct shunt_socket socket = { .bytes = bytes, .length = length };

	return shunt_parse(&socket);
}

static int shunt_native_parse_reply(const __u8 *bytes, __u32 length)
{
	struct shunt_socket socket = { .bytes = bytes, .length = length };

	return shunt_parse_reply(&socket);
}

static void shunt_native_decide(const __u8 *bytes, __u32 length, struct shunt_verdict *verdict)
{
	struct shunt_socket socket = { .bytes = bytes, .length = length };

	shunt_decide(&socket, verdict);
}

static void shunt_native_refuse(const __u8 *bytes, __u32 length, __u32 why, struct shunt_verdict *verdict)
{
	struct shunt_socket socket = { .bytes = bytes, .length = length };

	shunt_answer_refusal(&socket, why, verdict);
}

static void shunt_native_accepted(struct shunt_verdict *verdict)
{
	SHUNT_CALL(verdict, accepted, verdict);
}

static void shunt_native_timer(__u64 context, struct shunt_verdict *verdict)
{
	SHUNT_CALL(verdict, timer, verdict, context);
}

static void shunt_native_service_timer(__u64 context, struct shunt_verdict *verdict)
{
	SHUNT_CALL(verdict, service_timer, verdict, context);
}

static void shunt_native_closed(struct shunt_verdict *verdict)
{
	SHUNT_CALL(verdict, closed, verdict);
}

static void shunt_native_started(struct shunt_verdict *verdict)
{
	SHUNT_CALL(verdict, started, verdict);
}

static void shunt_native_replied(const __u8 *message, __u32 message_length, const __u8 *reply, __u32 reply_length,
				 struct shunt_verdict *verdict)
{
	struct shunt_socket asked = { .bytes = message, .length = message_length };
	struct shunt_socket socket = { .bytes = reply, .length = reply_length };

	SHUNT_CALL(verdict, replied, &asked, &socket, verdict);
}

static int shunt_native_put(const struct shunt_table *table, const __u8 *bytes, __u32 length,
			    struct shunt_verdict *verdict)
{
	struct shunt_socket socket = { .bytes = bytes, .length = length };
	int done = 0;

	verdict->pinned = 0;
	if (bytes)
		done = shunt_put_bytes(verdict, table, &socket, 0, length);
	else if (shunt_look_up(verdict, table, 0))
		shunt_delete_last(verdict, table);
	shunt_unpin_all(verdict);
	return done;
}

static int shunt_native_part(const __u8 *bytes, __u32 length, struct shunt_share *share, struct shunt_piece *piece)
{
	struct shunt_socket socket = { .bytes = bytes, .length = length };

	__builtin_memset(piece, 0, sizeof(*piece));
	return shunt_service.part && shunt_service.part(&socket, share, piece);
}

static int shunt_native_join(const __u8 *bytes, __u32 length, struct shunt_share *share, struct shunt_piece *piece)
{
	struct shunt_socket socket = { .bytes = bytes, .length = length };

	__builtin_memset(piece, 0, sizeof(*piece));
	if (shunt_service.join)
		return shunt_service.join(&socket, share, piece);
	shunt_take(piece, 0, length);
	return 1;
}

__attribute__((visibility("default"))) const struct shunt_native SHUNT_NATIVE = {
	.version = SHUNT_NATIVE_VERSION,
	.verdict_size = sizeof(struct shunt_verdict),
	.service = &shunt_service,
	.parse = shunt_native_parse,
	.parse_reply = shunt_native_parse_reply,
	.decide = shunt_native_decide,
	.refuse = shunt_native_refuse,
	.accepted = shunt_native_accepted,
	.part = shunt_native_part,
	.join = shunt_native_join,
	.timer = shunt_native_timer,
	.service_timer = shunt_native_service_timer,
	.closed = shunt_native_closed,
	.started = shunt_native_started,
	.replied = shunt_native_replied,
	.put = shunt_native_put,
};

#endif
