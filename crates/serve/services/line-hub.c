// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Lines with commands: an example of timers, deferred answers and bytes for other connections.
//
//	sub NAME, unsub NAME	subscribes to a topic, or ends that
//	pub NAME TEXT		sends the line to the topic's subscribers
//	wait MILLISECONDS	is answered later
//	every MILLISECONDS	sends "tick" so often, until "stop"
//	idle MILLISECONDS	closes the connection once it has sent nothing for so long
//	me			the handle of this connection
//	to HANDLE TEXT		sends the line to the connection with that handle
//
// Other lines are sent back. The topic "end" gets "bye" when a connection ends.

#include <shunt/line.h>

#define END 0x646e65 // "end", as a topic

enum { IDLE, WAIT, TICK };

struct shunt_state {
	SHUNT_COUNTER(lines);
	SHUNT_COUNTER(ticks);
	SHUNT_COUNTER(ended);
	SHUNT_COUNTER(ended_idle);
	SHUNT_COUNTER(beats);
};

struct session {
	__u64 idle; // milliseconds
	__u64 is_idle;
	__u64 waiting; // deferred lines
};

static int parse(struct shunt_socket *socket)
{
	return line_message(socket);
}

// Reads up to 19 digits.
static __u64 number_of(struct shunt_socket *socket, const struct line_word *word)
{
	__u8 digits[20];
	__u64 number = 0;

	shunt_peek_most(socket, word->offset, digits, sizeof(digits), word->length);
#pragma GCC unroll 20
	for (__u32 at = 0; at < sizeof(digits); at++)
		if (digits[at] >= '0' && digits[at] <= '9')
			number = number * 10 + digits[at] - '0';
	return number;
}

static __u64 topic_of(struct shunt_socket *socket, const struct line_word *word)
{
	__u64 topic;

	shunt_peek_most(socket, word->offset, (__u8 *)&topic, sizeof(topic), word->length);
	return topic;
}

static void say_ok(struct shunt_verdict *verdict)
{
	shunt_write_all(verdict, "ok\n", 3);
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct session *session = shunt_session(verdict, struct session);
	__u32 length = shunt_available(socket), end = length - 1;
	struct line_word first, second;

	line_word(socket, 0, end, &first);
	line_word(socket, first.length + 1, end, &second);
	shunt_count(verdict, lines, 1);
	if (shunt_is(socket, first.offset, first.length, "sub")) {
		shunt_subscribe(verdict, topic_of(socket, &second));
		say_ok(verdict);
	} else if (shunt_is(socket, first.offset, first.length, "unsub")) {
		shunt_unsubscribe(verdict, topic_of(socket, &second));
		say_ok(verdict);
	} else if (shunt_is(socket, first.offset, first.length, "pub")) {
		if (shunt_write_from(verdict, socket, 0, length, 240))
			return;
		shunt_publish(verdict, topic_of(socket, &second));
		say_ok(verdict);
	} else if (shunt_is(socket, first.offset, first.length, "to")) {
		if (shunt_write_from(verdict, socket, 0, length, 240))
			return;
		shunt_send_to(verdict, number_of(socket, &second));
		say_ok(verdict);
	} else if (shunt_is(socket, first.offset, first.length, "me")) {
		shunt_write_number(verdict, shunt_handle(verdict));
		shunt_write_all(verdict, "\n", 1);
	} else if (shunt_is(socket, first.offset, first.length, "wait")) {
		shunt_arm(verdict, 1, number_of(socket, &second), 0, WAIT);
		shunt_defer(verdict);
		session->waiting++;
	} else if (shunt_is(socket, first.offset, first.length, "every")) {
		__u32 every = number_of(socket, &second);

		shunt_arm(verdict, 2, every, every ? every : 1, TICK);
		say_ok(verdict);
	} else if (shunt_is(socket, first.offset, first.length, "stop")) {
		shunt_stop(verdict, 2);
		say_ok(verdict);
	} else if (shunt_is(socket, first.offset, first.length, "idle")) {
		session->idle = number_of(socket, &second);
		say_ok(verdict);
	} else {
		shunt_echo(verdict);
	}
	if (session->idle)
		shunt_arm(verdict, 0, session->idle, 0, IDLE);
}

static void timer(struct shunt_verdict *verdict, __u64 context)
{
	struct session *session = shunt_session(verdict, struct session);

	if (context == IDLE) {
		session->is_idle = 1;
		shunt_write_all(verdict, "idle\n", 5);
		shunt_close(verdict);
	} else if (context == WAIT) {
		shunt_write_all(verdict, "done\n", 5);
		shunt_answer_to(verdict, shunt_handle(verdict));
		if (--session->waiting)
			shunt_arm(verdict, 1, 1, 0, WAIT);
	} else {
		shunt_count(verdict, ticks, 1);
		shunt_write_all(verdict, "tick\n", 5);
	}
}

static void closed(struct shunt_verdict *verdict)
{
	struct session *session = shunt_session(verdict, struct session);

	shunt_count(verdict, ended, 1);
	if (session->is_idle)
		shunt_count(verdict, ended_idle, 1);
	shunt_write_all(verdict, "bye\n", 4);
	shunt_publish(verdict, END);
}

static void started(struct shunt_verdict *verdict)
{
	shunt_arm_service(verdict, 0, 10, 10, 0);
}

static void service_timer(struct shunt_verdict *verdict, __u64 context)
{
	shunt_count(verdict, beats, 1);
}

SHUNT_SERVICE(.name = "line-hub", .parse = parse, .decide = decide, .timer = timer, .closed = closed,
	      .started = started, .service_timer = service_timer, .state = sizeof(struct shunt_state), .answers = 1);
