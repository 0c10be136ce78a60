// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// What a service is written against. A service is one C file that includes this header and says SHUNT_SERVICE once. It
// is compiled twice: for BPF, where a socket is what arrived at it in the kernel, and natively, where it is a buffer of
// the user-space engine. The service cannot tell which: it sees bytes only through the functions here, which never read
// beyond what is there.
//
//	static int parse(struct shunt_socket *socket) { return length_message(socket, 4); }
//
//	static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict) { shunt_echo(verdict); }
//
//	SHUNT_SERVICE(.name = "length-echo", .parse = parse, .decide = decide);

#ifndef SHUNT_SERVICE_H
#define SHUNT_SERVICE_H

#include <linux/types.h>

#define SHUNT_INLINE static inline __attribute__((always_inline))
#define SHUNT_FUNCTION static __attribute__((noinline, unused))

// Bytes of an answer that a service gives by itself.
#define SHUNT_MAX_REPLY 256

// Bytes of a message, unless the service says otherwise. More is refused as too long.
#define SHUNT_MAX_MESSAGE (64 * 1024)

// Bytes of a service's own in front of and behind those of a message or an answer, when it is split or joined.
#define SHUNT_MAX_HEAD 64
#define SHUNT_MAX_TAIL 8

// No length is more than this, so that lengths can be added without care.
#define SHUNT_MAX_LENGTH 0x3fffffff

// Why a message cannot be served. What parse gives is one of these negated.
enum shunt_refusal {
	SHUNT_MALFORMED = 1, // not of this protocol
	SHUNT_TOO_LONG, // longer than the service takes
	SHUNT_UNKNOWN_VERSION, // of a version of the protocol that is not known
	SHUNT_MISSING_FIELD, // without the field that the service decides by
	SHUNT_UNKNOWN_COMMAND, // a command that the service does not serve
	SHUNT_TOO_COMPLEX, // nested too deeply, or of too many parts
	SHUNT_NO_BACKEND, // there is none for it (said by the engine)
	SHUNT_BACKEND_GONE, // it was under way to one that is gone (said by the engine)
	SHUNT_NO_REPLY, // its backend has not answered within `reply-timeout` (said by the engine)
};

// The bytes that arrived and were not yet taken, from `position` on. Only the functions below look inside.
struct shunt_socket {
#ifdef __bpf__
	struct __sk_buff *skb;
#else
	const __u8 *bytes;
#endif
	__u32 begin; // of the message, in what is above
	__u32 length; // bytes from there on
	__u32 position; // of the next byte to read, counted from `begin`
};

enum shunt_action {
	SHUNT_DROP, // forget the message
	SHUNT_ECHO, // send it back as it is
	SHUNT_FORWARD, // send it to the backend of its key
	SHUNT_REPLY, // answer with `reply`
	SHUNT_CLOSE, // answer with `reply` if it is not empty, and close
	SHUNT_REFUSE, // ask the service's `refuse` what to do, for the reason `why`
	SHUNT_MORE, // the bytes by which to decide are not all there: ask again with the whole message
	SHUNT_SPLIT, // several backends have a share in it: ask `part` for the messages that they get
};

enum shunt_key {
	SHUNT_NUMBER, // `number`
	SHUNT_BYTES, // `key_length` bytes of the message from `key_offset` on
	SHUNT_BACKEND, // `number` is which backend, counted from 0: the service has chosen
};

// What to do with a message. src/service/native.rs has it too.
struct shunt_verdict {
	__u32 action; // enum shunt_action
	__u32 why; // enum shunt_refusal, of SHUNT_REFUSE
	__u32 one_way; // the backend does not answer this message
	__u32 key; // enum shunt_key, of SHUNT_FORWARD
	__u64 number;
	__u32 key_offset;
	__u32 key_length;
	__u32 reply_length;
	__u8 reply[SHUNT_MAX_REPLY];
	__u32 padding;
};

// Which part of a message it is that several backends have a share in. src/service/mod.rs has it too.
struct shunt_share {
	__u32 index; // counted from 0
	__u32 count; // of all parts; known when they are answered
	__u64 state; // the service's own, from one part to the next: 0 at first
};

// Bytes put together: the service's own, then some of a message or of an answer, then the service's own again.
// src/service/native.rs has it too.
struct shunt_piece {
	__u32 offset;
	__u32 length;
	__u32 head_length;
	__u32 tail_length;
	__u8 head[SHUNT_MAX_HEAD];
	__u8 tail[SHUNT_MAX_TAIL];
};

