// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// What secure.bpf.c is not shown, of the same sockets: ioctl, the queue of errors, options that are set by another ABI, and a socket that is
// disconnected and listens. For kernels with BPF among their security modules (BPF LSM, Linux 6.0). Sockets without a tag are left as they are.

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

// The fields that are read, wherever this kernel has them (CO-RE).
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

// Twice the same tag: a call about a file shows no socket, and one about a socket no file.
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

// A call of a 32-bit program's kind, which the hook of setsockopt is not shown.
static __always_inline int is_of_another_abi(void)
{
	struct task_struct *task = bpf_get_current_task_btf();

	if (bpf_core_field_exists(task->thread_info.status)) // x86
		return task->thread_info.status & 2; // TS_COMPAT
	return task->thread_info.flags & 1 << 22; // TIF_32BIT of aarch64
}

// Of the socket, its level and the option.
SEC("lsm_cgroup/socket_setsockopt")
int socket_setsockopt(__u64 *ctx)
{
	int level = (int)ctx[1], option = (int)ctx[2];

	if (may_set(level, option) || (is_kept(level, option) && !is_of_another_abi()) || !is_tagged(ctx))
		return 1;
	return refuse(EPERM);
}

// Of the socket, the message, its size and the flags.
SEC("lsm_cgroup/socket_recvmsg")
int socket_recvmsg(__u64 *ctx)
{
	if (!((int)ctx[3] & MSG_ERRQUEUE) || !is_tagged(ctx))
		return 1;
	// As if it were empty.
	return refuse(EAGAIN);
}

// Of the socket and the address. Without a family it would be disconnected; of all others the kernel says that it is connected.
SEC("lsm_cgroup/socket_connect")
int socket_connect(__u64 *ctx)
{
	struct sockaddr *address = (struct sockaddr *)ctx[1];

	if (address->sa_family != AF_UNSPEC || !is_tagged(ctx))
		return 1;
	return refuse(EPERM);
}

// With what the kernel says of a connected socket.
SEC("lsm_cgroup/socket_listen")
int socket_listen(__u64 *ctx)
{
	return is_tagged(ctx) ? refuse(EINVAL) : 1;
}

// What is asked of networks has one of these two in its second byte, but for what is the socket's own: as crates/sys/src/guarded.rs has it.
static __always_inline int may_ask(__u32 request)
{
	switch (request) {
	case 0x8901: // FIOSETOWN
	case 0x8902: // SIOCSPGRP
	case 0x8903: // FIOGETOWN
	case 0x8904: // SIOCGPGRP
	case 0x8905: // SIOCATMARK
	case 0x8906: // SIOCGSTAMP, of old
	case 0x8907: // SIOCGSTAMPNS, of old
	case 0x894b: // SIOCOUTQNSD
	case 0x80108906: // SIOCGSTAMP
	case 0x80108907: // SIOCGSTAMPNS
		return 1;
	}
	return (request & 0xff00) != 0x8900 && (request & 0xff00) != 0x8b00;
}

// Of the file, and the request.
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

// Of a program of 32 bits, where the kernel tells the two apart (Linux 6.8).
SEC("lsm_cgroup/file_ioctl_compat")
int file_ioctl_compat(__u64 *ctx)
{
	return ioctl(ctx);
}

char LICENSE[] SEC("license") = "GPL";
