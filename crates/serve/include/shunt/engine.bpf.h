// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The kernel engine: an sk_skb program that runs for all data that arrives at the sockets of
// conversations in the map. A single whole message, or a single whole reply, is redirected to its
// destination socket. Anything else is passed to user space, together with the conversation.
//
// For example, a client's message "get a\r\n" that arrives alone goes to its backend's socket. Two
// messages in one segment are passed, with the reason SHUNT_LEAVE_COALESCED.
//
// docs/serve-protocol.md explains each step and relies on the order of the atomic operations here.
// src/engine/kernel.rs is the user-space side. service.h includes this file.

#ifndef SHUNT_ENGINE_BPF_H
#define SHUNT_ENGINE_BPF_H

#include <asm/socket.h>

// Bytes of a pending message that are kept, in order to refuse it or send it again.
#define SHUNT_KEPT SHUNT_KEPT_MESSAGE
// The most bytes sent to a socket that its peer has not acknowledged.
#define SHUNT_UNDER_WAY (256 * 1024)
// The most unanswered messages in a millisecond, and below, the most consecutive messages that
// arrive before the client has the answer to the previous one.
#define SHUNT_BUSY 16
#define SHUNT_SEVERAL 8
#define SHUNT_POINTS 65536

// Why a conversation leaves the kernel. `Move` in src/engine/counts.rs has the same order, after
// its first variant.
enum shunt_leave {
	SHUNT_LEAVE_PARTIAL = 1,
	SHUNT_LEAVE_COALESCED,
	SHUNT_LEAVE_REFUSED,
	SHUNT_LEAVE_UNUSUAL,
	SHUNT_LEAVE_NO_CONNECTION,
	SHUNT_LEAVE_OUTSTANDING,
	SHUNT_LEAVE_BUSY,
	SHUNT_LEAVE_BACKEND_FULL,
	SHUNT_LEAVE_CLIENT_FULL,
	SHUNT_LEAVE_REPLY,
	SHUNT_LEAVE_TOO_LONG_TO_KEEP,
	SHUNT_LEAVE_NO_REDIRECT,
	SHUNT_LEAVE_KEY_HASH,
	SHUNT_LEAVE_CONTENT,
	SHUNT_LEAVE_NO_PLACE,
};

// The program's use of the service's state. User space waits until it is over before it takes the
// conversation, and a message that the program has decided about is not decided about again.
enum shunt_deciding {
	SHUNT_IS_IDLE,
	SHUNT_IS_DECIDING,
	SHUNT_HAS_DECIDED, // user space gets the message, and follows the verdict
	SHUNT_HAS_PAID, // user space gets the message, which the rate limit has counted, and decides
};

// Results of handling arrived data, next to the reasons above, which make the conversation leave.
#define SHUNT_SEND 0
#define SHUNT_LEFT_ALREADY (-2)

// A conversation. All members before `kept` have eight bytes, because src/engine/kernel.rs indexes
// them as words.
struct shunt_conversation {
	__u64 word; // bit 0: the kernel owns it. Above: bytes passed to user space
	__u64 why; // the reason why it left
	__u64 outstanding; // 1: the reply of `backend` to a message is pending
	__u64 backend; // the position of the backend's socket
	__u64 kept_length;
	__u64 messages;
	__u64 bytes;
	__u64 replies;
	__u64 several; // consecutive messages that arrived before the client had the last answer
	__u64 deciding; // enum shunt_deciding
	__u64 kept_key; // enum shunt_key of the message that is kept
	__u64 kept_number; // its number, or the offset and, in the upper half, the length of its key
	__u64 window; // the beginning of the current millisecond
	__u64 in_window; // messages in it
	// When the timers of the connection are due, in nanoseconds, or 0; and below, the same as user
	// space knows it.
	__u64 due[SHUNT_TIMERS];
	__u64 known[SHUNT_TIMERS];
	__u64 bucket; // of the client, for the rate limit
	__u8 kept[SHUNT_KEPT];
	// The verdict about the current message. Only messages from the client have one, and they
	// are handled under the client socket's lock, so one buffer is enough. A per-CPU buffer
	// would not be safe: the data of one socket can interrupt the handling of another's.
	struct shunt_verdict verdict;
	__u8 session[SHUNT_MAX_SESSION]; // right behind the verdict
	struct shunt_connection connection;
};

