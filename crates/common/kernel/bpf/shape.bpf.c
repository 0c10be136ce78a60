// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Changes limits and priorities of sockets in use, in any process: those whose cookies are in a
// map. Reading the iterator runs the program once for each TCP socket of the network namespace,
// under the socket's lock.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

// The members that are read. CO-RE relocates them to the running kernel's layout.
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

typedef struct {
	__s64 counter;
} atomic64_t;

struct sock_common {
	atomic64_t skc_cookie;
};

struct bpf_iter_meta;

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
};

#pragma clang attribute pop

// The kernel's values on all architectures with BPF except one.
#define SOL_SOCKET 1
#define SO_PRIORITY 12
#define SO_MAX_PACING_RATE 47
#define IPPROTO_IP 0
#define IP_TOS 1
#define IPPROTO_IPV6 41
#define IPV6_TCLASS 67

// crates/common/kernel/src/shape.rs has the same layout.
struct shape {
	__u32 rate;
	// A value, or KEEP.
	__u32 tos;
	__u32 traffic_class;
	__u32 priority;
	// The result, which the program sets: NOT_FOUND, CHANGED, or the first error and REFUSED.
	__u32 outcome;
};

enum { NOT_FOUND, CHANGED, REFUSED };

#define KEEP 0xffffffff

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct shape);
} shapes SEC(".maps");

static __always_inline long set(void *sk, int level, int option, __u32 value)
{
	return bpf_setsockopt(sk, level, option, &value, sizeof(value));
}

static __always_inline long first(long error, long next)
{
	return error ? error : next;
}

SEC("iter/tcp")
int shape(struct bpf_iter__tcp *ctx)
{
	struct sock_common *sk = ctx->sk_common;
	struct shape *wanted;
	__u64 cookie;
	long error;

	if (!sk)
		return 0;
	cookie = sk->skc_cookie.counter;
	// A socket has no cookie until one is requested.
	wanted = cookie ? bpf_map_lookup_elem(&shapes, &cookie) : NULL;
	if (!wanted)
		return 0;
	error = set(sk, SOL_SOCKET, SO_MAX_PACING_RATE, wanted->rate);
	if (wanted->tos != KEEP)
		error = first(error, set(sk, IPPROTO_IP, IP_TOS, wanted->tos));
	if (wanted->traffic_class != KEEP)
		error = first(error, set(sk, IPPROTO_IPV6, IPV6_TCLASS, wanted->traffic_class));
	// Set the priority last, because IP_TOS changes it.
	error = first(error, set(sk, SOL_SOCKET, SO_PRIORITY, wanted->priority));
	wanted->outcome = error ? REFUSED - error : CHANGED;
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
