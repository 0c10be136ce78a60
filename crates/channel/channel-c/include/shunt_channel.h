/* SPDX-License-Identifier: Apache-2.0
 *
 * Messages with descriptors between processes of one host: 0 B to 64 MiB with 0 to 253
 * descriptors. Messages arrive whole, and in order for each sender. Many senders may share one
 * receiver; a publisher sends each message to many subscribers; a client sends requests to a server.
 * See docs/channel.md.
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
	size_t lent_bytes; /* of the memory for loans, at most 256 MiB; beyond that, there is one loan of each length at a time; 64 MiB */
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

/* Returns whether all that was read of a borrowed message until now is of this message: 0 if a publisher
 * has taken its memory back. Always 1 for messages of senders. */
int shunt_is_intact(const struct shunt_borrowed *borrowed);

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

/* Requests and responses. A client sends requests to a server, which responds in any order, or not at
 * all. */

typedef struct shunt_server shunt_server;
typedef struct shunt_client shunt_client;

/* A request that a server has received, or a response that a client has. The handle owns its bytes and
 * descriptors until it receives again. */
struct shunt_numbered {
	uint64_t number; /* of the request */
	uint64_t client; /* of a request: its client, whose number is never used again for another one */
	const void *bytes;
	size_t len;
	const int *descriptors; /* close-on-exec */
	size_t count;
};

/* Makes a server that listens at path, as shunt_listen_with does. Each client's responses go through a
 * ring of responses->ring_bytes. NULL means the defaults. */
int shunt_serve(const char *path, const struct shunt_receiver_options *options,
		const struct shunt_sender_options *responses, shunt_server **server);

/* Receives the next request. Requests of one client come in its order. -EMFILE: this process had no room
 * for the descriptors of a request, which is lost. */
int shunt_server_receive(shunt_server *server, struct shunt_numbered *request, int timeout_ms);

/* Sends the response to the request with this number of this client. With a time-out of 0, no client
 * keeps the server from others: -EAGAIN if it does not read its responses. -EPIPE: the client has gone,
 * which is counted and no error of the server. Other errors as of shunt_send. */
int shunt_respond(shunt_server *server, uint64_t client, uint64_t number, const void *bytes, size_t len,
		  const int *descriptors, size_t count, int timeout_ms);

/* Returns how many responses were not sent, because their client had gone. */
uint64_t shunt_unanswered(const shunt_server *server);

/* Returns the identity of a client, as shunt_sender_credentials does. */
int shunt_client_credentials(const shunt_server *server, uint64_t client, struct shunt_credentials *credentials);

/* Takes a descriptor from the last request; the caller closes it. -EBADF: there is no such descriptor. */
int shunt_take_request_descriptor(shunt_server *server, size_t index);

/* Returns a descriptor for poll: readable when a shunt_server_receive that returned -EAGAIN should be
 * tried again. */
int shunt_server_fd(const shunt_server *server);

void shunt_server_close(shunt_server *server);

/* Connects to the server that listens at path; NULL means the default options. */
int shunt_client_connect(const char *path, const struct shunt_sender_options *options, int timeout_ms,
			 shunt_client **client);

/* Sends a request and waits for its response. Responses to earlier requests are discarded. -EPIPE: the
 * server has gone. -EPROTO: it broke the protocol. After -ETIMEDOUT the request may have been served.
 * -EMFILE: this process had no room for the descriptors of the response, whose bytes are there. */
int shunt_call(shunt_client *client, const void *bytes, size_t len, const int *descriptors, size_t count,
	       struct shunt_numbered *response, int timeout_ms);

/* Sends a request, and stores its number unless number is NULL. Several requests may wait for their
 * responses. */
int shunt_request(shunt_client *client, const void *bytes, size_t len, const int *descriptors, size_t count,
		  uint64_t *number, int timeout_ms);

/* Receives the next response: response->number is that of its request. Errors as of shunt_call. */
int shunt_response(shunt_client *client, struct shunt_numbered *response, int timeout_ms);

/* Takes a descriptor from the last response; the caller closes it. -EBADF: there is no such descriptor. */
int shunt_take_response_descriptor(shunt_client *client, size_t index);

/* Returns a descriptor for poll: readable when a shunt_response that returned -EAGAIN should be tried
 * again. */
int shunt_client_fd(const shunt_client *client);

void shunt_client_close(shunt_client *client);

/* Publishers and subscribers. A publisher sends each message to all of its subscribers, and waits for
 * none. It keeps the last messages for those that come later or are slow. A slow one misses messages
 * that have left this history, and its next message has their count. Messages have no descriptors. */

typedef struct shunt_publisher shunt_publisher;
typedef struct shunt_subscriber shunt_subscriber;

struct shunt_publisher_options {
	size_t size;            /* of the structure; other members that are 0 have their default */
	size_t history;         /* how many of the last messages are kept; 0 */
	size_t max_subscribers; /* at a time; further ones wait until one has gone; 64 */
	size_t ring_bytes;      /* of each subscriber's ring: a power of two from 4 KiB to 16 MiB; 64 KiB */
	size_t lent_bytes;      /* of the memory for messages of more than 2 KiB, at most 256 MiB; 64 MiB */
	mode_t mode;            /* of the socket's file, which determines the users that may subscribe; 0600 */
};

