// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Refuses the calls on tagged sockets that secure.bpf.c does not see: ioctl, reads of the error
// queue, setsockopt with another ABI, disconnecting and listening. It needs BPF among the kernel's
// active security modules (BPF LSM, Linux 6.0). Sockets without a tag are not affected.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "options.h"

#define EPERM 1
#define EAGAIN 11
#define EINVAL 22

#define MSG_ERRQUEUE 0x2000
#define AF_UNSPEC 0

// The members that are read. CO-RE relocates them to the running kernel's layout.
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct sock;

struct socket {
	struct sock *sk;
};

struct sockaddr {
	unsigned short sa_family;
};

struct thread_info {
	unsigned long flags;
	__u32 status;
};

struct task_struct {
	struct thread_info thread_info;
};

struct inode;

struct file {
	struct inode *f_inode;
};

#pragma clang attribute pop

// Two maps for one tag, because the ioctl hooks have no socket and the socket hooks no file.
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_INODE_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} files SEC(".maps");

static __always_inline int is_tagged(__u64 *ctx)
{
	struct socket *socket = (struct socket *)ctx[0];
	struct sock *sk = socket->sk;

	return sk && bpf_sk_storage_get(&sockets, sk, NULL, 0);
}

static __always_inline int refuse(int error)
{
	bpf_set_retval(-error);
	return 0;
}

// Returns true for a 32-bit call, which the cgroup hook of setsockopt does not see.
static __always_inline int is_of_another_abi(void)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (bpf_core_field_exists(task->thread_info.status)) // x86
		return task->thread_info.status & 2; // TS_COMPAT
	return task->thread_info.flags & 1 << 22; // TIF_32BIT of aarch64
}

// Arguments: the socket, the level and the option.
SEC("lsm_cgroup/socket_setsockopt")
int socket_setsockopt(__u64 *ctx)
{
	int level = (int)ctx[1], option = (int)ctx[2];

	if (may_set(level, option) || (is_kept(level, option) && !is_of_another_abi()) || !is_tagged(ctx))
		return 1;
	return refuse(EPERM);
}

// Arguments: the socket, the message, its size and the flags.
SEC("lsm_cgroup/socket_recvmsg")
int socket_recvmsg(__u64 *ctx)
{
	if (!((int)ctx[3] & MSG_ERRQUEUE) || !is_tagged(ctx))
		return 1;
	// As if the queue were empty.
	return refuse(EAGAIN);
}

// Arguments: the socket and the address. AF_UNSPEC would disconnect the socket. For other families
// the kernel returns that it is connected.
SEC("lsm_cgroup/socket_connect")
int socket_connect(__u64 *ctx)
{
	struct sockaddr *address = (struct sockaddr *)ctx[1];

	if (address->sa_family != AF_UNSPEC || !is_tagged(ctx))
		return 1;
	return refuse(EPERM);
}

// Fails with the kernel's error for connected sockets.
SEC("lsm_cgroup/socket_listen")
int socket_listen(__u64 *ctx)
{
	return is_tagged(ctx) ? refuse(EINVAL) : 1;
}

// Allows all requests except those with a network's second byte (0x89, 0x8b), and of those the ones
// about the socket itself. crates/common/sys/src/guarded.rs has the same list.
static __always_inline int may_ask(__u32 request)
{
	switch (request) {
	case 0x8901: // FIOSETOWN
	case 0x8902: // SIOCSPGRP
	case 0x8903: // FIOGETOWN
	case 0x8904: // SIOCGPGRP
	case 0x8905: // SIOCATMARK
	case 0x8906: // SIOCGSTAMP, old
	case 0x8907: // SIOCGSTAMPNS, old
	case 0x894b: // SIOCOUTQNSD
	case 0x80108906: // SIOCGSTAMP
	case 0x80108907: // SIOCGSTAMPNS
		return 1;
	}
	return (request & 0xff00) != 0x8900 && (request & 0xff00) != 0x8b00;
}

// Arguments: the file and the request.
static __always_inline int ioctl(__u64 *ctx)
{
	struct file *file = (struct file *)ctx[0];

	if (may_ask((__u32)ctx[1]) || !bpf_inode_storage_get(&files, file->f_inode, NULL, 0))
		return 1;
	return refuse(EPERM);
}

SEC("lsm_cgroup/file_ioctl")
int file_ioctl(__u64 *ctx)
{
	return ioctl(ctx);
}

// The hook of 32-bit programs, on kernels that have a separate one (Linux 6.8).
SEC("lsm_cgroup/file_ioctl_compat")
int file_ioctl_compat(__u64 *ctx)
{
	return ioctl(ctx);
}

char LICENSE[] SEC("license") = "GPL";