// A socket of a conversation.
struct shunt_end {
	__u64 is_there;
	__u64 redirected; // bytes that the program has redirected to it
	__u64 written; // bytes that user space had written when the kernel last got the conversation
	__u64 acknowledged; // acknowledged bytes, of both, at the last check
	__u64 passed; // bytes that arrived at it and were passed to user space
	__u64 messages; // messages redirected to it
	// 0: it stays in the map. Otherwise the bytes of `passed` that user space has read, plus 1
	__u64 leaves;
	__u64 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} shunt_sockets SEC(".maps");

// Maps a socket's cookie to its place in shunt_sockets, which encodes the conversation's number and
// the position in it.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u64);
	__type(value, __u32);
} shunt_cookies SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct shunt_conversation);
} shunt_conversations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct shunt_end);
} shunt_ends SEC(".maps");

// The mapping of keys to backends. src/hash.rs implements the same.
struct shunt_placement {
	__u64 backends;
	__u64 is_ketama;
	__u64 points;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct shunt_placement);
} shunt_placed SEC(".maps");

// The sorted continuum. The upper half of an element is the point, the lower half the backend that
// owns the keys after the previous point up to this one.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SHUNT_POINTS);
	__type(key, __u32);
	__type(value, __u64);
} shunt_points SEC(".maps");

// In the numbers below: the conversation has a timer that is due earlier than user space knows.
#define SHUNT_IS_EARLIER (1u << 31)

// The numbers of conversations that left.
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 64 * 1024);
} shunt_left SEC(".maps");

// The base-2 logarithm of the places of a conversation. The first place is the client's.
volatile const __u32 shunt_stride_bits = 1;
// If 1, conversations leave as soon as user space would be faster.
volatile const __u32 shunt_is_auto = 1;

// The rate limit, or 0; how many nanoseconds a bucket holds; and the offset of the buckets in the
// memory of the state. src/engine/limiter.rs explains the algorithm.
volatile const __u64 shunt_limit_interval = 0;
volatile const __u64 shunt_limit_burst = 0;
volatile const __u64 shunt_limit_at = 0;

// If 1, the program answers clients itself: the service says so, and shunt_sending is attached.
volatile const __u32 shunt_answers_clients = 0;

// CO-RE relocates these members to the running kernel's layout.
struct shunt_cookie {
	__u64 counter;
};

struct netns_ipv4 {
	__u32 sysctl_tcp_notsent_lowat;
} __attribute__((preserve_access_index));

struct net {
	struct netns_ipv4 ipv4;
} __attribute__((preserve_access_index));

struct shunt_net {
	struct net *net;
};

struct sock_common {
	struct shunt_net skc_net;
	struct shunt_cookie skc_cookie;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
	int sk_sndbuf;
	int sk_wmem_queued;
} __attribute__((preserve_access_index));

struct inet_sock {
	struct sock sk;
} __attribute__((preserve_access_index));

struct inet_connection_sock {
	struct inet_sock icsk_inet;
} __attribute__((preserve_access_index));

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u64 bytes_acked;
	__u32 write_seq;
	__u32 snd_una;
	__u32 snd_nxt;
	__u32 mss_cache;
	__u32 notsent_lowat;
} __attribute__((preserve_access_index));

struct bpf_iter__tcp {
	struct sock_common *sk_common;
} __attribute__((preserve_access_index));

struct shunt_arrival {
	struct __sk_buff *skb;
	struct shunt_conversation *conversation;
	struct shunt_end *end;
	__u32 place;
	__u32 destination; // the place of the destination socket
};

SHUNT_INLINE int shunt_is_kernels(struct shunt_conversation *conversation)
{
	return *(volatile __u64 *)&conversation->word & 1;
}

SHUNT_INLINE __u64 shunt_acknowledged(__u32 place)
{
	struct tcp_sock *tcp;
	void *found = bpf_map_lookup_elem(&shunt_sockets, &place);
	__u64 acknowledged = 0;

	if (!found)
		return 0;
	tcp = bpf_skc_to_tcp_sock(found);
	if (tcp)
		acknowledged = tcp->bytes_acked;
	bpf_sk_release(found);
	return acknowledged;
}

