// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Restricts tagged sockets: those of the host's network that untrusted programs hold. A tag belongs
// to the socket, so it applies to every copy of its descriptor. Sockets without a tag are not
// affected.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "options.h"

#define EINVAL 22

// The option values that the socket reports. crates/common/kernel/src/secure.rs has the same
// layout.
struct tag {
	__u64 rate;
	__u32 priority;
	__u32 tos;
	__u32 traffic_class;
	__u32 unused;
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct tag);
} secured SEC(".maps");

static __always_inline struct tag *tag_of(struct bpf_sock *sk)
{
	return sk ? bpf_sk_storage_get(&secured, sk, NULL, 0) : NULL;
}

// Lets the kernel handle the option unchanged.
//
// For values longer than a page, which hooks do not get, a hook must request that with optlen 0.
// For others it must not: another router's hook may run before or after this one, and optlen 0
// would discard its result.
static __always_inline int leave(struct bpf_sockopt *ctx)
{
	if (ctx->optval_end - ctx->optval < ctx->optlen)
		ctx->optlen = 0;
	return 1;
}

#define ECN 3

// Returns the number in an option's value as the kernel reads it. Shorter values count as 0.
static __always_inline __u32 given(struct bpf_sockopt *ctx)
{
	__u32 *number = ctx->optval;
	__u8 *octet = ctx->optval;

	if (ctx->optlen >= 4 && (void *)(number + 1) <= ctx->optval_end)
		return *number;
	if (ctx->optlen >= 1 && (void *)(octet + 1) <= ctx->optval_end)
		return *octet;
	return 0;
}

// Returns the priority of a type of service, as the kernel's ip_tos2prio does.
static __always_inline __u32 priority_of(__u32 tos)
{
	switch (tos >> 3 & 3) {
	case 1:
		return 2;
	case 2:
		return 6;
	case 3:
		return 4;
	}
	return 0;
}

// Makes the call succeed without reaching the kernel (optlen -1).
static __always_inline int done(struct bpf_sockopt *ctx)
{
	ctx->optlen = -1;
	return 1;
}

// Stores the value without an effect on packets, whose treatment is the overlay's policy. Values
// that the kernel would refuse are passed to it, so that it returns its own error.
static __always_inline int keep(struct bpf_sockopt *ctx, struct tag *tag)
{
	__u32 value = given(ctx), tos;

	if (ctx->level == SOL_SOCKET) { // SO_PRIORITY
		if (ctx->optlen < 4)
			return leave(ctx);
		// Higher priorities need a privilege.
		if (value > 6)
			return 0;
		tag->priority = value;
		return done(ctx);
	}
	if (ctx->level == IPPROTO_IP)
		switch (ctx->optname) {
		case 1: // IP_TOS
			tos = (value & 0xff & ~ECN) | (tag->tos & ECN);
			if (tos != tag->tos)
				tag->priority = priority_of(tos);
			tag->tos = tos;
			return done(ctx);
		case 2: // IP_TTL
			return value == (__u32)-1 || (value >= 1 && value <= 255) ? done(ctx) : leave(ctx);
		case 10: // IP_MTU_DISCOVER
			return value <= 5 ? done(ctx) : leave(ctx);
		case 21: // IP_MINTTL
			return value <= 255 ? done(ctx) : leave(ctx);
		default:
			return done(ctx);
		}
	if (ctx->optlen < 4)
		return leave(ctx);
	switch (ctx->optname) {
	case 16: // IPV6_UNICAST_HOPS
		return value == (__u32)-1 || value <= 255 ? done(ctx) : leave(ctx);
	case 23: // IPV6_MTU_DISCOVER
		return value <= 5 ? done(ctx) : leave(ctx);
	case 67: // IPV6_TCLASS
		if (value != (__u32)-1 && value > 255)
			return leave(ctx);
		if (value == (__u32)-1)
			value = 0;
		tag->traffic_class = (value & ~ECN) | (tag->traffic_class & ECN);
		return done(ctx);
	case 73: // IPV6_MINHOPCOUNT
		return value <= 255 ? done(ctx) : leave(ctx);
	default:
		return done(ctx);
	}
}

