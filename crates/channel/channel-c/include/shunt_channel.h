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

/* Returns a descriptor for poll: readable when a shunt_send that returned -EAGAIN should be tried
 * again. */
int shunt_sender_fd(const shunt_sender *sender);

void shunt_sender_close(shunt_sender *sender);

/* Listens at path, where no file may exist yet. The file is removed with the receiver. Only this
 * user may connect. */
int shunt_listen(const char *path, shunt_receiver **receiver);

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
