// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Sets the initial congestion window of selected connections. It does so before they send anything,
// so that pacing uses it. Other connections are not affected.

#include <linux/bpf.h>
#include <linux/tcp.h>
#include <linux/types.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define ENDS 1024

// A connection's destination, or the port that accepted it. Ports are in host byte order.
struct end {
	__u32 address[4]; // an IPv6 or mapped IPv4 address; zero for accepted connections
	__u32 remote_port;
	__u32 local_port;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ENDS);
	__type(key, struct end);
	__type(value, __u32); // segments
} windows SEC(".maps");

#define AF_INET 2

static __always_inline void address(struct bpf_sock_ops *ops, struct end *end)
{
	__u32 ip4 = ops->remote_ip4;

	// Otherwise the compiler merges the two cases into one load, which the verifier rejects.
	asm volatile("" : "+r"(ip4));
	if (ops->family == AF_INET) {
		end->address[2] = bpf_htonl(0xffff);
		end->address[3] = ip4;
	} else {
		end->address[0] = ops->remote_ip6[0];
		end->address[1] = ops->remote_ip6[1];
		end->address[2] = ops->remote_ip6[2];
		end->address[3] = ops->remote_ip6[3];
	}
}

SEC("sockops")
int widen(struct bpf_sock_ops *ops)
{
	struct end end = {};
	__u32 *segments;

	switch (ops->op) {
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		address(ops, &end);
		end.remote_port = bpf_ntohl(ops->remote_port);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		end.local_port = ops->local_port;
		break;
	default:
		return 1;
	}
	segments = bpf_map_lookup_elem(&windows, &end);
	if (segments) {
		int window = *segments;

		bpf_setsockopt(ops, 6 /* IPPROTO_TCP */, TCP_BPF_IW, &window, sizeof(window));
	}
	return 1;
}

char LICENSE[] SEC("license") = "GPL";