// What a service is. src/service/native.rs has it too.
struct shunt_service {
	const char *name;
	// How long is the message that begins here? Its length as soon as that can be told, even if not all of it has
	// arrived; 0 if that needs more bytes; -enum shunt_refusal if there is no telling.
	int (*parse)(struct shunt_socket *socket);
	// The same of a backend's reply. None: the backends do not answer.
	int (*parse_reply)(struct shunt_socket *socket);
	// What to do with the message? `socket` has its bytes and no others. The verdict comes as SHUNT_DROP.
	void (*decide)(struct shunt_socket *socket, struct shunt_verdict *verdict);
	// What to do with a message that cannot be served? `socket` has its first bytes, 128 or more if there were so many.
	// If parse refused it, the connection is closed afterwards: nobody knows where the next message begins. It is also
	// closed if this function decides nothing, or is not there.
	void (*refuse)(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict);
	// A client has connected: SHUNT_REPLY greets it, SHUNT_CLOSE turns it away. The verdict comes as SHUNT_DROP: nothing.
	void (*accepted)(struct shunt_verdict *verdict);
	__u32 max_message; // SHUNT_MAX_MESSAGE if 0
	__u32 retry; // a message may be sent again, to another backend, when its own died before it answered
	// Of a message that decide has split (SHUNT_SPLIT), in user space: the next part, as a message that decide forwards.
	// 0: there are no more.
	int (*part)(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece);
	// All parts are answered; `socket` has the answer to this one, in their order: what of it does the client get? 0: that
	// alone, as the answer to the whole message, for it is none that can be joined with the others.
	int (*join)(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece);
};

static const struct shunt_service shunt_service;

#define SHUNT_SERVICE(...) static const struct shunt_service shunt_service = { __VA_ARGS__ }

// ---- reading

// Bytes that are there and not yet taken.
SHUNT_INLINE __u32 shunt_available(const struct shunt_socket *socket)
{
	return socket->position < socket->length ? socket->length - socket->position : 0;
}

#ifdef __bpf__
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

SHUNT_INLINE int shunt_copy(const struct shunt_socket *socket, __u32 from, void *to, __u32 length)
{
	return bpf_skb_load_bytes(socket->skb, from, to, length) ? -1 : 0;
}

// The compiler forgets what it knows of a value, and so leaves in the comparisons that the verifier needs to see.
#define SHUNT_OPAQUE(value) asm volatile("" : "+r"(value))

// A 32-bit value, of which the verifier forgets what it knows: the sign of a length is never set. What a loop's step
// leaves for the next is wrapped in this, so that the verifier sees the same step again, and not another one for each
// value.
#define SHUNT_ANY(socket, value) ((__u32)(value) ^ (__u32)((__s32)(socket)->skb->len >> 31))

SHUNT_INLINE long shunt_loop(__u32 times, long (*step)(__u64 index, void *state), void *state)
{
	return bpf_loop(times, step, state, 0);
}
#else
#define SHUNT_OPAQUE(value)
#define SHUNT_ANY(socket, value) ((__u32)(value))

// Calls `step` until it gives something else than 0, but at most so many times. The verifier looks at `step` once,
// however many times it is called. `state` is on the stack.
SHUNT_INLINE long shunt_loop(__u32 times, long (*step)(__u64 index, void *state), void *state)
{
	__u32 index = 0;

	while (index < times && !step(index, state))
		index++;
	return index;
}

SHUNT_INLINE int shunt_copy(const struct shunt_socket *socket, __u32 from, void *to, __u32 length)
{
	__builtin_memcpy(to, socket->bytes + from, length);
	return 0;
}
#endif

// Copies `length` bytes, `offset` bytes further on, without taking them. -1 if they are not all there.
SHUNT_INLINE int shunt_peek(const struct shunt_socket *socket, __u32 offset, void *to, __u32 length)
{
	__u64 end = (__u64)socket->position + offset + length;

	if (end > socket->length)
		return -1;
	return shunt_copy(socket, socket->begin + socket->position + offset, to, length);
}

