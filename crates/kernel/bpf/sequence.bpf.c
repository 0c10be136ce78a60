// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Reads the sequence numbers of one TCP socket: the descriptor that the caller of BPF_PROG_RUN names, in its own table; and
// later, when it has that no more, what has become of them. No lock is taken: whoever is inside a call on the socket has its.
//
// Never attached to anything, so it costs nothing while nobody asks, and changes nothing when somebody does.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

// The fields that are read, wherever this kernel has them (CO-RE).
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};

struct files_struct {
	struct fdtable *fdt;
};

struct task_struct {
	struct files_struct *files;
};

struct file {
	void *private_data;
};

typedef struct {
	__s64 counter;
} atomic64_t;

struct sock_common {
	atomic64_t skc_cookie;
};

// Of a spinlock only where it begins is asked for: its first word, which is zero while nobody has it.
struct spinlock {
	int first;
};

typedef struct {
	struct spinlock slock;
	int owned;
} socket_lock_t;

struct sock {
	struct sock_common __sk_common;
	socket_lock_t sk_lock;
};

struct socket {
	struct file *file;
	struct sock *sk;
};

struct tcp_sock {
	__u32 snd_una;
	__u32 snd_nxt;
	__u64 bytes_acked;
	__u32 rcv_nxt;
	__u64 bytes_received;
};

#pragma clang attribute pop

struct origin {
	__u32 sent;
	__u32 received;
};

// As crates/kernel/src/sequence.rs has it.
struct answer {
	__u32 words[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct answer);
} answer SEC(".maps");

enum { FOUND, NOT_THERE, UNSTEADY };

// A segment may be processed meanwhile on another processor, which changes one of two counts before the other: for as long as an
// interrupt or the host of a virtual machine takes, if it comes between the two. Whoever changes them has the socket's lock. So what
// was read before and after a moment at which nobody had it, and is the same, is true.
#define ATTEMPTS 64

// FREE: nobody had the lock at a moment between two equal readings. OWNED: a call of a program had it all the time, which may be
// copying megabytes, and nothing has changed; that it stands between two counts for so long is as good as impossible.
enum steadiness { CHANGING, OWNED, FREE };

static void read_origin(struct tcp_sock *tcp, struct origin *origin)
{
	// Each is what the count was when the connection was made, so it never changes.
	origin->sent = BPF_CORE_READ(tcp, snd_una) - (__u32)BPF_CORE_READ(tcp, bytes_acked);
	origin->received = BPF_CORE_READ(tcp, rcv_nxt) - (__u32)BPF_CORE_READ(tcp, bytes_received);
}

static enum steadiness read_steadily(struct sock *sk, struct origin *origin)
{
	enum steadiness steadiness = CHANGING;
	struct origin again;
	int spinning;

	read_origin((struct tcp_sock *)sk, origin);
	for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
		bpf_probe_read_kernel(&spinning, sizeof(spinning), &sk->sk_lock.slock);
		int owned = BPF_CORE_READ(sk, sk_lock.owned);

		read_origin((struct tcp_sock *)sk, &again);
		if (origin->sent != again.sent || origin->received != again.received)
			steadiness = CHANGING;
		else if (!spinning && !owned)
			return FREE;
		else if (!spinning)
			steadiness = OWNED;
		*origin = again;
	}
	return steadiness;
}

static int say(__u32 one, __u32 two, __u32 three, __u32 four)
{
	struct answer found = {{one, two, three, four}};
	__u32 only = 0;

	bpf_map_update_elem(&answer, &only, &found, BPF_ANY);
	return FOUND;
}

// Arguments: the descriptor, and the SO_COOKIE that the socket behind it must have. Answers: the origin, and where the socket is.
SEC("raw_tp")
int sequence(struct bpf_raw_tracepoint_args *args)
{
	__u32 fd = args->args[0];
	__s64 cookie = args->args[1];
	struct task_struct *task = (void *)bpf_get_current_task();
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file *file = NULL;

	if (fd >= BPF_CORE_READ(table, max_fds))
		return NOT_THERE;
	bpf_probe_read_kernel(&file, sizeof(file), BPF_CORE_READ(table, fd) + fd);

	// If the file were no socket, what is read here would be other memory of the kernel: no harm, and no match.
	struct socket *socket = BPF_CORE_READ(file, private_data);
	struct sock *sk = BPF_CORE_READ(socket, sk);

	if (!file || BPF_CORE_READ(socket, file) != file || BPF_CORE_READ(sk, __sk_common.skc_cookie.counter) != cookie)
		return NOT_THERE;

	struct origin origin;
	__u64 place = (__u64)sk;

	if (read_steadily(sk, &origin) == CHANGING)
		return UNSTEADY;
	return say(origin.sent, origin.received, place, place >> 32);
}

// Arguments: where `sequence` found the socket, and its SO_COOKIE. If it has ended, its memory may be anything by now, and the answer
// too: the caller asks whether it lives, afterwards. Answers: acknowledged, sent, received.
SEC("raw_tp")
int position(struct bpf_raw_tracepoint_args *args)
{
	struct tcp_sock *tcp = (void *)args->args[0];
	__s64 cookie = args->args[1];

	if (BPF_CORE_READ((struct sock *)tcp, __sk_common.skc_cookie.counter) != cookie)
		return NOT_THERE;

	return say(BPF_CORE_READ(tcp, snd_una), BPF_CORE_READ(tcp, snd_nxt), BPF_CORE_READ(tcp, rcv_nxt), 0);
}

// What the helpers that read the memory of the kernel ask for.
char LICENSE[] SEC("license") = "GPL";