/* Counts since the last shunt_attend. */
struct shunt_attended {
	uint64_t joined;  /* new subscribers */
	uint64_t left;    /* subscribers that have closed or died */
	uint64_t refused; /* subscribers that broke the protocol, and were disconnected */
};

struct shunt_subscriber_status {
	uint64_t id;      /* never used again for another one */
	uint64_t missed;  /* messages that it was not sent, because they had left the history */
	uint64_t revoked; /* messages that it was sent, and did not give back before their memory was needed */
	struct shunt_credentials credentials;
	int is_behind;    /* whether there are messages that it was not sent yet */
};

/* Makes a publisher that listens at path, where no file may exist yet; NULL means the default options.
 * Without a path it has only subscribers of shunt_publisher_adopt. */
int shunt_publisher_listen(const char *path, const struct shunt_publisher_options *options,
			   shunt_publisher **publisher);

/* Takes the other end of a subscriber's SOCK_SEQPACKET socket. The socket belongs to the publisher, also
 * after an error. subscriber may be NULL. */
int shunt_publisher_adopt(shunt_publisher *publisher, int socket, uint64_t *subscriber);

/* Publishes a copy of a message, and stores its number, from 0 on, unless number is NULL. Waits for no
 * subscriber. -EMSGSIZE: more than 64 MiB. -ENOMEM: there is no memory for it. */
int shunt_publish(shunt_publisher *publisher, const void *bytes, size_t len, uint64_t *number);

/* Returns memory for a message of len bytes, which shunt_publisher_commit publishes without a copy, or
 * shunt_give_back gives back. Memory that a subscriber keeps for too long is taken from it. -EBUSY: this
 * process holds all of it. */
int shunt_publisher_loan(shunt_publisher *publisher, size_t len, struct shunt_loaned *loaned);

/* Publishes loaned->len bytes of the memory. -EINVAL: it is from another publisher, or it was sent or made
 * longer. */
int shunt_publisher_commit(shunt_publisher *publisher, struct shunt_loaned *loaned, uint64_t *number);

/* Accepts new subscribers, sends those that are behind what they lack, and notices those that have ended.
 * Returns when there is a subscriber more or less, or when the time is over. attended may be NULL. A
 * publisher that does not publish for a while calls this when shunt_publisher_fd is readable. */
int shunt_attend(shunt_publisher *publisher, struct shunt_attended *attended, int timeout_ms);

/* Attends until no subscriber is behind. -EAGAIN, -ETIMEDOUT: one still is. */
int shunt_flush(shunt_publisher *publisher, int timeout_ms);

/* Returns the number of subscribers, and stores the status of as many as there is room for. */
size_t shunt_subscribers(const shunt_publisher *publisher, struct shunt_subscriber_status *statuses, size_t room);

/* Returns a descriptor for poll: readable when shunt_attend has something to do. */
int shunt_publisher_fd(const shunt_publisher *publisher);

void shunt_publisher_close(shunt_publisher *publisher);

struct shunt_publication {
	uint64_t number; /* of the message, from 0 on */
	uint64_t missed; /* how many messages between the last one that was received and this one were missed */
};

/* Connects to the publisher that listens at path. It is given up if it sends more than max_message bytes;
 * 0 means 64 MiB. */
int shunt_subscribe(const char *path, size_t max_message, int timeout_ms, shunt_subscriber **subscriber);

/* Makes a subscriber over a SOCK_SEQPACKET socket whose other end a publisher has, or will have. The
 * socket belongs to the subscriber, also after an error. */
int shunt_subscriber_over(int socket, shunt_subscriber **subscriber);

/* Receives a copy of the next message. The subscriber owns it until it receives again. publication may be
 * NULL. -EPIPE: the publisher has gone. -EPROTO: it broke the protocol or the limit. */
int shunt_subscriber_receive(shunt_subscriber *subscriber, struct shunt_event *event,
			     struct shunt_publication *publication, int timeout_ms);

/* Receives the next message without a copy if it has more than 2 KiB. The publisher may take its memory
 * back: check shunt_is_intact after the last read. See shunt_borrow. */
int shunt_subscriber_borrow(shunt_subscriber *subscriber, struct shunt_borrowed *borrowed,
			    struct shunt_publication *publication, int timeout_ms);

/* Returns the identity of the publisher, as the kernel recorded it when it began to listen. */
int shunt_publisher_credentials(const shunt_subscriber *subscriber, struct shunt_credentials *credentials);

/* Returns a descriptor for poll: readable when a call that returned -EAGAIN should be tried again. */
int shunt_subscriber_fd(const shunt_subscriber *subscriber);

void shunt_subscriber_close(shunt_subscriber *subscriber);

#ifdef __cplusplus
}
#endif
#endif
