/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages with descriptors between processes of one host: 0 B to 64 MiB with 0 to 253
 * descriptors. Messages arrive whole, and in order for each sender. Many senders may share one
 * receiver. See docs/channel.md.
 *
 * Every function returns 0, or a negative error number. Only one thread may use a handle at a time.
 * Time-outs are in milliseconds: -1 waits without limit, 0 not at all. -EAGAIN: not now (time-out
 * 0); -ETIMEDOUT: not in time.
 */
#ifndef SHUNT_CHANNEL_H
#define SHUNT_CHANNEL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SHUNT_CHANNEL_MAX_MESSAGE ((size_t)64 << 20)
#define SHUNT_CHANNEL_MAX_DESCRIPTORS 253

typedef struct shunt_sender shunt_sender;
typedef struct shunt_receiver shunt_receiver;

/* The result of shunt_receive. */
struct shunt_event {
	uint64_t sender;      /* the sender; its number is never used again for another one */
	int ended;            /* 0: a message. 1: the sender has closed. 2: it has closed in the middle of a message.
	                         3: the receiver has ended it, because it broke the protocol or a limit, or
	                         because its memory is not sealed */
	const void *bytes;    /* the message, and its descriptors, close-on-exec; the receiver owns both until the
	                         next shunt_receive */
	size_t len;
	const int *descriptors;
	size_t count;
};

/* Connects to the receiver that listens at path. -ENOENT, -ECONNREFUSED: there is no receiver.
 * -ENOMEM, -ENOSPC: there is no memory for the ring of 516 KiB, all of which is allocated here. */
int shunt_connect(const char *path, int timeout_ms, shunt_sender **sender);

/* Sends a message with copies of count descriptors. After an error the receiver gets nothing of
 * it. -EMSGSIZE: more than 64 MiB. -E2BIG: more than 253 descriptors. -EPIPE: the receiver has
 * gone. -EPROTO: the receiver broke the protocol, or shared memory that it could still withdraw.
 * -EMFILE: this process has no descriptor left for the receiver's answer. After -EPROTO and -EMFILE
 * the sender cannot be used any more. */
int shunt_send(shunt_sender *sender, const void *bytes, size_t len, const int *descriptors, size_t count, int timeout_ms);

/* Sends one message as shunt_send does, whose bytes are in several places. -EINVAL: more than 1024
 * of them. */
int shunt_send_gathered(shunt_sender *sender, const struct iovec *pieces, size_t piece_count, const int *descriptors,
			size_t count, int timeout_ms);

/* Sends a message that is already in a memfd, in place. The memfd contains nothing else. -EINVAL: it
 * is not sealed against shrinking, growing and writing. */
int shunt_send_memory(shunt_sender *sender, int memory, const int *descriptors, size_t count, int timeout_ms);

/* Memory for one message, which the receiver can read too, even before it is sent. It has bytes of
 * an earlier message. */
struct shunt_loaned {
	void *bytes;
	size_t len;     /* may be made shorter before shunt_commit */
	struct shunt_loan_ *loan; /* NULL once it was sent or given back */
};

/* Returns memory for a message of len bytes, which shunt_commit sends: neither end copies it. Waits
 * while the receiver has all memory for this length. -EBUSY: this process holds all of it. */
int shunt_loan(shunt_sender *sender, size_t len, struct shunt_loaned *loaned, int timeout_ms);

/* Sends loaned->len bytes of the memory, with copies of count descriptors. After an error the receiver
 * gets nothing of it, and the memory can be sent again. -EINVAL: it is from another sender, or it was
 * sent or made longer. */
int shunt_commit(shunt_sender *sender, struct shunt_loaned *loaned, const int *descriptors, size_t count,
		 int timeout_ms);

/* Gives the memory back, and sends nothing. Does nothing for memory that was sent. */
void shunt_give_back(struct shunt_loaned *loaned);

/* Returns a descriptor for poll: readable when a call that returned -EAGAIN should be tried
 * again. */
int shunt_sender_fd(const shunt_sender *sender);

