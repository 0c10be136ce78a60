// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The interface for services. A service is one C file that includes this header and uses
// SHUNT_SERVICE once. It is compiled twice: for BPF, where a socket is data that arrived in the
// kernel, and natively, where it is a buffer of the user-space engine. The service cannot
// distinguish them: it reads bytes only with the functions here, which never read beyond the
// available bytes.
//
//	static int parse(struct shunt_socket *socket) { return length_message(socket, 4); }
//
//	static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
//	{
//		shunt_echo(verdict);
//	}
//
//	SHUNT_SERVICE(.name = "length-echo", .parse = parse, .decide = decide);

#ifndef SHUNT_SERVICE_H
#define SHUNT_SERVICE_H

#include <linux/types.h>

#define SHUNT_INLINE static inline __attribute__((always_inline))
#define SHUNT_FUNCTION static __attribute__((noinline, unused))

// The most bytes of an answer that a service makes itself.
#define SHUNT_MAX_REPLY 256

// The most bytes of a message that `replied` gets.
#define SHUNT_KEPT_MESSAGE 512

// The most bytes of a message, unless the service overrides it. Longer ones are refused.
#define SHUNT_MAX_MESSAGE (64 * 1024)

// The most bytes that a service adds before and after those of a message or an answer, when it is
// split or joined.
#define SHUNT_MAX_HEAD 64
#define SHUNT_MAX_TAIL 8

// The largest length. Sums of a few lengths do not overflow 32 bits.
#define SHUNT_MAX_LENGTH 0x3fffffff

// The most entries of hash tables that one callback can use, and the most bytes of a key.
#define SHUNT_PINS 4
#define SHUNT_MAX_KEY 64

// The timers of a connection and of the service, and the most effects of one callback (see events.h).
#define SHUNT_TIMERS 4
#define SHUNT_SERVICE_TIMERS 8
#define SHUNT_EFFECTS 4

// Why a message cannot be served. `parse` returns one of these negated.
enum shunt_refusal {
	SHUNT_MALFORMED = 1, // not of this protocol
	SHUNT_TOO_LONG, // longer than the service takes
	SHUNT_UNKNOWN_VERSION, // an unknown version of the protocol
	SHUNT_MISSING_FIELD, // without the field that the service decides by
	SHUNT_UNKNOWN_COMMAND, // a command that the service does not serve
	SHUNT_TOO_COMPLEX, // nested too deeply, or of too many parts
	SHUNT_NO_BACKEND, // there is no backend for it (set by the engine)
	SHUNT_BACKEND_GONE, // its backend's connection broke (set by the engine)
	SHUNT_NO_REPLY, // no reply within `reply-timeout` (set by the engine)
	SHUNT_TOO_MANY, // more messages than `--rate` allows (set by the engine)
};

// The received bytes that were not taken yet, from `position` on. Use the functions below, not the
// members.
struct shunt_socket {
#ifdef __bpf__
	struct __sk_buff *skb;
#else
	const __u8 *bytes;
#endif
	__u32 begin; // offset of the message in the bytes above
	__u32 length; // bytes from there on
	__u32 position; // offset of the next byte to read, relative to `begin`
};

enum shunt_action {
	SHUNT_DROP, // forget the message
	SHUNT_ECHO, // send it back as it is
	SHUNT_FORWARD, // send it to the backend of its key
	SHUNT_REPLY, // answer with `reply`
	SHUNT_CLOSE, // answer with `reply` if it is not empty, and close
	SHUNT_REFUSE, // ask the service's `refuse` what to do, for the reason `why`
	SHUNT_MORE, // more bytes are needed: ask again with the whole message
	SHUNT_SPLIT, // split it among several backends: `part` makes a message for each
	SHUNT_CONTENT, // for the cache: answer with the content of the key, or with `reply`
	SHUNT_IN_USER_SPACE, // ask again in user space. The service has not changed its state
	SHUNT_DEFER, // it is answered later, by shunt_answer_to
	SHUNT_STORED, // answer with `reply`, and the `key_length` bytes of the state from `number` on
};

enum shunt_key {
	SHUNT_NUMBER, // `number`
	SHUNT_BYTES, // `key_length` bytes of the message from `key_offset` on
	SHUNT_BACKEND, // `number` is the backend's index: the service has chosen
};

