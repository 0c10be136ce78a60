// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Passes hints in the options of a connection's first two segments. A client's SYN has an option
// that asks. The SYN-ACK of a server that has this program too answers with sixteen bytes of user
// space, and the client's program gives them to its user space when the connection is established.
// Both options are of the kind for experiments (RFC 6994). Peers without this program ignore them.
//
// Neither segment has the option when it is sent again, so that a network that drops unknown
// options costs one retransmission. Later connections to that address then have no option for a
// while.
//
// Only sockets of the namespaces in `namespaces`, and peers in `prefixes`, are concerned.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define LISTENING 10
#define IPPROTO_TCP 6
// Not in all headers yet: Linux 6.12.
#define CB_FLAGS 1008
#define SYN 0x02
#define ACK 0x10

#define KIND 254
#define MAGIC0 0x73
#define MAGIC1 0x68
#define ASKS 4
#define ANSWERS 20

#define SECOND 1000000000ULL
// How long connections to an address have no option, after one SYN with it was not answered.
#define SHY (600 * SECOND)
// How often the same hint is given to user space again.
#define AGAIN SECOND
// The most hints of a namespace in a second.
#define SHARE 32

// crates/common/kernel/src/hint.rs has the same layouts. IPv4 addresses are mapped to IPv6.
struct address {
	__u32 words[4];
};

struct prefix {
	__u32 bits;
	struct address address;
};

struct answer {
	__u64 words[2];
};

struct place {
	__u64 namespace;
	struct address address;
};

struct seen {
	__u64 since;
	struct answer answer;
};

struct share {
	__u64 since;
	__u64 used;
};

struct hint {
	__u64 namespace;
	struct address local;
	struct address remote;
	struct answer answer;
	__u32 port; // the remote one, in host byte order
	__u32 local_port; // also in host byte order
};

enum { ASKED, UNANSWERED, ANSWERED, HINTS, OVER, LOST, TOO_EARLY, COUNTS };

// The members of kernel structures that are read. CO-RE relocates them to the running kernel's
// layout.
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sock_common {
	volatile unsigned char skc_state;
};

struct bpf_iter_meta;

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
};

#pragma clang attribute pop

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} namespaces SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix);
	__type(value, __u32);
} prefixes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct answer);
} answers SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct place);
	__type(value, struct seen);
} known SEC(".maps");

// Addresses whose SYNs have no option until then.
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct place);
	__type(value, __u64);
} shy SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct share);
} shares SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
} hints SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

static __always_inline void count(__u32 what)
{
	__u64 *value = bpf_map_lookup_elem(&counts, &what);

	if (value)
		*value += 1;
}

static __always_inline int is_same(struct answer *one, struct answer *two)
{
	return one->words[0] == two->words[0] && one->words[1] == two->words[1];
}

static __always_inline void remote_of(struct bpf_sock_ops *ops, struct address *to)
{
	__u32 ip4 = ops->remote_ip4;

	// Otherwise the compiler merges the two cases into one load, which the verifier rejects.
	asm volatile("" : "+r"(ip4));
	if (ops->family == AF_INET) {
		to->words[0] = to->words[1] = 0;
		to->words[2] = bpf_htonl(0xffff);
		to->words[3] = ip4;
	} else {
		to->words[0] = ops->remote_ip6[0];
		to->words[1] = ops->remote_ip6[1];
		to->words[2] = ops->remote_ip6[2];
		to->words[3] = ops->remote_ip6[3];
	}
}

static __always_inline void local_of(struct bpf_sock_ops *ops, struct address *to)
{
	__u32 ip4 = ops->local_ip4;

	asm volatile("" : "+r"(ip4));
	if (ops->family == AF_INET) {
		to->words[0] = to->words[1] = 0;
		to->words[2] = bpf_htonl(0xffff);
		to->words[3] = ip4;
	} else {
		to->words[0] = ops->local_ip6[0];
		to->words[1] = ops->local_ip6[1];
		to->words[2] = ops->local_ip6[2];
		to->words[3] = ops->local_ip6[3];
	}
}

static __always_inline int is_ours(struct bpf_sock_ops *ops)
{
	__u64 namespace = bpf_get_netns_cookie(ops);

	return bpf_map_lookup_elem(&namespaces, &namespace) != NULL;
}

static __always_inline int is_overlay(struct address *address)
{
	struct prefix prefix = { .bits = 128, .address = *address };

	return bpf_map_lookup_elem(&prefixes, &prefix) != NULL;
}

static __always_inline void listen_for(struct bpf_sock_ops *ops, int is_wanted)
{
	int flags = ops->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;

	if (is_wanted)
		flags |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
	bpf_sock_ops_cb_flags_set(ops, flags);
}

// A socket is about to send its SYN.
static __always_inline void connects(struct bpf_sock_ops *ops)
{
	struct place place = {};
	__u64 *until;

	if (!is_ours(ops))
		return;
	place.namespace = bpf_get_netns_cookie(ops);
	remote_of(ops, &place.address);
	if (!is_overlay(&place.address))
		return;
	until = bpf_map_lookup_elem(&shy, &place);
	if (until && *until > bpf_ktime_get_ns())
		return;
	listen_for(ops, 1);
}