void shunt_sender_close(shunt_sender *sender);

/* Options. size is the size of the structure; other members that are 0 have their default. */
struct shunt_sender_options {
	size_t size;
	size_t ring_bytes; /* of the ring: a power of two from 4 KiB to 16 MiB; 512 KiB */
	size_t lent_bytes; /* of the memory for loans; beyond that, there is one loan of each length at a time; 64 MiB */
};

struct shunt_receiver_options {
	size_t size;
	size_t max_senders; /* at a time; further ones wait until one has gone; 1024 */
	size_t max_message; /* the most bytes of a message; a sender of a longer one is ended; 64 MiB */
	mode_t mode;        /* of the socket's file, which determines the users that may connect; 0600 */
};

/* Connects with options; NULL means the defaults. -EINVAL: impossible options. */
int shunt_connect_with(const char *path, const struct shunt_sender_options *options, int timeout_ms,
		       shunt_sender **sender);

/* Makes a sender over a SOCK_SEQPACKET socket whose other end a receiver has, or will have. The
 * socket belongs to the sender, also after an error. */
int shunt_sender_over(int socket, const struct shunt_sender_options *options, shunt_sender **sender);

/* Listens at path, where no file may exist yet. The file is removed with the receiver. Only this
 * user may connect. */
int shunt_listen(const char *path, shunt_receiver **receiver);

/* Listens with options; NULL means the defaults. Without a path it has only senders of shunt_adopt. */
int shunt_listen_with(const char *path, const struct shunt_receiver_options *options, shunt_receiver **receiver);

/* Takes the other end of a sender's SOCK_SEQPACKET socket. The socket belongs to the receiver, also
 * after an error. sender may be NULL. */
int shunt_adopt(shunt_receiver *receiver, int socket, uint64_t *sender);

struct shunt_credentials {
	pid_t pid; /* 0 if it is not visible in the PID namespace of this process */
	uid_t uid;
};

/* Returns the identity of a sender, as the kernel recorded it when the sender connected. -ESRCH: there
 * is no such sender, or it has ended. */
int shunt_sender_credentials(const shunt_receiver *receiver, uint64_t sender, struct shunt_credentials *credentials);

/* A message that was received in place, or the end of a sender. */
struct shunt_borrowed {
	struct shunt_event event; /* its bytes and descriptors can be used until shunt_release */
	int may_change; /* the sender is able to change the bytes: copy them, then check and use the copy */
	struct shunt_borrow_ *message;
};

/* Receives as shunt_receive does, and does not copy a message of shunt_commit. Several messages may
 * be borrowed at a time, and released in any order, from any thread. */
int shunt_borrow(shunt_receiver *receiver, struct shunt_borrowed *borrowed, int timeout_ms);

/* Takes a descriptor from a borrowed message; the caller closes it. -EBADF: there is no such
 * descriptor. */
int shunt_take_borrowed_descriptor(struct shunt_borrowed *borrowed, size_t index);

/* Gives the memory back to the sender, and closes the descriptors. After -EMFILE a borrowed message is
 * released too. */
void shunt_release(struct shunt_borrowed *borrowed);

/* Receives the next message, or reports the end of a sender. -EMFILE: this process had no room for
 * the descriptors of a message; its bytes are in the event, and nothing else is lost. */
int shunt_receive(shunt_receiver *receiver, struct shunt_event *event, int timeout_ms);

/* Takes a descriptor from the last message; the caller closes it. -EBADF: there is no such
 * descriptor. */
int shunt_take_descriptor(shunt_receiver *receiver, size_t index);

/* Returns a descriptor for poll: readable when a shunt_receive that returned -EAGAIN should be tried
 * again. */
int shunt_receiver_fd(const shunt_receiver *receiver);

void shunt_receiver_close(shunt_receiver *receiver);

/* Makes a sender and a receiver that are connected only to each other. */
int shunt_pair(shunt_sender **sender, shunt_receiver **receiver);

#ifdef __cplusplus
}
#endif
#endif
