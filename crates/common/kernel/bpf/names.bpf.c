// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Replaces the results of getsockname and getpeername for sockets that stand in for other
// connections: they report the addresses of the connection that they replace. Other sockets are not
// affected.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// crates/common/kernel/src/names.rs has the same layout. IPv4 addresses are mapped to IPv6. All
// members are in network byte order.
struct end {
	__u32 address[4];
	__u32 port;
};

struct names {
	struct end local;
	struct end remote;
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct names);
} names SEC(".maps");

// The containers' ends of a connection that has a translated address: the local one, and the peer's. The
// programs do not report them. They are read by a router that has not made the socket.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct names);
} ends SEC(".maps");

static __always_inline struct names *names_of(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct names *found = sk ? bpf_sk_storage_get(&names, sk, NULL, 0) : NULL;

	// The kernel keeps a storage for as long as a program refers to it.
	if (found)
		bpf_sk_storage_get(&ends, sk, NULL, 0);
	return found;
}

static __always_inline int tell4(struct bpf_sock_addr *ctx, struct end *end)
{
	ctx->user_ip4 = end->address[3];
	ctx->user_port = end->port;
	return 1;
}

static __always_inline int tell6(struct bpf_sock_addr *ctx, struct end *end)
{
	ctx->user_ip6[0] = end->address[0];
	ctx->user_ip6[1] = end->address[1];
	ctx->user_ip6[2] = end->address[2];
	ctx->user_ip6[3] = end->address[3];
	ctx->user_port = end->port;
	return 1;
}

SEC("cgroup/getsockname4")
int sockname4(struct bpf_sock_addr *ctx)
{
	struct names *names = names_of(ctx);

	return names ? tell4(ctx, &names->local) : 1;
}

SEC("cgroup/getpeername4")
int peername4(struct bpf_sock_addr *ctx)
{
	struct names *names = names_of(ctx);

	return names ? tell4(ctx, &names->remote) : 1;
}

SEC("cgroup/getsockname6")
int sockname6(struct bpf_sock_addr *ctx)
{
	struct names *names = names_of(ctx);

	return names ? tell6(ctx, &names->local) : 1;
}

SEC("cgroup/getpeername6")
int peername6(struct bpf_sock_addr *ctx)
{
	struct names *names = names_of(ctx);

	return names ? tell6(ctx, &names->remote) : 1;
}

char LICENSE[] SEC("license") = "GPL";
