// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Timers, and bytes for other connections. service.h includes this file.
//
// Timers of a connection: SHUNT_TIMERS of them, counted from 0. `timer` is called with the context.
//
//	static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
//	{
//		shunt_arm(verdict, 0, 30000, 0, IDLE); // in 30 s, once
//		...
//	}
//
//	static void timer(struct shunt_verdict *verdict, __u64 context)
//	{
//		if (context == IDLE)
//			shunt_close(verdict);
//	}
//
// Either half arms them. User space alone calls `timer`, because no program in the kernel can send
// bytes, or use the state of a connection, without a packet of that connection. A timer that is armed
// again and again, as above, costs the kernel two words for each message: user space looks at them
// when the first one is due.
//
// Other connections: bytes that were written to the verdict so far, and not sent yet, go to one
// connection by its handle, or to all subscribers of a topic. The rest is the client's answer.
//
//	shunt_write_all(verdict, "rain\n", 5);
//	shunt_publish(verdict, TOPIC);
//	shunt_write_all(verdict, "ok\n", 3);
//
// Such *effects* are carried out by user space. In the kernel, a message whose decision has any goes
// to user space with the decision.

#ifndef SHUNT_EVENTS_H
#define SHUNT_EVENTS_H

enum shunt_effect_kind {
	SHUNT_SUBSCRIBE = 1, // to the topic `number`
	SHUNT_UNSUBSCRIBE,
	SHUNT_PUBLISH, // to the subscribers of `number`
	SHUNT_SEND_TO, // to the connection `number`
	SHUNT_ANSWER_TO, // the answer to the oldest deferred message of the connection `number`
	SHUNT_ARM_SERVICE, // the timer `end` of the service, with the context `number`
	SHUNT_REGISTER, // a backend of the weight `number`
	SHUNT_UNREGISTER,
};

// What the engine keeps for a connection, right behind the state that the service keeps for it.
// src/service/store.rs has the same layout.
struct shunt_connection {
	__u64 handle;
	__u64 armed; // bit n: the callback has armed or stopped timer n
	struct {
		__u32 after; // milliseconds; 0: stopped
		__u32 every;
		__u64 context;
	} timers[SHUNT_TIMERS];
};

SHUNT_INLINE struct shunt_connection *shunt_connection_of(struct shunt_verdict *verdict)
{
#ifdef __bpf__
	return (struct shunt_connection *)((__u8 *)(verdict + 1) + SHUNT_MAX_SESSION);
#else
	return (struct shunt_connection *)((__u8 *)verdict->session + SHUNT_MAX_SESSION);
#endif
}

// ---- timers

// Has `timer` called with `context` in `after` milliseconds, and then, unless `every` is 0, each
// `every` milliseconds. `number` is a constant. The timer forgets what it was armed for before.
#define shunt_arm(VERDICT, NUMBER, AFTER, EVERY, CONTEXT)                                            \
	({                                                                                           \
		_Static_assert((NUMBER) < SHUNT_TIMERS, "a connection has SHUNT_TIMERS timers");     \
		_Static_assert(__builtin_constant_p(NUMBER), "the timer's number is a constant");    \
		shunt_arm_timer(VERDICT, NUMBER, AFTER, EVERY, CONTEXT);                             \
	})

SHUNT_INLINE void shunt_arm_timer(struct shunt_verdict *verdict, __u32 number, __u32 after, __u32 every,
				  __u64 context)
{
	struct shunt_connection *connection = shunt_connection_of(verdict);

	connection->timers[number].after = after ? after : 1;
	connection->timers[number].every = every;
	connection->timers[number].context = context;
	connection->armed |= 1u << number;
}

// Stops a timer. `number` is a constant.
SHUNT_INLINE void shunt_stop(struct shunt_verdict *verdict, __u32 number)
{
	struct shunt_connection *connection = shunt_connection_of(verdict);

	connection->timers[number].after = 0;
	connection->timers[number].every = 0;
	connection->armed |= 1u << number;
}

// ---- other connections

SHUNT_INLINE int shunt_does_not_fit(struct shunt_verdict *verdict);