// Prepares a redirection, after which the destination gets `length` bytes. The order matters: count
// the bytes first, then check that the kernel still owns the conversation. User space does the
// opposite: it takes the ownership first, and then reads the count.
SHUNT_INLINE int shunt_send(struct shunt_arrival *arrival, __u32 destination, __u64 length, int full)
{
	struct shunt_end *to = bpf_map_lookup_elem(&shunt_ends, &destination);
	__u64 total;

	if (!to || !to->is_there)
		return SHUNT_LEAVE_NO_CONNECTION;
	total = to->written + __sync_fetch_and_add(&to->redirected, length) + length;
	if (total - to->acknowledged > SHUNT_UNDER_WAY) {
		to->acknowledged = shunt_acknowledged(destination);
		if (total - to->acknowledged > SHUNT_UNDER_WAY) {
			__sync_fetch_and_add(&to->redirected, -length);
			return full;
		}
	}
	if (!shunt_is_kernels(arrival->conversation)) {
		__sync_fetch_and_add(&to->redirected, -length);
		return SHUNT_LEFT_ALREADY;
	}
	to->messages++;
	arrival->destination = destination;
	return SHUNT_SEND;
}

// Returns true if the client has sent several messages in a row without waiting for the previous
// answer.
SHUNT_INLINE int shunt_is_several(struct shunt_arrival *arrival)
{
	struct tcp_sock *tcp;
	struct bpf_sock *sk = arrival->skb->sk;

	if (!shunt_is_auto || !sk)
		return 0;
	tcp = bpf_skc_to_tcp_sock(sk);
	if (!tcp)
		return 0;
	if (arrival->end->written + arrival->end->redirected == tcp->bytes_acked) {
		arrival->conversation->several = 0;
		return 0;
	}
	return ++arrival->conversation->several > SHUNT_SEVERAL;
}

SHUNT_INLINE int shunt_is_busy(struct shunt_conversation *conversation)
{
	__u64 now;

	if (!shunt_is_auto)
		return 0;
	now = bpf_ktime_get_ns();
	if (now - conversation->window > 1000000) {
		conversation->window = now;
		conversation->in_window = 0;
	}
	return ++conversation->in_window > SHUNT_BUSY;
}

// Returns true if the client has sent more messages than the rate limit allows. A bucket that
// others change at the same time, again and again, allows the message.
SHUNT_INLINE int shunt_is_over(struct shunt_conversation *conversation)
{
	void *memory;
	__u64 *word, now, full, next;

	if (!shunt_limit_interval)
		return 0;
	memory = shunt_memory(&conversation->verdict);
	word = memory ? shunt_piece(memory, shunt_limit_at + 8 * conversation->bucket, 8) : 0;
	if (!word)
		return 0;
	now = bpf_ktime_get_ns();
	for (int attempt = 0; attempt < 8; attempt++) {
		full = shunt_load(word);
		next = (full > now ? full : now) + shunt_limit_interval;
		if (next - now > shunt_limit_burst)
			return 1;
		if (shunt_replace(word, full, next))
			return 0;
	}
	return 0;
}

#include "answer.bpf.h"

// Returns the backend of the first point at or after the value, or of the first point of all.
SHUNT_INLINE __s64 shunt_nearest(const struct shunt_placement *placement, __u32 value)
{
	__u32 first = 0, count = placement->points;
	__u64 *point;

	for (int step = 0; step < 17 && count; step++) {
		__u32 half = count / 2, middle = first + half;

		point = bpf_map_lookup_elem(&shunt_points, &middle);
		if (!point)
			return -1;
		if (*point >> 32 < value) {
			first = middle + 1;
			count -= half + 1;
		} else {
			count = half;
		}
	}
	if (first >= placement->points)
		first = 0;
	point = bpf_map_lookup_elem(&shunt_points, &first);
	return point ? (__s64)(*point & 0xffffffff) : -1;
}