// Returns the number of bytes that the segment's option needs, or 0.
static __always_inline int length(struct bpf_sock_ops *ops)
{
	__u8 asks[ASKS] = { KIND, ASKS, MAGIC0, MAGIC1 };
	struct address remote;
	int flags = ops->skb_tcp_flags & (SYN | ACK);

	if (!(flags & SYN) || !is_ours(ops))
		return 0;
	remote_of(ops, &remote);
	if (!is_overlay(&remote))
		return 0;
	if (flags == SYN)
		return ops->total_retrans ? 0 : ASKS;
	// A SYN-ACK that is sent again belongs to no SYN here, and so has no option.
	return bpf_load_hdr_opt(ops, asks, ASKS, BPF_LOAD_HDR_OPT_TCP_SYN) == ASKS ? ANSWERS : 0;
}

static __always_inline void write(struct bpf_sock_ops *ops)
{
	__u8 option[ANSWERS] = { KIND, ASKS, MAGIC0, MAGIC1 };
	struct answer *answer;
	__u32 first = 0;

	switch (length(ops)) {
	case ASKS:
		if (!bpf_store_hdr_opt(ops, option, ASKS, 0))
			count(ASKED);
		break;
	case ANSWERS:
		answer = bpf_map_lookup_elem(&answers, &first);
		if (!answer)
			break;
		option[1] = ANSWERS;
		__builtin_memcpy(option + 4, answer->words, 16);
		if (!bpf_store_hdr_opt(ops, option, ANSWERS, 0))
			count(ANSWERED);
		break;
	}
}

// Returns true if the namespace has had fewer hints in this second than its share.
static __always_inline int has_room(__u64 namespace, __u64 now)
{
	struct share fresh = { .since = now, .used = 1 };
	struct share *share = bpf_map_lookup_elem(&shares, &namespace);

	if (share && now - share->since < SECOND)
		return __sync_fetch_and_add(&share->used, 1) < SHARE;
	bpf_map_update_elem(&shares, &namespace, &fresh, BPF_ANY);
	return 1;
}

// A connection that this end began is established. Its SYN-ACK may have an answer.
static __always_inline void established(struct bpf_sock_ops *ops)
{
	__u8 option[ANSWERS] = { KIND, 4, MAGIC0, MAGIC1 };
	__u64 now = bpf_ktime_get_ns();
	struct place place = {};
	struct seen seen = {};
	struct hint hint = {};
	struct seen *last;

	if (!(ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG) || !is_ours(ops))
		return;
	place.namespace = bpf_get_netns_cookie(ops);
	remote_of(ops, &place.address);
	if (!is_overlay(&place.address))
		return;
	listen_for(ops, 0);
	if (ops->total_retrans) {
		__u64 until = now + SHY;

		count(UNANSWERED);
		bpf_map_update_elem(&shy, &place, &until, BPF_ANY);
	}
	if (bpf_load_hdr_opt(ops, option, ANSWERS, 0) != ANSWERS)
		return;
	__builtin_memcpy(seen.answer.words, option + 4, 16);
	last = bpf_map_lookup_elem(&known, &place);
	if (last && now - last->since < AGAIN && is_same(&last->answer, &seen.answer))
		return;
	if (!has_room(place.namespace, now)) {
		count(OVER);
		return;
	}
	hint.namespace = place.namespace;
	hint.remote = place.address;
	local_of(ops, &hint.local);
	hint.answer = seen.answer;
	hint.port = bpf_ntohl(ops->remote_port);
	hint.local_port = ops->local_port;
	if (bpf_ringbuf_output(&hints, &hint, sizeof(hint), 0)) {
		count(LOST);
		return;
	}
	seen.since = now;
	bpf_map_update_elem(&known, &place, &seen, BPF_ANY);
	count(HINTS);
}

SEC("sockops")
int hint(struct bpf_sock_ops *ops)
{
	int bytes;

	switch (ops->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		connects(ops);
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB:
		if (is_ours(ops))
			listen_for(ops, 1);
		break;
	case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
		bytes = length(ops);
		if (bytes)
			bpf_reserve_hdr_opt(ops, bytes, 0);
		break;
	case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
		write(ops);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		established(ops);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		// Accepted sockets inherit the listening socket's flags, and need none.
		if (is_ours(ops))
			listen_for(ops, 0);
		break;
	}
	return 1;
}

// Lets sockets answer that have begun to listen before the program was attached. Reading the
// iterator runs this once for each TCP socket of the network namespace, under the socket's lock.
SEC("iter/tcp")
int existing(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;
	int flags = 0;

	if (!sk || sk->skc_state != LISTENING)
		return 0;
	if (bpf_getsockopt(sk, IPPROTO_TCP, CB_FLAGS, &flags, sizeof(flags))) {
		count(TOO_EARLY);
		return 0;
	}
	if (flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG)
		return 0;
	flags |= BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;
	if (bpf_setsockopt(sk, IPPROTO_TCP, CB_FLAGS, &flags, sizeof(flags)))
		count(TOO_EARLY);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
