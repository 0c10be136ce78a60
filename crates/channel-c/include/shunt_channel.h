/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages with descriptors between processes of one host: 0 B to 64 MiB with 0 to 253 descriptors, whole, in order for each
 * sender, many senders to one receiver. See docs/channel.md.
 *
 * Every function returns 0, or a negative error number. A handle is used by one thread at a time.
 * Time-outs are in milliseconds: -1 for ever, 0 not at all. -EAGAIN: not now (time-out 0); -ETIMEDOUT: not in time.
 */
#ifndef SHUNT_CHANNEL_H
#define SHUNT_CHANNEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SHUNT_CHANNEL_MAX_MESSAGE ((size_t)64 << 20)
#define SHUNT_CHANNEL_MAX_DESCRIPTORS 253

typedef struct shunt_sender shunt_sender;
typedef struct shunt_receiver shunt_receiver;

/* What shunt_receive found. */
struct shunt_event {
	uint64_t sender;      /* whose; a number is never used again for another sender */
	int ended;            /* 0: a message. 1: the sender has closed. 2: in the middle of a message. 3: it was ended, since it
	                         broke the protocol or a limit, or its memory is not sealed */
	const void *bytes;    /* the message, and its descriptors, close-on-exec: the receiver's until the next shunt_receive */
	size_t len;
	const int *descriptors;
	size_t count;
};

/* Connects to the receiver that listens at path. -ENOENT, -ECONNREFUSED: there is none.
 * -ENOMEM, -ENOSPC: no memory for the ring, all of which is allocated here: 516 KiB. */
int shunt_connect(const char *path, int timeout_ms, shunt_sender **sender);

/* Sends a message with copies of so many descriptors. After an error the receiver gets nothing of it. -EMSGSIZE: more than
 * 64 MiB. -E2BIG: more than 253 descriptors. -EPIPE: the receiver has gone. -EPROTO: it broke the protocol, or
 * shared memory that it could still take away. -EMFILE: no descriptor for its answer.
 * After these two the sender is of no use any more. */
int shunt_send(shunt_sender *sender, const void *bytes, size_t len, const int *descriptors, size_t count, int timeout_ms);

/* For poll: readable when shunt_send, which returned -EAGAIN, should be tried again. */
int shunt_sender_fd(const shunt_sender *sender);

void shunt_sender_close(shunt_sender *sender);

/* Listens at path, where nothing must be yet; the file goes with the receiver. Only this user may connect. */
int shunt_listen(const char *path, shunt_receiver **receiver);

/* Receives the next message, or says that a sender is no more. -EMFILE: there was no room for the descriptors of a message;
 * its bytes are in the event, and nothing else is lost. */
int shunt_receive(shunt_receiver *receiver, struct shunt_event *event, int timeout_ms);

/* Takes a descriptor out of the last message: it is the caller's to close. -EBADF: there is no such. */
int shunt_take_descriptor(shunt_receiver *receiver, size_t index);

/* For poll: readable when shunt_receive, which returned -EAGAIN, should be tried again. */
int shunt_receiver_fd(const shunt_receiver *receiver);

void shunt_receiver_close(shunt_receiver *receiver);

/* A sender and a receiver of each other only. */
int shunt_pair(shunt_sender **sender, shunt_receiver **receiver);

#ifdef __cplusplus
}
#endif
#endif