// Returns the index of the key's backend, or -1 if only user space can map the key.
SHUNT_INLINE __s64 shunt_choose(struct shunt_socket *socket, const struct shunt_verdict *verdict)
{
	__u32 only = 0, hash;
	struct shunt_placement *placement = bpf_map_lookup_elem(&shunt_placed, &only);

	if (!placement || !placement->backends)
		return -1;
	if (verdict->key == SHUNT_BACKEND)
		return verdict->number < placement->backends ? (__s64)verdict->number : -1;
	if (verdict->key == SHUNT_NUMBER)
		return placement->is_ketama ? -1 : (__s64)(verdict->number % placement->backends);
	socket->position = 0;
	hash = shunt_hash_bytes(socket, verdict->key_offset, verdict->key_length,
				placement->is_ketama ? SHUNT_KETAMA : SHUNT_MODULO);
	return placement->is_ketama ? shunt_nearest(placement, hash) : (__s64)(hash % placement->backends);
}

SHUNT_INLINE int shunt_forward(struct shunt_arrival *arrival, struct shunt_socket *socket,
			       const struct shunt_verdict *verdict)
{
	struct shunt_conversation *conversation = arrival->conversation;
	__u32 length = arrival->skb->len, kept = length < SHUNT_KEPT ? length : SHUNT_KEPT, position;
	int answered = shunt_service.parse_reply && !verdict->one_way;
	__s64 backend = shunt_choose(socket, verdict);
	int sent;

	if (backend < 0)
		return SHUNT_LEAVE_KEY_HASH;
	if (backend + 1 >= 1u << shunt_stride_bits)
		return SHUNT_LEAVE_NO_PLACE;
	if (answered && conversation->outstanding)
		return SHUNT_LEAVE_OUTSTANDING;
	if (answered && shunt_service.retry && length > SHUNT_KEPT)
		return SHUNT_LEAVE_TOO_LONG_TO_KEEP;
	if (!answered && shunt_is_busy(conversation))
		return SHUNT_LEAVE_BUSY;
	position = (arrival->place >> shunt_stride_bits << shunt_stride_bits) + backend + 1;
	if (answered) {
		// Repeat the bound in a form that the verifier understands.
		kept &= 2 * SHUNT_KEPT - 1;
		if (!kept || kept > SHUNT_KEPT || bpf_skb_load_bytes(arrival->skb, 0, conversation->kept, kept))
			return SHUNT_LEAVE_UNUSUAL;
	}
	sent = shunt_send(arrival, position, length, SHUNT_LEAVE_BACKEND_FULL);
	if (sent == SHUNT_SEND && answered) {
		conversation->backend = backend + 1;
		conversation->kept_length = kept;
		conversation->kept_key = verdict->key;
		conversation->kept_number = verdict->key == SHUNT_BYTES ?
			(__u64)verdict->key_length << 32 | verdict->key_offset :
			verdict->number;
		conversation->outstanding = 1;
	}
	return sent;
}

// Notes when timers are due that the service has armed. The order matters: set the time first, and
// then compare it with what user space knows. User space does the opposite.
SHUNT_INLINE void shunt_arm_timers(struct shunt_arrival *arrival)
{
	struct shunt_conversation *conversation = arrival->conversation;
	__u64 armed = conversation->connection.armed, now, due, known;
	__u32 number = arrival->place >> shunt_stride_bits, is_earlier = 0;

	if (!armed)
		return;
	conversation->connection.armed = 0;
	now = bpf_ktime_get_ns();
#pragma GCC unroll 4
	for (__u32 timer = 0; timer < SHUNT_TIMERS; timer++) {
		if (!(armed >> timer & 1))
			continue;
		due = conversation->connection.timers[timer].after;
		due = due ? now + due * 1000000 : 0;
		__sync_lock_test_and_set(&conversation->due[timer], due);
		known = *(volatile __u64 *)&conversation->known[timer];
		if (due && (!known || due < known))
			is_earlier = 1;
	}
	number |= SHUNT_IS_EARLIER;
	if (is_earlier)
		bpf_ringbuf_output(&shunt_left, &number, sizeof(number), BPF_RB_FORCE_WAKEUP);
}