// Something else than the client's answer. src/service/native.rs has the same layout.
struct shunt_effect {
	__u32 kind; // enum shunt_effect_kind
	__u32 end; // in `reply`, of the bytes that are sent; with a timer's number in the upper half
	__u64 number;
	__u32 after, every; // milliseconds
};

// A decision about a message. src/service/native.rs has the same layout.
struct shunt_verdict {
	__u32 action; // enum shunt_action
	__u32 why; // enum shunt_refusal, for SHUNT_REFUSE
	__u32 one_way; // the backend does not answer this message
	__u32 key; // enum shunt_key, for SHUNT_FORWARD
	__u64 number;
	__u32 key_offset;
	__u32 key_length;
	__u32 reply_length;
	__u8 reply[SHUNT_MAX_REPLY];
	__u32 pinned; // see state.h, as for the members below
	__u64 pins[SHUNT_PINS];
	__u64 key_words[SHUNT_MAX_KEY / 8];
	__u32 effects;
	__u32 padding;
	struct shunt_effect effect[SHUNT_EFFECTS];
#ifdef __bpf__
	__u64 unused[2]; // the connection's state follows the verdict
#else
	void *memory;
	void *session;
#endif
};

// The position in a split message. src/service/mod.rs has the same layout.
struct shunt_share {
	__u32 index; // counted from 0
	__u32 count; // number of parts; known only when they are joined
	__u64 state; // state of the service from one part to the next, initially 0
};

// Composed bytes: `head`, then a range of a message or of an answer, then `tail`.
// src/service/native.rs has the same layout.
struct shunt_piece {
	__u32 offset;
	__u32 length;
	__u32 head_length;
	__u32 tail_length;
	__u8 head[SHUNT_MAX_HEAD];
	__u8 tail[SHUNT_MAX_TAIL];
};

// A service. src/service/native.rs has the same layout.
struct shunt_service {
	const char *name;
	// Returns the message's length as soon as it can be computed, even if the message is
	// incomplete; 0 if that needs more bytes; or a negated enum shunt_refusal.
	int (*parse)(struct shunt_socket *socket);
	// Returns the length of a backend's reply in the same form. Null: backends do not reply.
	int (*parse_reply)(struct shunt_socket *socket);
	// Decides about a message. `socket` has exactly its bytes. The verdict is initially
	// SHUNT_DROP.
	void (*decide)(struct shunt_socket *socket, struct shunt_verdict *verdict);
	// Answers a message that cannot be served. `socket` has at least its first 128 bytes, or
	// all bytes of a shorter message. If `parse` refused it, the connection is closed
	// afterwards, because the beginning of the next message is unknown. It is also closed if
	// this function sets no action or is null.
	void (*refuse)(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict);
	// Greets a new client with SHUNT_REPLY, or rejects it with SHUNT_CLOSE. The verdict is
	// initially SHUNT_DROP, which sends nothing.
	void (*accepted)(struct shunt_verdict *verdict);
	__u32 max_message; // SHUNT_MAX_MESSAGE if 0
	__u32 retry; // a message may be sent to another backend if its own fails before it replies
	// Makes the next part of a message that `decide` has split (SHUNT_SPLIT), in user space.
	// The part is a message that `decide` forwards. Returns 0 if there are no more.
	int (*part)(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece);
	// Selects the client's share of the answer to a part, which is in `socket`. The engine
	// calls this for each part in order, once all are answered. Returns 0 if this answer cannot
	// be joined with the others: it alone then answers the whole message.
	int (*join)(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece);
	// The size of struct shunt_state, if the service declares it. See state.h.
	__u64 state;
	// The kernel engine sends answers (SHUNT_REPLY) itself. Otherwise it leaves them to user
	// space, and what it redirects is a little faster.
	__u32 answers;
	__u32 unused;
	// Is called when a timer of the connection is due, in user space. It can change the state, push
	// bytes to the client (SHUNT_REPLY), and close the connection.
	void (*timer)(struct shunt_verdict *verdict, __u64 context);
	// Is called when a timer of the service is due. It has no client: SHUNT_REPLY and SHUNT_CLOSE do
	// nothing.
	void (*service_timer)(struct shunt_verdict *verdict, __u64 context);
	// Is called when a connection has ended, with its last state; and when the service ends, for each
	// connection that is still open after `--drain`. It cannot answer.
	void (*closed)(struct shunt_verdict *verdict);
	// Is called once, before the first client.
	void (*started)(struct shunt_verdict *verdict);
	// Is called with each reply of a backend, before the client gets it, and with the beginning of the
	// message that it answers: at most SHUNT_KEPT_MESSAGE bytes. It can change the state, for example
	// store the reply. It cannot change the answer. It runs in user space, so the kernel passes the
	// replies of such a service on to user space.
	void (*replied)(struct shunt_socket *message, struct shunt_socket *reply, struct shunt_verdict *verdict);
};

