/* Requests and responses, publishers and subscribers, between two processes. */
#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shunt_channel.h"

#define LEN ((size_t)1 << 20)
#define ROUNDS 20

static void check(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "%s: %s\n", what, strerror(-result));
		exit(1);
	}
}

static void ask(const char *path)
{
	struct shunt_numbered response;
	shunt_client *client;
	uint64_t numbers[3];
	int output = 1;

	check(shunt_client_connect(path, NULL, 20000, &client), "connect");
	check(shunt_call(client, "ping", 4, &output, 1, &response, 20000), "call");
	assert(response.number == 1 && response.len == 4 && memcmp(response.bytes, "gnip", 4) == 0);
	assert(response.count == 1);
	check(close(shunt_take_response_descriptor(client, 0)), "close");
	assert(shunt_take_response_descriptor(client, 0) == -EBADF);
	for (int at = 0; at < 3; at++)
		check(shunt_request(client, "later", 5, NULL, 0, &numbers[at], 20000), "request");
	for (int at = 2; at >= 0; at--) {
		check(shunt_response(client, &response, 20000), "response");
		assert(response.number == numbers[at]);
	}
	assert(shunt_response(client, &response, 0) == -EAGAIN);
	assert(shunt_call(client, "silence", 7, NULL, 0, &response, 10) == -ETIMEDOUT);
	shunt_client_close(client);
	exit(0);
}

static void calls(const char *path)
{
	struct shunt_numbered request, first;
	struct shunt_credentials credentials;
	char answer[4];
	uint64_t numbers[3];
	shunt_server *server;
	shunt_client *client;
	int status, gone;

	check(shunt_serve(path, NULL, NULL, &server), "serve");
	assert(shunt_server_receive(server, &request, 0) == -EAGAIN);
	pid_t child = fork();
	if (child == 0)
		ask(path);
	struct pollfd ready = { .fd = shunt_server_fd(server), .events = POLLIN };
	while (shunt_server_receive(server, &request, 0) == -EAGAIN)
		assert(poll(&ready, 1, 20000) == 1);
	for (int at = 0; at < 4; at++)
		answer[at] = ((const char *)request.bytes)[3 - at];
	assert(request.number == 1 && request.count == 1);
	check(shunt_client_credentials(server, request.client, &credentials), "credentials");
	assert(credentials.pid == child && credentials.uid == getuid());
	first = request;
	int taken = shunt_take_request_descriptor(server, 0);
	check(taken, "take");
	check(shunt_respond(server, request.client, request.number, answer, 4, &taken, 1, 0), "respond");
	close(taken);
	for (int at = 0; at < 3; at++) {
		check(shunt_server_receive(server, &request, 20000), "receive");
		numbers[at] = request.number;
	}
	for (int at = 2; at >= 0; at--)
		check(shunt_respond(server, request.client, numbers[at], "", 0, NULL, 0, 0), "respond");
	check(shunt_server_receive(server, &request, 20000), "receive");
	assert(waitpid(child, &status, 0) == child && status == 0);
	/* The client has gone. That is counted, and others are served. */
	for (gone = 0; gone != -EPIPE;)
		gone = shunt_respond(server, first.client, request.number, "late", 4, NULL, 0, 0);
	assert(shunt_unanswered(server) == 1);
	check(shunt_client_connect(path, NULL, 20000, &client), "connect");
	check(shunt_request(client, "?", 1, NULL, 0, NULL, -1), "request");
	check(shunt_server_receive(server, &request, 20000), "receive");
	assert(request.client != first.client);
	check(shunt_respond(server, request.client, request.number, "!", 1, NULL, 0, 0), "respond");
	check(shunt_response(client, &request, 20000), "response");
	assert(request.len == 1);
	shunt_server_close(server);
	assert(shunt_response(client, &request, 20000) == -EPIPE);
	shunt_client_close(client);
	assert(shunt_serve(NULL, NULL, NULL, &server) == -EFAULT);
	assert(shunt_call(NULL, "", 0, NULL, 0, &request, 0) == -EFAULT);
}

