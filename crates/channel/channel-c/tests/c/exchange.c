/* Two processes: the child sends a large message with two descriptors. The parent receives it and
 * writes to both descriptors. */
#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shunt_channel.h"

#define LEN ((size_t)5 << 20)

static void check(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "%s: %s\n", what, strerror(-result));
		exit(1);
	}
}

static void send_all(const char *path)
{
	unsigned char *bytes = malloc(LEN), answer[2];
	shunt_sender *sender;
	int one[2], two[2];

	for (size_t at = 0; at < LEN; at++)
		bytes[at] = at * 7;
	assert(pipe(one) == 0 && pipe(two) == 0);
	check(shunt_connect(path, 5000, &sender), "connect");
	check(shunt_send(sender, "hello", 5, NULL, 0, -1), "send");
	int passed[2] = { one[1], two[1] };
	check(shunt_send(sender, bytes, LEN, passed, 2, 20000), "send");
	assert(read(one[0], answer, 1) == 1 && read(two[0], answer + 1, 1) == 1);
	assert(answer[0] == '1' && answer[1] == '2');
	assert(shunt_send(sender, bytes, SHUNT_CHANNEL_MAX_MESSAGE + 1, NULL, 0, -1) == -EMSGSIZE);
	int bad = -1;
	assert(shunt_send(sender, "x", 1, &bad, 1, -1) == -EBADF);
	shunt_sender_close(sender);
	free(bytes);
	exit(0);
}

int main(int argc, char **argv)
{
	struct shunt_event event;
	shunt_receiver *receiver;
	int status;

	assert(argc == 2);
	check(shunt_listen(argv[1], &receiver), "listen");
	assert(shunt_receive(receiver, &event, 0) == -EAGAIN);
	assert(shunt_receive(receiver, &event, 10) == -ETIMEDOUT);
	pid_t child = fork();
	if (child == 0)
		send_all(argv[1]);
	struct pollfd poll_fd = { .fd = shunt_receiver_fd(receiver), .events = POLLIN };
	assert(poll(&poll_fd, 1, 20000) == 1);

	check(shunt_receive(receiver, &event, 20000), "receive");
	assert(event.ended == 0 && event.len == 5 && memcmp(event.bytes, "hello", 5) == 0 && event.count == 0);
	check(shunt_receive(receiver, &event, 20000), "receive");
	assert(event.ended == 0 && event.len == LEN && event.count == 2);
	for (size_t at = 0; at < LEN; at++)
		assert(((const unsigned char *)event.bytes)[at] == (unsigned char)(at * 7));
	assert(write(event.descriptors[0], "1", 1) == 1);
	int taken = shunt_take_descriptor(receiver, 1);
	check(taken, "take");
	assert(shunt_take_descriptor(receiver, 1) == -EBADF && shunt_take_descriptor(receiver, 2) == -EBADF);
	assert(write(taken, "2", 1) == 1 && close(taken) == 0);

	check(shunt_receive(receiver, &event, 20000), "receive");
	assert(event.ended == 1 && event.len == 0);
	shunt_receiver_close(receiver);
	assert(waitpid(child, &status, 0) == child && status == 0);

	shunt_sender *sender;
	check(shunt_pair(&sender, &receiver), "pair");
	check(shunt_send(sender, NULL, 0, NULL, 0, 0), "send");
	check(shunt_receive(receiver, &event, 0), "receive");
	assert(event.ended == 0 && event.len == 0 && event.count == 0 && shunt_sender_fd(sender) >= 0);
	shunt_receiver_close(receiver);
	shunt_sender_close(sender);
	puts("whole");
	return 0;
}