SEC("cgroup/setsockopt")
int setsockopt(struct bpf_sockopt *ctx)
{
	struct tag *tag = tag_of(ctx->sk);

	if (!tag || may_set(ctx->level, ctx->optname))
		return leave(ctx);
	return is_kept(ctx->level, ctx->optname) ? keep(ctx, tag) : 0;
}

static __always_inline int tell4(struct bpf_sockopt *ctx, __u32 value)
{
	__u32 *at = ctx->optval;

	if (ctx->optlen < 4 || (void *)(at + 1) > ctx->optval_end)
		return 0;
	*at = value;
	ctx->optlen = 4;
	return 1;
}

static __always_inline int tell8(struct bpf_sockopt *ctx, __u64 value)
{
	__u32 *at = ctx->optval;

	if (ctx->optlen == 4)
		return tell4(ctx, value > 0xffffffff ? 0xffffffff : value);
	if (ctx->optlen < 8 || (void *)(at + 2) > ctx->optval_end)
		return 0;
	at[0] = value;
	at[1] = value >> 32;
	ctx->optlen = 8;
	return 1;
}

// Overwrites the answer, which the kernel has already written: an error alone would leave it there.
static __always_inline int erase(struct bpf_sockopt *ctx)
{
	__u8 *at = ctx->optval;
	int end = ctx->optlen;

	// None of these answers exceeds the loop's bound, though the buffer may.
	for (int i = 0; i < 512; i++) {
		if (i >= end || (void *)(at + i + 1) > ctx->optval_end)
			break;
		at[i] = 0;
	}
	return 1;
}

SEC("cgroup/getsockopt")
int getsockopt(struct bpf_sockopt *ctx)
{
	struct tag *tag = tag_of(ctx->sk);

	if (!tag || ctx->retval < 0)
		return leave(ctx);
	if (ctx->level == SOL_SOCKET)
		switch (ctx->optname) {
		case 12: // SO_PRIORITY
			return tell4(ctx, tag->priority);
		case 47: // SO_MAX_PACING_RATE
			return tell8(ctx, tag->rate);
		case 25: // SO_BINDTODEVICE
		case 31: // SO_PEERSEC
		case 36: // SO_MARK
		case 49: // SO_INCOMING_CPU
		case 56: // SO_INCOMING_NAPI_ID
		case 62: // SO_BINDTOIFINDEX
		case 71: // SO_NETNS_COOKIE: 0, which no namespace has, marks a tagged socket
			return erase(ctx);
		}
	if (ctx->level == IPPROTO_IP && ctx->optname == 1) // IP_TOS
		return tell4(ctx, tag->tos);
	if (ctx->level == IPPROTO_IPV6 && ctx->optname == 67) // IPV6_TCLASS
		return tell4(ctx, tag->traffic_class);
	if (ctx->level == IPPROTO_IP || ctx->level == IPPROTO_IPV6)
		switch (ctx->optname) {
		case 6: // IPV6_2292PKTOPTIONS
		case 9: // IP_PKTOPTIONS
		case 80: // SO_ORIGINAL_DST: an address that this host has translated
			return erase(ctx);
		}
	if (ctx->level == IPPROTO_TCP && ctx->optname == 28) // TCP_SAVED_SYN
		return erase(ctx);
	return leave(ctx);
}

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return tag_of(ctx->sk) ? 0 : 1;
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return tag_of(ctx->sk) ? 0 : 1;
}

static __always_inline int bind(struct bpf_sock_addr *ctx)
{
	if (!tag_of(ctx->sk))
		return 1;
	// The kernel's error for a socket that is already bound.
	bpf_set_retval(-EINVAL);
	return 0;
}

SEC("cgroup/bind4")
int bind4(struct bpf_sock_addr *ctx)
{
	return bind(ctx);
}

SEC("cgroup/bind6")
int bind6(struct bpf_sock_addr *ctx)
{
	return bind(ctx);
}

// Drops all packets for tagged listening sockets, because no cgroup hook sees a socket that is
// disconnected and then listens.
SEC("cgroup_skb/ingress")
int ingress(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;

	if (!sk || sk->state != BPF_TCP_LISTEN)
		return 1;
	sk = bpf_sk_fullsock(sk);
	return tag_of(sk) ? 0 : 1;
}

char LICENSE[] SEC("license") = "GPL";