// Copies `length` bytes, or as many as are there, `offset` bytes further on, without taking them, and gives how many.
// The rest of `to` becomes 0. `room`, a constant, is the size of `to`: `length` is no more.
SHUNT_INLINE __u32 shunt_peek_most(const struct shunt_socket *socket, __u32 offset, void *to, __u32 room,
				   __u64 length)
{
	__u64 from = (__u64)socket->position + offset;

	__builtin_memset(to, 0, room);
	if (from >= socket->length)
		return 0;
	if (length > socket->length - from)
		length = socket->length - from;
	SHUNT_OPAQUE(length);
	if (length < 1 || length > room)
		return 0;
	return shunt_copy(socket, socket->begin + from, to, length) ? 0 : length;
}

// The same with as many bytes as `to` has.
SHUNT_INLINE __u32 shunt_peek_some(const struct shunt_socket *socket, __u32 offset, void *to, __u32 room)
{
	return shunt_peek_most(socket, offset, to, room, room);
}

// Whether `length` bytes, `offset` bytes further on, are those of a literal of up to 64 bytes.
#define shunt_is(socket, offset, length, text) \
	((length) == sizeof(text) - 1 && shunt_same(socket, offset, text, sizeof(text) - 1))

SHUNT_INLINE int shunt_same(const struct shunt_socket *socket, __u32 offset, const char *text, __u32 length)
{
	__u8 bytes[64], different = 0;

	if (length > sizeof(bytes) || shunt_peek(socket, offset, bytes, length))
		return 0;
#pragma GCC unroll 64
	for (__u32 at = 0; at < length; at++)
		different |= bytes[at] ^ (__u8)text[at];
	return !different;
}

// Takes `length` bytes without looking at them. -1, and none is taken, if they are not all there.
SHUNT_INLINE int shunt_discard(struct shunt_socket *socket, __u32 length)
{
	if (length > shunt_available(socket))
		return -1;
	socket->position += length;
	return 0;
}

// Peeks and discards.
SHUNT_INLINE int shunt_read(struct shunt_socket *socket, void *to, __u32 length)
{
	if (shunt_peek(socket, 0, to, length))
		return -1;
	socket->position += length;
	return 0;
}

// ---- deciding

SHUNT_INLINE void shunt_echo(struct shunt_verdict *verdict)
{
	verdict->action = SHUNT_ECHO;
}

SHUNT_INLINE void shunt_drop(struct shunt_verdict *verdict)
{
	verdict->action = SHUNT_DROP;
}

SHUNT_INLINE void shunt_close(struct shunt_verdict *verdict)
{
	verdict->action = SHUNT_CLOSE;
}

SHUNT_INLINE void shunt_refuse(struct shunt_verdict *verdict, enum shunt_refusal why)
{
	verdict->action = SHUNT_REFUSE;
	verdict->why = why;
}

// To the backend that the key is for: by number modulo, or by hash, as `--hash` says.
SHUNT_INLINE void shunt_forward_by_number(struct shunt_verdict *verdict, __u64 number)
{
	verdict->action = SHUNT_FORWARD;
	verdict->key = SHUNT_NUMBER;
	verdict->number = number;
}

// The key is `length` bytes of the message from `offset` on, counted from the message's first byte.
SHUNT_INLINE void shunt_forward_by_bytes(struct shunt_verdict *verdict, __u32 offset, __u32 length)
{
	verdict->action = SHUNT_FORWARD;
	verdict->key = SHUNT_BYTES;
	verdict->key_offset = offset;
	verdict->key_length = length;
}

// To this backend, counted from 0 in the order of the file of backends.
SHUNT_INLINE void shunt_forward_to(struct shunt_verdict *verdict, __u64 backend)
{
	verdict->action = SHUNT_FORWARD;
	verdict->key = SHUNT_BACKEND;
	verdict->number = backend;
}

// The message is to be sent in parts, each to a backend of its own: see `part`.
SHUNT_INLINE void shunt_split(struct shunt_verdict *verdict)
{
	verdict->action = SHUNT_SPLIT;
}

// ---- answering

// Appends to the answer as many of the bytes as fit, and gives how many. The action becomes SHUNT_REPLY unless it is
// SHUNT_CLOSE. `length` must be a constant.
SHUNT_INLINE __u32 shunt_write(struct shunt_verdict *verdict, const void *bytes, __u32 length)
{
	const __u8 *from = bytes;
	__u32 at = verdict->reply_length, done = 0;

	while (done < length && at < SHUNT_MAX_REPLY)
		verdict->reply[at++] = from[done++];
	verdict->reply_length = at;
	if (verdict->action != SHUNT_CLOSE)
		verdict->action = SHUNT_REPLY;
	return done;
}