SHUNT_INLINE struct shunt_effect *shunt_effect(struct shunt_verdict *verdict, enum shunt_effect_kind kind,
					       __u64 number)
{
	__u32 at = verdict->effects;
	struct shunt_effect *effect;

	SHUNT_OPAQUE(at);
	if (at >= SHUNT_EFFECTS) {
		shunt_does_not_fit(verdict);
		return 0;
	}
	effect = &verdict->effect[at];
	effect->kind = kind;
	effect->end = verdict->reply_length;
	effect->number = number;
	effect->after = 0;
	effect->every = 0;
	verdict->effects = at + 1;
	return effect;
}

SHUNT_INLINE int shunt_send_away(struct shunt_verdict *verdict, enum shunt_effect_kind kind, __u64 number)
{
	if (!shunt_effect(verdict, kind, number))
		return -1;
	if (verdict->action == SHUNT_REPLY)
		verdict->action = SHUNT_DROP;
	return 0;
}

// Returns the handle of this connection, by which others send to it. No later connection has it.
SHUNT_INLINE __u64 shunt_handle(struct shunt_verdict *verdict)
{
	return shunt_connection_of(verdict)->handle;
}

// Sends the bytes written so far to another connection, between its answers. Nothing happens if that
// has ended. One callback has at most SHUNT_EFFECTS of these and the following calls: one more
// refuses the message as SHUNT_TOO_LONG, and returns -1.
SHUNT_INLINE int shunt_send_to(struct shunt_verdict *verdict, __u64 handle)
{
	return shunt_send_away(verdict, SHUNT_SEND_TO, handle);
}

// Sends the bytes written so far as the answer to the oldest deferred message of a connection,
// possibly this one.
SHUNT_INLINE int shunt_answer_to(struct shunt_verdict *verdict, __u64 handle)
{
	return shunt_send_away(verdict, SHUNT_ANSWER_TO, handle);
}

// Sends the bytes written so far to the subscribers of a topic.
SHUNT_INLINE int shunt_publish(struct shunt_verdict *verdict, __u64 topic)
{
	return shunt_send_away(verdict, SHUNT_PUBLISH, topic);
}

// Subscribes this connection. A connection with a subscription is served in user space.
SHUNT_INLINE int shunt_subscribe(struct shunt_verdict *verdict, __u64 topic)
{
	return shunt_effect(verdict, SHUNT_SUBSCRIBE, topic) ? 0 : -1;
}

SHUNT_INLINE int shunt_unsubscribe(struct shunt_verdict *verdict, __u64 topic)
{
	return shunt_effect(verdict, SHUNT_UNSUBSCRIBE, topic) ? 0 : -1;
}

// Adds a backend. Its address, ADDRESS:PORT, is the bytes written so far. `weight`, from 1 to 100, counts
// for ketama. The operator must permit addresses of its network (--allow-register): otherwise, and if it
// is a backend already, nothing happens, and the status counts that. The list changes a little later.
//
// A client that can have the service call this decides where the messages of other clients go. So check
// which client asks, for example by a secret in the message.
SHUNT_INLINE int shunt_register(struct shunt_verdict *verdict, __u32 weight)
{
	return shunt_send_away(verdict, SHUNT_REGISTER, weight);
}

// Removes the backend with the address that was written so far. It answers the messages that it has.
SHUNT_INLINE int shunt_unregister(struct shunt_verdict *verdict)
{
	return shunt_send_away(verdict, SHUNT_UNREGISTER, 0);
}

// Keeps the place of this message's answer. shunt_answer_to sends it later, for example from `timer`
// or for another connection's message. Answers to later messages wait for it.
SHUNT_INLINE void shunt_defer(struct shunt_verdict *verdict)
{
	verdict->action = SHUNT_DEFER;
}

// Has `service_timer` called, like shunt_arm. The service has SHUNT_SERVICE_TIMERS timers. With
// `after` 0 it is stopped.
SHUNT_INLINE int shunt_arm_service(struct shunt_verdict *verdict, __u32 number, __u32 after, __u32 every,
				   __u64 context)
{
	struct shunt_effect *effect = shunt_effect(verdict, SHUNT_ARM_SERVICE, context);

	if (!effect)
		return -1;
	effect->after = after;
	effect->every = every;
	effect->end = verdict->reply_length | number << 16;
	return 0;
}

#endif