// Does what the service has decided about the message.
SHUNT_INLINE int shunt_follow(struct shunt_arrival *arrival, struct shunt_socket *socket,
			      const struct shunt_verdict *verdict)
{
	if (verdict->effects)
		return SHUNT_LEAVE_UNUSUAL;
	switch (verdict->action) {
	case SHUNT_ECHO:
		if (arrival->conversation->outstanding)
			return SHUNT_LEAVE_OUTSTANDING;
		if (shunt_is_several(arrival))
			return SHUNT_LEAVE_OUTSTANDING;
		return shunt_send(arrival, arrival->place, arrival->skb->len, SHUNT_LEAVE_CLIENT_FULL);
	case SHUNT_REPLY:
		return shunt_answer_reply(arrival, verdict);
	case SHUNT_STORED:
		return shunt_service.state ? shunt_answer_stored(arrival, (struct shunt_verdict *)verdict) :
					     SHUNT_LEAVE_UNUSUAL;
#ifdef SHUNT_WITH_CONTENTS
	case SHUNT_CONTENT: {
		int sent = shunt_answer_cached(arrival, (struct shunt_verdict *)verdict);

		// The two halves of such a service are different programs. User space may see several
		// messages in these bytes, so it must not follow a verdict about all of them.
		if (sent != SHUNT_SEND)
			shunt_leave_to_user((struct shunt_verdict *)verdict);
		return sent;
	}
#endif
	case SHUNT_FORWARD:
		return shunt_forward(arrival, socket, verdict);
	case SHUNT_REFUSE:
		return SHUNT_LEAVE_REFUSED;
	}
	return SHUNT_LEAVE_UNUSUAL;
}

SHUNT_INLINE int shunt_message(struct shunt_arrival *arrival)
{
	struct shunt_socket socket = { .skb = arrival->skb, .length = arrival->skb->len };
	struct shunt_conversation *conversation = arrival->conversation;
	struct shunt_verdict *verdict = &conversation->verdict;
	int length = shunt_parse(&socket), done;

	if (length < 0)
		return SHUNT_LEAVE_REFUSED;
	if (!length || (__u32)length > arrival->skb->len)
		return SHUNT_LEAVE_PARTIAL;
	if ((__u32)length < arrival->skb->len)
		return SHUNT_LEAVE_COALESCED;
	// The order matters: announce the use of the state first, and then check that the kernel still
	// owns the conversation. User space does the opposite.
	__sync_lock_test_and_set(&conversation->deciding, SHUNT_IS_DECIDING);
	if (!shunt_is_kernels(conversation)) {
		__sync_lock_test_and_set(&conversation->deciding, SHUNT_IS_IDLE);
		return SHUNT_LEFT_ALREADY;
	}
	if (shunt_is_over(conversation)) {
		shunt_begin(verdict, SHUNT_REFUSE);
		verdict->why = SHUNT_TOO_MANY;
		__sync_lock_test_and_set(&conversation->deciding, SHUNT_HAS_DECIDED);
		return SHUNT_LEAVE_REFUSED;
	}
	socket.position = 0;
	shunt_decide(&socket, verdict);
	if (shunt_service.timer)
		shunt_arm_timers(arrival);
	done = shunt_follow(arrival, &socket, verdict);
	__sync_lock_test_and_set(&conversation->deciding,
				 done == SHUNT_SEND			   ? SHUNT_IS_IDLE :
				 verdict->action == SHUNT_IN_USER_SPACE ? SHUNT_HAS_PAID :
									   SHUNT_HAS_DECIDED);
	return done;
}

SHUNT_INLINE int shunt_reply(struct shunt_arrival *arrival, __u32 position)
{
	struct shunt_socket socket = { .skb = arrival->skb, .length = arrival->skb->len };
	struct shunt_conversation *conversation = arrival->conversation;
	int length, sent;

	if (!conversation->outstanding || conversation->backend != position || shunt_service.replied)
		return SHUNT_LEAVE_REPLY;
	length = shunt_parse_reply(&socket);
	if (length <= 0 || (__u32)length != arrival->skb->len)
		return SHUNT_LEAVE_REPLY;
	sent = shunt_send(arrival, arrival->place - position, arrival->skb->len, SHUNT_LEAVE_CLIENT_FULL);
	if (sent == SHUNT_SEND) {
		conversation->outstanding = 0;
		conversation->replies++;
	}
	return sent;
}