// Appends all of the bytes, or none and gives -1. `length` must be a constant.
SHUNT_INLINE int shunt_write_all(struct shunt_verdict *verdict, const void *bytes, __u32 length)
{
	__u32 at = verdict->reply_length;

	if (length > SHUNT_MAX_REPLY || at > SHUNT_MAX_REPLY - length)
		return -1;
	__builtin_memcpy(verdict->reply + at, bytes, length);
	verdict->reply_length = at + length;
	if (verdict->action != SHUNT_CLOSE)
		verdict->action = SHUNT_REPLY;
	return 0;
}

// Appends `length` bytes of the message, `most` (a constant) at most, or none and gives -1.
SHUNT_INLINE int shunt_write_from(struct shunt_verdict *verdict, const struct shunt_socket *socket, __u32 offset,
				  __u64 length, __u32 most)
{
	__u64 at = verdict->reply_length, from = (__u64)socket->position + offset;

	if (from + length > socket->length)
		return -1;
	SHUNT_OPAQUE(at);
	if (at > SHUNT_MAX_REPLY - most)
		return -1;
	SHUNT_OPAQUE(length);
	if (length < 1 || length > most)
		return -1;
	if (shunt_copy(socket, socket->begin + from, verdict->reply + at, length))
		return -1;
	verdict->reply_length = at + length;
	if (verdict->action != SHUNT_CLOSE)
		verdict->action = SHUNT_REPLY;
	return 0;
}

// ---- splitting and joining

// Appends bytes to those in front. Those that do not fit, as a service never has them, are left out, all of them.
SHUNT_INLINE void shunt_put(struct shunt_piece *piece, const void *bytes, __u32 length)
{
	if (length > SHUNT_MAX_HEAD || piece->head_length > SHUNT_MAX_HEAD - length)
		return;
	__builtin_memcpy(piece->head + piece->head_length, bytes, length);
	piece->head_length += length;
}

// Appends a number in digits to the bytes in front.
SHUNT_INLINE void shunt_put_number(struct shunt_piece *piece, __u64 number)
{
	__u8 digits[20], at = sizeof(digits);

	do {
		digits[--at] = '0' + number % 10;
		number /= 10;
	} while (number);
	shunt_put(piece, digits + at, sizeof(digits) - at);
}

// The bytes of the message, or of the answer, counted from its first.
SHUNT_INLINE void shunt_take(struct shunt_piece *piece, __u32 offset, __u32 length)
{
	piece->offset = offset;
	piece->length = length;
}

// Appends bytes to those behind. `length` is 8 at most.
SHUNT_INLINE void shunt_put_behind(struct shunt_piece *piece, const void *bytes, __u32 length)
{
	if (length > SHUNT_MAX_TAIL || piece->tail_length > SHUNT_MAX_TAIL - length)
		return;
	__builtin_memcpy(piece->tail + piece->tail_length, bytes, length);
	piece->tail_length += length;
}

// ---- what the engines call

SHUNT_INLINE int shunt_bounded(int length, const struct shunt_socket *socket)
{
	__u32 most = shunt_service.max_message ? shunt_service.max_message : SHUNT_MAX_MESSAGE;

	if (length > 0 ? (__u32)length > most : !length && socket->length >= most)
		return -SHUNT_TOO_LONG;
	return length;
}

SHUNT_INLINE int shunt_parse(struct shunt_socket *socket)
{
	return shunt_bounded(shunt_service.parse(socket), socket);
}

SHUNT_INLINE int shunt_parse_reply(struct shunt_socket *socket)
{
	if (!shunt_service.parse_reply)
		return -SHUNT_MALFORMED;
	return shunt_bounded(shunt_service.parse_reply(socket), socket);
}

SHUNT_INLINE void shunt_decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	verdict->action = SHUNT_DROP;
	verdict->one_way = 0;
	verdict->reply_length = 0;
	shunt_service.decide(socket, verdict);
}

SHUNT_INLINE void shunt_answer_refusal(struct shunt_socket *socket, enum shunt_refusal why,
				       struct shunt_verdict *verdict)
{
	verdict->action = SHUNT_MORE;
	verdict->reply_length = 0;
	if (shunt_service.refuse)
		shunt_service.refuse(socket, why, verdict);
	if (verdict->action == SHUNT_MORE)
		verdict->action = SHUNT_CLOSE;
}

// ---- the halves

#include "hash.h"

#ifdef __bpf__
#include "test.bpf.h"
#include "engine.bpf.h"
#else
#include "native.h"
#endif

#endif
