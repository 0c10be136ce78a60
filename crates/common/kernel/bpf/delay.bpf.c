// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Sends whatever arrives at a socket back, from that socket. The kernel does that as it does every
// redirection of a socket map: a worker thread of the sender's processor takes the bytes from a
// queue. So the time until they are back shows how long such a thread waits for its processor.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} returning SEC(".maps");

SEC("sk_skb/stream_verdict")
int arrived(struct __sk_buff *skb)
{
	return bpf_sk_redirect_map(skb, &returning, 0, 0);
}

char LICENSE[] SEC("license") = "GPL";