// Counts data as passed to user space. Returns false, and undoes that, if the kernel got the
// conversation meanwhile.
SHUNT_INLINE int shunt_passes(struct shunt_arrival *arrival)
{
	__u64 length = arrival->skb->len;

	__sync_fetch_and_add(&arrival->end->passed, length);
	if (!(__sync_fetch_and_add(&arrival->conversation->word, length << 1) & 1))
		return 1;
	__sync_fetch_and_add(&arrival->conversation->word, -(length << 1));
	__sync_fetch_and_add(&arrival->end->passed, -length);
	return 0;
}

// Passes data and the conversation to user space. The bytes are counted first, so user space cannot
// return the conversation before it has read them.
SHUNT_INLINE void shunt_leave(struct shunt_arrival *arrival, int why)
{
	__u64 length = arrival->skb->len;
	__u32 number = arrival->place >> shunt_stride_bits;

	__sync_fetch_and_add(&arrival->end->passed, length);
	__sync_fetch_and_add(&arrival->conversation->word, length << 1);
	if (why > 0)
		arrival->conversation->why = why;
	if (__sync_fetch_and_and(&arrival->conversation->word, ~1ull) & 1)
		bpf_ringbuf_output(&shunt_left, &number, sizeof(number), BPF_RB_FORCE_WAKEUP);
}

SEC("sk_skb/stream_verdict")
int shunt_arrived(struct __sk_buff *skb)
{
	__u64 cookie = bpf_get_socket_cookie(skb);
	__u32 *place = bpf_map_lookup_elem(&shunt_cookies, &cookie), number, position;
	struct shunt_arrival arrival = { .skb = skb };
	int done;

	// The end of the stream: there is nothing to redirect, and user space gets its own event
	// for it.
	if (!skb->len)
		return SK_DROP;
	if (!place)
		return SK_PASS;
	arrival.place = *place;
	number = arrival.place >> shunt_stride_bits;
	position = arrival.place - (number << shunt_stride_bits);
	arrival.conversation = bpf_map_lookup_elem(&shunt_conversations, &number);
	arrival.end = bpf_map_lookup_elem(&shunt_ends, &arrival.place);
	if (!arrival.conversation || !arrival.end)
		return SK_PASS;
	if (!shunt_is_kernels(arrival.conversation) && shunt_passes(&arrival))
		return SK_PASS;
	done = position ? shunt_reply(&arrival, position) : shunt_message(&arrival);
	if (done != SHUNT_SEND) {
		shunt_leave(&arrival, done);
		return SK_PASS;
	}
	if (!position) {
		arrival.conversation->messages++;
		arrival.conversation->bytes += skb->len;
	}
	return bpf_sk_redirect_map(skb, &shunt_sockets, arrival.destination, 0);
}

// Removes sockets from the map that user space wants to serve without this program.
//
// The iterator holds each socket's lock, so the program above is not running for it. If user space
// has read all passed bytes, none are in flight either. Kernels that do not take the lock here
// reject this program, because it sets a socket option.
SEC("iter/tcp")
int shunt_leaving(struct bpf_iter__tcp *context)
{
	struct sock_common *common = context->sk_common;
	struct tcp_sock *tcp = common ? bpf_skc_to_tcp_sock(common) : 0;
	__u32 *found, place;
	struct shunt_end *end;
	int bytes = 1;
	__u64 cookie;

	if (!tcp)
		return 0;
	cookie = bpf_get_socket_cookie(tcp);
	found = bpf_map_lookup_elem(&shunt_cookies, &cookie);
	if (!found)
		return 0;
	place = *found;
	end = bpf_map_lookup_elem(&shunt_ends, &place);
	if (!end || end->leaves != end->passed + 1)
		return 0;
	if (bpf_map_delete_elem(&shunt_sockets, &place))
		return 0;
	bpf_map_delete_elem(&shunt_cookies, &cookie);
	end->is_there = 0;
	// Setting SO_RCVLOWAT makes TCP notify epoll of data that is already there.
	bpf_setsockopt(tcp, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof(bytes));
	return 0;
}

// The helpers that read a socket's members require the GPL.
char shunt_license[] SEC("license") = "GPL";

#endif
