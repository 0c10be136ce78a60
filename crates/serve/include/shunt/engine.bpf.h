// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The kernel engine: one program, which is asked about everything that arrives at the sockets of conversations that are
// in the kernel. What is one whole message, or one whole reply, goes to the socket that it is for; everything else is
// passed to user space, and the conversation with it. docs/serve-protocol.md has the reasons for each step; the order of
// the atomic operations is what it leans on. src/engine/kernel.rs is the other side. Included by service.h.

#ifndef SHUNT_ENGINE_BPF_H
#define SHUNT_ENGINE_BPF_H

#include <asm/socket.h>

// As much of a message is kept as is needed to answer it, or to send it again.
#define SHUNT_KEPT 512
// Bytes on the way to a socket and not acknowledged by its peer.
#define SHUNT_UNDER_WAY (256 * 1024)
// Messages that nobody answers, in a millisecond; and messages in a row that came before the answer to the last.
#define SHUNT_BUSY 16
#define SHUNT_SEVERAL 8
#define SHUNT_POINTS 65536

// Why a conversation leaves the kernel. The first of `Move` in src/engine/counts.rs, in that order.
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
};

// What the program does with what arrived; the reasons above mean that the conversation leaves.
#define SHUNT_SEND 0
#define SHUNT_LEFT_ALREADY (-2)

// A conversation. Eight bytes each but for what is kept, so that src/engine/kernel.rs can count words.
struct shunt_conversation {
	__u64 word; // bit 0: it is the kernel's. Above: bytes that were passed to user space
	__u64 why; // it left
	__u64 outstanding; // 1: a message has gone to `backend`, and its reply has not come
	__u64 backend; // position of its socket
	__u64 kept_length;
	__u64 messages;
	__u64 bytes;
	__u64 replies;
	__u64 several; // messages in a row that came before the answer to the last
	__u64 window; // begin of a millisecond
	__u64 in_window; // messages in it
	__u64 unused;
	__u8 kept[SHUNT_KEPT];
	// Of the message at hand. Only what arrives at the client's socket is decided about, and under that socket's lock, so
	// that it is never two at once. A processor's own would not do: one socket's arrival can interrupt another's.
	struct shunt_verdict verdict;
};

// A socket.
struct shunt_end {
	__u64 is_there;
	__u64 redirected; // bytes that the program has sent on to it
	__u64 written; // bytes that user space had written to it, when the conversation was last given to the kernel
	__u64 acknowledged; // of both, when that was last asked
	__u64 passed; // bytes that arrived at it and were passed to user space
	__u64 messages; // sent on to it
	__u64 leaves; // 0: it stays in the map. Else one more than what user space has read of `passed`
	__u64 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} shunt_sockets SEC(".maps");

// By the socket's cookie: its place in the map above, which is its conversation's and its position there.
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

// How a key becomes a backend: src/hash.rs has it too.
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

// The continuum, in order: the value of a point above, and below whose the keys up to it are.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SHUNT_POINTS);
	__type(key, __u32);
	__type(value, __u64);
} shunt_points SEC(".maps");

// Conversations that left.
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 64 * 1024);
} shunt_left SEC(".maps");

// Of a conversation's sockets, as a power of two. The first is the client's.
volatile const __u32 shunt_stride_bits = 1;
// Conversations leave when user space would be faster.
volatile const __u32 shunt_is_auto = 1;

// Read by the names that the running kernel has for them.
struct tcp_sock {
	__u64 bytes_acked;
} __attribute__((preserve_access_index));

struct sock_common;

struct bpf_iter__tcp {
	struct sock_common *sk_common;
} __attribute__((preserve_access_index));