static const struct shunt_service shunt_service;

#define SHUNT_SERVICE(...) static const struct shunt_service shunt_service = { __VA_ARGS__ }

// ---- reading

// Returns the number of bytes that were not taken yet.
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

// Hides a value's range from the compiler, which then keeps comparisons that the verifier needs.
#define SHUNT_OPAQUE(value) asm volatile("" : "+r"(value))

// Hides a 32-bit value from the verifier: the sign of a length is never set, so the value is not
// changed. Wrap in this all state that a step of a loop leaves for the next. Then the verifier sees
// the same state again, instead of a new one for each value.
#define SHUNT_ANY(socket, value) ((__u32)(value) ^ (__u32)((__s32)(socket)->skb->len >> 31))

SHUNT_INLINE long shunt_loop(__u32 times, long (*step)(__u64 index, void *state), void *state)
{
	return bpf_loop(times, step, state, 0);
}
#else
#define SHUNT_OPAQUE(value)
#define SHUNT_ANY(socket, value) ((__u32)(value))

// Calls `step` until it returns a value other than 0, at most `times` times. The verifier checks
// `step` only once, however often it is called. `state` is on the stack.
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

// Copies `length` bytes at `offset` without taking them. Returns -1 if some are missing.
SHUNT_INLINE int shunt_peek(const struct shunt_socket *socket, __u32 offset, void *to, __u32 length)
{
	__u64 end = (__u64)socket->position + offset + length;

	if (end > socket->length)
		return -1;
	return shunt_copy(socket, socket->begin + socket->position + offset, to, length);
}

// Copies up to `length` bytes at `offset` without taking them, and returns their number. The rest
// of `to` becomes 0. `room`, a constant, is the size of `to`, and `length` is at most that.
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

// Copies up to `room` bytes at `offset` without taking them, and returns their number.
SHUNT_INLINE __u32 shunt_peek_some(const struct shunt_socket *socket, __u32 offset, void *to, __u32 room)
{
	return shunt_peek_most(socket, offset, to, room, room);
}

// Compares `length` bytes at `offset` with a literal of up to 64 bytes.
#define shunt_is(socket, offset, length, text)                                                       \
	({                                                                                           \
		__u8 shunt_bytes[sizeof(text)];                                                      \
		_Static_assert(sizeof(text) <= 65, "a literal of up to 64 bytes");                   \
		(length) == sizeof(text) - 1 &&                                                      \
			shunt_same(socket, offset, text, sizeof(text) - 1, shunt_bytes);             \
	})

SHUNT_INLINE int shunt_same(const struct shunt_socket *socket, __u32 offset, const char *text, __u32 length,
			    __u8 *bytes)
{
	__u8 different = 0;

	if (shunt_peek(socket, offset, bytes, length))
		return 0;
#pragma GCC unroll 64
	for (__u32 at = 0; at < length; at++)
		different |= bytes[at] ^ (__u8)text[at];
	return !different;
}

// Takes `length` bytes. Returns -1, and takes none, if some are missing.
SHUNT_INLINE int shunt_discard(struct shunt_socket *socket, __u32 length)
{
	if (length > shunt_available(socket))
		return -1;
	socket->position += length;
	return 0;
}

// Copies and takes `length` bytes. Returns -1, and takes none, if some are missing.
SHUNT_INLINE int shunt_read(struct shunt_socket *socket, void *to, __u32 length)
{
	if (shunt_peek(socket, 0, to, length))
		return -1;
	socket->position += length;
	return 0;
}

// ---- state

#include "state.h"

// ---- timers and other connections

#include "events.h"

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

// Forwards to the backend of a numeric key, which `--hash` maps to one.
SHUNT_INLINE void shunt_forward_by_number(struct shunt_verdict *verdict, __u64 number)
{
	verdict->action = SHUNT_FORWARD;
	verdict->key = SHUNT_NUMBER;
	verdict->number = number;
}

