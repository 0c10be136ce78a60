// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Reads the sequence numbers of a TCP socket: first of a descriptor of the process that calls
// BPF_PROG_RUN, and later, when the process has closed it, of the same kernel address. It takes no
// lock, because a thread in a call on the socket holds it.
//
// The programs are never attached. They cost nothing until they are run, and change nothing then.

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

// The members that are read. CO-RE relocates them to the running kernel's layout.
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

// Only the first word of a spinlock is read, which is 0 while the lock is free.
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
	__u32 write_seq;
	__u64 bytes_acked;
	__u32 rcv_nxt;
	__u64 bytes_received;
};

#pragma clang attribute pop

struct origin {
	__u32 sent;
	__u32 received;
};

// crates/common/kernel/src/sequence.rs has the same layout.
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

// Another processor may process a segment during a reading and have changed one of two counts. That
// state can last as long as an interrupt, or a pause of the virtual machine, between the two
// changes. Only the holder of the socket's lock changes counts. So two equal readings are correct
// if the lock was free at a moment between them.
#define ATTEMPTS 64

// FREE: the lock was free at a moment between two equal readings. OWNED: a call of a program held
// the lock for all attempts, for example to copy megabytes, and nothing changed. A call that stays
// between two counts for so long is practically impossible.
enum steadiness { CHANGING, OWNED, FREE };

enum holder { NOBODY, INTERRUPT, CALL };

static enum holder read_lock(struct sock *sk)
{
	int spinning;

	bpf_probe_read_kernel(&spinning, sizeof(spinning), &sk->sk_lock.slock);
	if (spinning)
		return INTERRUPT;
	return BPF_CORE_READ(sk, sk_lock.owned) ? CALL : NOBODY;
}

static void read_origin(struct tcp_sock *tcp, struct origin *origin)
{
	// Each difference is the count's initial value, so it never changes.
	origin->sent = BPF_CORE_READ(tcp, snd_una) - (__u32)BPF_CORE_READ(tcp, bytes_acked);
	origin->received = BPF_CORE_READ(tcp, rcv_nxt) - (__u32)BPF_CORE_READ(tcp, bytes_received);
}

static enum steadiness read_steadily(struct sock *sk, struct origin *origin)
{
	enum steadiness steadiness = CHANGING;
	struct origin again;

	read_origin((struct tcp_sock *)sk, origin);
	for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
		enum holder holder = read_lock(sk);

		read_origin((struct tcp_sock *)sk, &again);
		if (origin->sent != again.sent || origin->received != again.received)
			steadiness = CHANGING;
		else if (holder == NOBODY)
			return FREE;
		else if (holder == CALL)
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

// Arguments: the descriptor, and the SO_COOKIE that its socket must have. Answers: the origin, and
// the socket's address.
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

	// If the file is not a socket, these read other kernel memory. That is harmless, and
	// nothing matches.
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

// Arguments: the socket's address from `sequence`, and its SO_COOKIE. Answers: acknowledged, sent,
// received. If the socket was freed, its memory and the answer can be anything, so the caller
// checks afterwards that the socket is alive.
SEC("raw_tp")
int position(struct bpf_raw_tracepoint_args *args)
{
	struct tcp_sock *tcp = (void *)args->args[0];
	struct sock *sk = (void *)tcp;
	__s64 cookie = args->args[1];

	if (BPF_CORE_READ(sk, __sk_common.skc_cookie.counter) != cookie)
		return NOT_THERE;

	// The kernel sets snd_nxt after it has handed a segment over, still under the lock. On one
	// host the peer may have received the segment long before, if the thread was preempted in
	// between.
	bool is_sending = read_lock(sk) != NOBODY;
	__u32 sent = is_sending ? BPF_CORE_READ(tcp, write_seq) : BPF_CORE_READ(tcp, snd_nxt);

	return say(BPF_CORE_READ(tcp, snd_una), sent, BPF_CORE_READ(tcp, rcv_nxt), 0);
}

// The helpers that read kernel memory require the GPL.
char LICENSE[] SEC("license") = "GPL";
