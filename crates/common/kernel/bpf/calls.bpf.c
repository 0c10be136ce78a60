// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Times the system calls of selected processes from entry to return, including waits.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#define PROCESSES 64
#define THREADS 4096
#define CALLS 1024
// Eight buckets for each power of two.
#define BUCKETS 320

// The PID namespace of the watching process, in which `processes` has its PIDs.
volatile const __u64 namespace_device;
volatile const __u64 namespace_inode;

struct begin {
	__u64 at;
	__u64 number;
};

struct key {
	__u32 process;
	__u32 number;
};

struct figures {
	__u64 count;
	__u64 total; // ns
	__u32 buckets[BUCKETS];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, PROCESSES);
	__type(key, __u32);
	__type(value, __u32);
} processes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, THREADS);
	__type(key, __u32);
	__type(value, struct begin);
} begins SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, CALLS);
	__type(key, struct key);
	__type(value, struct figures);
} calls SEC(".maps");

// The initial value of an entry, which is too large for the stack.
static const struct figures none;

SEC("raw_tp/sys_enter")
int enter(struct bpf_raw_tracepoint_args *args)
{
	struct bpf_pidns_info who = {};
	struct begin begin = {};
	__u32 process, thread;

	// Processes of other namespaces are not watched.
	if (bpf_get_ns_current_pid_tgid(namespace_device, namespace_inode, &who, sizeof(who)))
		return 0;
	process = who.tgid;
	thread = who.pid;
	if (!bpf_map_lookup_elem(&processes, &process))
		return 0;
	begin.number = args->args[1];
	begin.at = bpf_ktime_get_ns();
	bpf_map_update_elem(&begins, &thread, &begin, BPF_ANY);
	return 0;
}

static __always_inline __u32 bucket(__u64 ns)
{
	__u32 power = 0, shift;
	__u64 rest = ns;

	for (shift = 32; shift; shift >>= 1)
		if (rest >> shift) {
			rest >>= shift;
			power += shift;
		}
	if (power < 3)
		return ns;
	return (power - 2) * 8 + ((ns >> (power - 3)) & 7);
}

SEC("raw_tp/sys_exit")
int leave(struct bpf_raw_tracepoint_args *args)
{
	__u64 now = bpf_ktime_get_ns();
	struct bpf_pidns_info who = {};
	struct key key = {};
	__u32 thread, at;
	struct figures *figures;
	struct begin *begin;

	if (bpf_get_ns_current_pid_tgid(namespace_device, namespace_inode, &who, sizeof(who)))
		return 0;
	key.process = who.tgid;
	thread = who.pid;
	begin = bpf_map_lookup_elem(&begins, &thread);
	if (!begin)
		return 0;
	key.number = begin->number;
	now -= begin->at;
	bpf_map_delete_elem(&begins, &thread);
	figures = bpf_map_lookup_elem(&calls, &key);
	if (!figures) {
		bpf_map_update_elem(&calls, &key, &none, BPF_NOEXIST);
		figures = bpf_map_lookup_elem(&calls, &key);
		if (!figures)
			return 0;
	}
	__sync_fetch_and_add(&figures->count, 1);
	__sync_fetch_and_add(&figures->total, now);
	at = bucket(now);
	if (at < BUCKETS)
		__sync_fetch_and_add(&figures->buckets[at], 1);
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
