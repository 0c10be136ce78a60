// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Sockmap redirect, for comparison: other projects accelerate local connections in this way. It
// notices connections between two sockets of a cgroup when they are established, and puts sent data
// into the receive queue of the other end. It has no backpressure and cannot fall back to TCP.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET 2
#define CONNECTIONS 65536

// One end of an IPv4 connection, with ports in host byte order.
struct end {
	__u32 local_ip;
	__u32 remote_ip;
	__u32 local_port;
	__u32 remote_port;
};

struct {
	__uint(type, BPF_MAP_TYPE_SOCKHASH);
	__uint(max_entries, CONNECTIONS);
	__type(key, struct end);
	__type(value, __u32);
} sockets SEC(".maps");

// A copy of the keys of `sockets`. An sk_msg program cannot look up a socket map, and a message
// that is redirected to a missing socket is lost.
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, CONNECTIONS);
	__type(key, struct end);
	__type(value, __u8);
} established SEC(".maps");

SEC("sockops")
int notice(struct bpf_sock_ops *ops)
{
	__u8 yes = 1;

	if (ops->family != AF_INET)
		return 1;

	struct end end = {
		.local_ip = ops->local_ip4,
		.remote_ip = ops->remote_ip4,
		.local_port = ops->local_port,
		.remote_port = bpf_ntohl(ops->remote_port),
	};

	switch (ops->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		bpf_sock_ops_cb_flags_set(ops, BPF_SOCK_OPS_STATE_CB_FLAG);
		if (!bpf_sock_hash_update(ops, &sockets, &end, BPF_ANY))
			bpf_map_update_elem(&established, &end, &yes, BPF_ANY);
		break;
	case BPF_SOCK_OPS_STATE_CB:
		// The connection is closing. Use TCP from here on, which keeps the bytes and the
		// FIN in order. For an accepted connection this callback can precede the state
		// change.
		if (ops->args[1] != BPF_TCP_ESTABLISHED)
			bpf_map_delete_elem(&established, &end);
		break;
	}
	return 1;
}

SEC("sk_msg")
int redirect(struct sk_msg_md *message)
{
	struct end peer = {
		.local_ip = message->remote_ip4,
		.remote_ip = message->local_ip4,
		.local_port = bpf_ntohl(message->remote_port),
		.remote_port = message->local_port,
	};

	if (message->family != AF_INET || !bpf_map_lookup_elem(&established, &peer))
		return SK_PASS;
	return bpf_msg_redirect_hash(message, &sockets, &peer, BPF_F_INGRESS);
}

char LICENSE[] SEC("license") = "GPL";