static void subscribe(const char *path)
{
	struct shunt_publication publication;
	struct shunt_credentials credentials;
	struct shunt_borrowed borrowed;
	shunt_subscriber *subscriber;
	uint64_t next = 0;

	check(shunt_subscribe(path, 0, 20000, &subscriber), "subscribe");
	check(shunt_publisher_credentials(subscriber, &credentials), "credentials");
	assert(credentials.pid == getppid());
	for (int round = 0; round < ROUNDS; round++) {
		check(shunt_subscriber_borrow(subscriber, &borrowed, &publication, 20000), "borrow");
		assert(publication.number == next && publication.missed == 0);
		assert(borrowed.may_change && borrowed.event.len == LEN - round && borrowed.event.ended == 0);
		assert(((const unsigned char *)borrowed.event.bytes)[LEN - round - 1] == round);
		assert(shunt_is_intact(&borrowed));
		shunt_release(&borrowed);
		assert(!shunt_is_intact(&borrowed));
		next++;
	}
	struct shunt_event event;
	check(shunt_subscriber_receive(subscriber, &event, &publication, 20000), "receive");
	assert(event.len == 3 && memcmp(event.bytes, "end", 3) == 0 && publication.number == next);
	assert(shunt_subscriber_receive(subscriber, &event, NULL, 20000) == -EPIPE);
	shunt_subscriber_close(subscriber);
	exit(0);
}

static void publications(const char *path)
{
	struct shunt_publisher_options options = { .size = sizeof(options), .history = 2 }, odd = { .size = 1 };
	struct shunt_subscriber_status statuses[3];
	struct shunt_attended attended;
	struct shunt_loaned loaned;
	shunt_publisher *publisher;
	uint64_t number, joined = 0;
	int status;

	assert(shunt_publisher_listen(path, &odd, &publisher) == -EINVAL);
	check(shunt_publisher_listen(path, &options, &publisher), "listen");
	for (int at = 0; at < 2; at++)
		if (fork() == 0)
			subscribe(path);
	/* As a program with an event loop. */
	int loop = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = { .events = EPOLLIN };
	assert(epoll_ctl(loop, EPOLL_CTL_ADD, shunt_publisher_fd(publisher), &event) == 0);
	while (joined < 2) {
		assert(epoll_wait(loop, &event, 1, 20000) == 1);
		check(shunt_attend(publisher, &attended, 0), "attend");
		joined += attended.joined;
	}
	close(loop);
	for (int round = 0; round < ROUNDS; round++) {
		check(shunt_publisher_loan(publisher, LEN, &loaned), "loan");
		memset(loaned.bytes, round, LEN);
		loaned.len = LEN - round;
		check(shunt_publisher_commit(publisher, &loaned, &number), "commit");
		assert(loaned.loan == NULL && number == (uint64_t)round);
		assert(shunt_publisher_commit(publisher, &loaned, &number) == -EINVAL);
		check(shunt_flush(publisher, 20000), "flush");
	}
	check(shunt_publish(publisher, "end", 3, NULL), "publish");
	check(shunt_flush(publisher, 20000), "flush");
	assert(shunt_subscribers(publisher, NULL, 0) == 2 && shunt_subscribers(publisher, statuses, 3) == 2);
	assert(statuses[0].missed == 0 && statuses[1].revoked == 0 && !statuses[1].is_behind);
	assert(statuses[0].credentials.uid == getuid());
	shunt_publisher_close(publisher);
	for (int at = 0; at < 2; at++)
		assert(wait(&status) > 0 && status == 0);
}

/* A slow subscriber in this process. */
static void gap(void)
{
	struct shunt_publication publication;
	struct shunt_event event;
	shunt_publisher *publisher;
	shunt_subscriber *subscriber;
	uint64_t id, last = 0, missed = 0;
	int pair[2];

	assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
	check(shunt_publisher_listen(NULL, NULL, &publisher), "publisher");
	check(shunt_publisher_adopt(publisher, pair[0], &id), "adopt");
	check(shunt_subscriber_over(pair[1], &subscriber), "over");
	for (int at = 0; at < 1000; at++)
		check(shunt_publish(publisher, &pair, sizeof(pair), NULL), "publish");
	for (char large[1500] = { 0 }; last < 1000; last++)
		check(shunt_publish(publisher, large, sizeof(large), NULL), "publish");
	assert(shunt_flush(publisher, 0) == -EAGAIN);
	while (shunt_subscriber_receive(subscriber, &event, &publication, 0) == 0)
		missed += publication.missed;
	assert(missed == 0);
	check(shunt_publish(publisher, "!", 1, NULL), "publish");
	check(shunt_subscriber_receive(subscriber, &event, &publication, 0), "receive");
	assert(publication.number == 2000 && publication.missed > 100 && event.len == 1);
	shunt_publisher_close(publisher);
	shunt_subscriber_close(subscriber);
}

int main(int argc, char **argv)
{
	assert(argc == 2);
	calls(argv[1]);
	publications(argv[1]);
	gap();
	puts("many");
	return 0;
}