// Forwards to the backend of a key of bytes: `length` bytes of the message at `offset`, relative to
// the message's first byte.
SHUNT_INLINE void shunt_forward_by_bytes(struct shunt_verdict *verdict, __u32 offset, __u32 length)
{
	verdict->action = SHUNT_FORWARD;
	verdict->key = SHUNT_BYTES;
	verdict->key_offset = offset;
	verdict->key_length = length;
}

// Forwards to the backend with this index in the file of backends, counted from 0.
SHUNT_INLINE void shunt_forward_to(struct shunt_verdict *verdict, __u64 backend)
{
	verdict->action = SHUNT_FORWARD;
	verdict->key = SHUNT_BACKEND;
	verdict->number = backend;
}

// Splits the message into parts, each for its own backend. See `part`.
SHUNT_INLINE void shunt_split(struct shunt_verdict *verdict)
{
	verdict->action = SHUNT_SPLIT;
}

// ---- answering

// Makes a constant length that no answer can have an error of the build. Only clang can.
#ifdef __clang__
#define SHUNT_FITS(length) \
	__attribute__((diagnose_if((length) > SHUNT_MAX_REPLY, "an answer has at most 256 bytes", "error")))
#else
#define SHUNT_FITS(length)
#endif

static inline __u32 shunt_write(struct shunt_verdict *verdict, const void *bytes, __u32 length)
	__attribute__((warn_unused_result)) SHUNT_FITS(length);
static inline int shunt_write_all(struct shunt_verdict *verdict, const void *bytes, __u32 length) SHUNT_FITS(length);

// Refuses the message, because its answer does not fit. A client that waits for an answer gets one.
SHUNT_INLINE int shunt_does_not_fit(struct shunt_verdict *verdict)
{
	if (verdict->action != SHUNT_CLOSE)
		shunt_refuse(verdict, SHUNT_TOO_LONG);
	return -1;
}

// Appends to the answer as many of the bytes as fit, and returns their number. The action becomes
// SHUNT_REPLY unless it is SHUNT_CLOSE. `length` must be a constant.
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

// Appends all of the bytes to the answer. If they do not fit, appends none, refuses the message as
// SHUNT_TOO_LONG, and returns -1. `length` must be a constant.
SHUNT_INLINE int shunt_write_all(struct shunt_verdict *verdict, const void *bytes, __u32 length)
{
	__u32 at = verdict->reply_length;

	if (length > SHUNT_MAX_REPLY || at > SHUNT_MAX_REPLY - length)
		return shunt_does_not_fit(verdict);
	__builtin_memcpy(verdict->reply + at, bytes, length);
	verdict->reply_length = at + length;
	if (verdict->action != SHUNT_CLOSE)
		verdict->action = SHUNT_REPLY;
	return 0;
}

// Appends a number in decimal digits to the answer. If it does not fit, refuses the message as
// SHUNT_TOO_LONG, and returns -1.
SHUNT_INLINE int shunt_write_number(struct shunt_verdict *verdict, __u64 number)
{
	__u8 digits[20];
	__u32 first = sizeof(digits);

#pragma GCC unroll 20
	for (int at = sizeof(digits) - 1; at >= 0; at--) {
		digits[at] = '0' + number % 10;
		if (number || at == sizeof(digits) - 1)
			first = at;
		number /= 10;
	}
	if (verdict->reply_length > SHUNT_MAX_REPLY - sizeof(digits))
		return shunt_does_not_fit(verdict);
	for (__u32 at = 0; at < sizeof(digits); at++)
		if (at >= first && shunt_write(verdict, digits + at, 1) != 1)
			return -1;
	return 0;
}

// Appends `length` bytes of the message to the answer. If they do not fit, appends none, refuses the
// message as SHUNT_TOO_LONG, and returns -1. `most`, a constant, bounds `length`.
SHUNT_INLINE int shunt_write_from(struct shunt_verdict *verdict, const struct shunt_socket *socket, __u32 offset,
				  __u64 length, __u32 most)
{
	__u64 at = verdict->reply_length, from = (__u64)socket->position + offset;

	if (from + length > socket->length)
		return -1;
	SHUNT_OPAQUE(at);
	if (at > SHUNT_MAX_REPLY - most)
		return shunt_does_not_fit(verdict);
	SHUNT_OPAQUE(length);
	if (length < 1)
		return -1;
	if (length > most)
		return shunt_does_not_fit(verdict);
	if (shunt_copy(socket, socket->begin + from, verdict->reply + at, length))
		return -1;
	verdict->reply_length = at + length;
	if (verdict->action != SHUNT_CLOSE)
		verdict->action = SHUNT_REPLY;
	return 0;
}