struct shunt_arrival {
	struct __sk_buff *skb;
	struct shunt_conversation *conversation;
	struct shunt_end *end;
	__u32 place;
	__u32 destination; // place of the socket that it is sent to
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

// Counted first, and only then is it asked whether the conversation is still the kernel's: user space says that it is not,
// and only then reads the count.
SHUNT_INLINE int shunt_send(struct shunt_arrival *arrival, __u32 destination, int full)
{
	struct shunt_end *to = bpf_map_lookup_elem(&shunt_ends, &destination);
	__u64 length = arrival->skb->len, total;

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

// Whether the client has sent again before it had seen the answer to what it sent before, several times in a row.
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

// The first point at or after the value; after the last comes the first.
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

// Which backend the key belongs to, counted from 0, or -1 if only user space can tell.
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
		return SHUNT_LEAVE_NO_CONNECTION;
	if (answered && conversation->outstanding)
		return SHUNT_LEAVE_OUTSTANDING;
	if (answered && shunt_service.retry && length > SHUNT_KEPT)
		return SHUNT_LEAVE_TOO_LONG_TO_KEEP;
	if (!answered && shunt_is_busy(conversation))
		return SHUNT_LEAVE_BUSY;
	position = (arrival->place >> shunt_stride_bits << shunt_stride_bits) + backend + 1;
	if (answered) {
		// The bound again, in words of the verifier's.
		kept &= 2 * SHUNT_KEPT - 1;
		if (!kept || kept > SHUNT_KEPT || bpf_skb_load_bytes(arrival->skb, 0, conversation->kept, kept))
			return SHUNT_LEAVE_UNUSUAL;
	}
	sent = shunt_send(arrival, position, SHUNT_LEAVE_BACKEND_FULL);
	if (sent == SHUNT_SEND && answered) {
		conversation->backend = backend + 1;
		conversation->kept_length = kept;
		conversation->outstanding = 1;
	}
	return sent;
}

SHUNT_INLINE int shunt_message(struct shunt_arrival *arrival)
{
	struct shunt_socket socket = { .skb = arrival->skb, .length = arrival->skb->len };
	struct shunt_verdict *verdict = &arrival->conversation->verdict;
	int length = shunt_parse(&socket);

	if (length < 0)
		return SHUNT_LEAVE_REFUSED;
	if (!length || (__u32)length > arrival->skb->len)
		return SHUNT_LEAVE_PARTIAL;
	if ((__u32)length < arrival->skb->len)
		return SHUNT_LEAVE_COALESCED;
	socket.position = 0;
	shunt_decide(&socket, verdict);
	switch (verdict->action) {
	case SHUNT_ECHO:
		if (arrival->conversation->outstanding)
			return SHUNT_LEAVE_OUTSTANDING;
		if (shunt_is_several(arrival))
			return SHUNT_LEAVE_OUTSTANDING;
		return shunt_send(arrival, arrival->place, SHUNT_LEAVE_CLIENT_FULL);
	case SHUNT_FORWARD:
		return shunt_forward(arrival, &socket, verdict);
	case SHUNT_REFUSE:
		return SHUNT_LEAVE_REFUSED;
	}
	return SHUNT_LEAVE_UNUSUAL;
}

SHUNT_INLINE int shunt_reply(struct shunt_arrival *arrival, __u32 position)
{
	struct shunt_socket socket = { .skb = arrival->skb, .length = arrival->skb->len };
	struct shunt_conversation *conversation = arrival->conversation;
	int length, sent;

	if (!conversation->outstanding || conversation->backend != position)
		return SHUNT_LEAVE_REPLY;
	length = shunt_parse_reply(&socket);
	if (length <= 0 || (__u32)length != arrival->skb->len)
		return SHUNT_LEAVE_REPLY;
	sent = shunt_send(arrival, arrival->place - position, SHUNT_LEAVE_CLIENT_FULL);
	if (sent == SHUNT_SEND) {
		conversation->outstanding = 0;
		conversation->replies++;
	}
	return sent;
}

// True: user space gets it. False: the conversation was given to the kernel meanwhile.
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

// Counted before the conversation is user space's: it cannot be given back before these bytes were read.
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

	// The end of the stream. Whoever sent it on would send nothing, and user space is told by the socket itself.
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

// Takes those sockets out of the map that user space wants to have for itself, each under its lock: no arrival is with the
// program above then, and if user space has read all that was passed, none is on its way to it either. A kernel that does
// not take the lock here refuses this program, for it sets a socket option.
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
	// TCP tells epoll of what it has now.
	bpf_setsockopt(tcp, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof(bytes));
	return 0;
}

// For the helpers that look into a socket.
char shunt_license[] SEC("license") = "GPL";

#endif