// Leaves the decision to user space.
SHUNT_INLINE void shunt_leave_to_user(struct shunt_verdict *verdict)
{
	verdict->action = SHUNT_IN_USER_SPACE;
}

// ---- splitting and joining

// Appends bytes to the head. If they do not fit, which a correct service avoids, none are appended.
SHUNT_INLINE void shunt_put(struct shunt_piece *piece, const void *bytes, __u32 length)
{
	if (length > SHUNT_MAX_HEAD || piece->head_length > SHUNT_MAX_HEAD - length)
		return;
	__builtin_memcpy(piece->head + piece->head_length, bytes, length);
	piece->head_length += length;
}

// Appends a number in decimal digits to the head.
SHUNT_INLINE void shunt_put_number(struct shunt_piece *piece, __u64 number)
{
	__u8 digits[20], at = sizeof(digits);

	do {
		digits[--at] = '0' + number % 10;
		number /= 10;
	} while (number);
	shunt_put(piece, digits + at, sizeof(digits) - at);
}

// Sets the range of the message or the answer, relative to its first byte.
SHUNT_INLINE void shunt_take(struct shunt_piece *piece, __u32 offset, __u32 length)
{
	piece->offset = offset;
	piece->length = length;
}

// Appends bytes to the tail. `length` is at most 8.
SHUNT_INLINE void shunt_put_behind(struct shunt_piece *piece, const void *bytes, __u32 length)
{
	if (length > SHUNT_MAX_TAIL || piece->tail_length > SHUNT_MAX_TAIL - length)
		return;
	__builtin_memcpy(piece->tail + piece->tail_length, bytes, length);
	piece->tail_length += length;
}

// ---- functions that the engines call

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

SHUNT_INLINE void shunt_begin(struct shunt_verdict *verdict, enum shunt_action action)
{
	verdict->action = action;
	verdict->one_way = 0;
	verdict->reply_length = 0;
	verdict->pinned = 0;
	verdict->effects = 0;
}

// Calls a callback without a message.
#define SHUNT_CALL(VERDICT, CALLBACK, ...)                                                           \
	({                                                                                           \
		shunt_begin(VERDICT, SHUNT_DROP);                                                    \
		if (shunt_service.CALLBACK)                                                          \
			shunt_service.CALLBACK(__VA_ARGS__);                                         \
		if (shunt_service.state)                                                             \
			shunt_unpin_all(VERDICT);                                                    \
	})

SHUNT_INLINE void shunt_decide_inline(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	shunt_begin(verdict, SHUNT_DROP);
	shunt_service.decide(socket, verdict);
}

// The variables of a service with state, together with the engine's, could exceed the stack.
SHUNT_FUNCTION void shunt_decide_with_state(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	shunt_decide_inline(socket, verdict);
	// The engine unpins a content once it has copied it.
	if (verdict->action != SHUNT_STORED)
		shunt_unpin_all(verdict);
}

SHUNT_INLINE void shunt_decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	if (shunt_service.state)
		shunt_decide_with_state(socket, verdict);
	else
		shunt_decide_inline(socket, verdict);
}

SHUNT_INLINE void shunt_answer_refusal(struct shunt_socket *socket, enum shunt_refusal why,
				       struct shunt_verdict *verdict)
{
	shunt_begin(verdict, SHUNT_MORE);
	if (shunt_service.refuse)
		shunt_service.refuse(socket, why, verdict);
	if (shunt_service.state)
		shunt_unpin_all(verdict);
	if (verdict->action == SHUNT_MORE)
		verdict->action = SHUNT_CLOSE;
}

// ---- the two halves

#ifdef __bpf__
// Keeps the type in the object. src/service/layout.rs reads it from there.
struct shunt_state;
static const struct shunt_state *const shunt_state_type __attribute__((used)) = 0;
#endif

#include "hash.h"

#ifdef __bpf__
#include "test.bpf.h"
#include "engine.bpf.h"
#else
#include "native.h"
#endif

#endif
