/* Loans between two processes, and everything else that a C program can do as a Rust program can. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "shunt_channel.h"

#define LEN ((size_t)8 << 20)
#define ROUNDS 20

static void check(int result, const char *what)
{
	if (result < 0) {
		fprintf(stderr, "%s: %s\n", what, strerror(-result));
		exit(1);
	}
}

static void send_all(const char *path)
{
	struct shunt_sender_options options = { .size = sizeof(options), .ring_bytes = 65536 };
	struct shunt_loaned loaned;
	shunt_sender *sender;
	int output = 1;

	check(shunt_connect_with(path, &options, 20000, &sender), "connect");
	for (int round = 0; round < ROUNDS; round++) {
		check(shunt_loan(sender, LEN, &loaned, 20000), "loan");
		assert(loaned.len == LEN);
		memset(loaned.bytes, round, LEN);
		loaned.len = LEN - round;
		check(shunt_commit(sender, &loaned, &output, round % 2, 20000), "commit");
		assert(loaned.loan == NULL && loaned.len == 0);
		assert(shunt_commit(sender, &loaned, NULL, 0, 0) == -EINVAL);
	}
	struct iovec pieces[] = { { "in ", 3 }, { NULL, 0 }, { "pieces", 6 } };
	check(shunt_send_gathered(sender, pieces, 3, NULL, 0, -1), "gathered");
	int memory = memfd_create("message", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert(write(memory, "sealed", 6) == 6);
	assert(shunt_send_memory(sender, memory, NULL, 0, -1) == -EINVAL);
	assert(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) == 0);
	check(shunt_send_memory(sender, memory, NULL, 0, -1), "memory");
	shunt_sender_close(sender);
	exit(0);
}

static void two_processes(const char *path)
{
	struct shunt_receiver_options options = { .size = sizeof(options), .max_senders = 1, .mode = 0640 };
	struct shunt_credentials credentials;
	struct shunt_borrowed borrowed, kept;
	shunt_receiver *receiver;
	struct stat stat;
	int status;

	check(shunt_listen_with(path, &options, &receiver), "listen");
	assert(lstat(path, &stat) == 0 && (stat.st_mode & 0777) == 0640);
	assert(shunt_borrow(receiver, &borrowed, 0) == -EAGAIN);
	pid_t child = fork();
	if (child == 0)
		send_all(path);
	for (int round = 0; round < ROUNDS; round++) {
		check(shunt_borrow(receiver, &borrowed, 20000), "borrow");
		assert(borrowed.event.ended == 0 && borrowed.event.len == LEN - round && borrowed.may_change);
		const unsigned char *bytes = borrowed.event.bytes;
		assert(bytes[0] == round && bytes[borrowed.event.len - 1] == round);
		assert(borrowed.event.count == (size_t)(round % 2));
		if (round % 2)
			check(close(shunt_take_borrowed_descriptor(&borrowed, 0)), "close");
		assert(shunt_take_borrowed_descriptor(&borrowed, 0) == -EBADF);
		/* Two at a time. */
		if (round > 0)
			shunt_release(&kept);
		kept = borrowed;
	}
	check(shunt_sender_credentials(receiver, kept.event.sender, &credentials), "credentials");
	assert(credentials.pid == child && credentials.uid == getuid());
	shunt_release(&kept);
	shunt_release(&kept);
	check(shunt_borrow(receiver, &borrowed, 20000), "borrow");
	assert(borrowed.event.len == 9 && memcmp(borrowed.event.bytes, "in pieces", 9) == 0 && !borrowed.may_change);
	shunt_release(&borrowed);
	check(shunt_borrow(receiver, &borrowed, 20000), "borrow");
	assert(borrowed.event.len == 6 && memcmp(borrowed.event.bytes, "sealed", 6) == 0);
	shunt_release(&borrowed);
	check(shunt_borrow(receiver, &borrowed, 20000), "borrow");
	assert(borrowed.event.ended == 1 && borrowed.event.len == 0);
	shunt_release(&borrowed);
	assert(shunt_sender_credentials(receiver, borrowed.event.sender, &credentials) == -ESRCH);
	shunt_receiver_close(receiver);
	assert(waitpid(child, &status, 0) == child && status == 0);
}

static void sockets_of_the_caller(void)
{
	struct shunt_sender_options odd = { .size = sizeof(odd), .ring_bytes = 5000 }, other = { .size = 1 };
	struct shunt_loaned one, two[5];
	shunt_receiver *receiver;
	shunt_sender *sender;
	uint64_t id = 99;
	int pair[2];

	assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair) == 0);
	check(shunt_listen_with(NULL, NULL, &receiver), "receiver");
	check(shunt_adopt(receiver, pair[0], &id), "adopt");
	assert(id == 0);
	assert(shunt_sender_over(dup(pair[1]), &odd, &sender) == -EINVAL);
	assert(shunt_sender_over(dup(pair[1]), &other, &sender) == -EINVAL);
	check(shunt_sender_over(pair[1], NULL, &sender), "sender");
	assert(shunt_loan(sender, SHUNT_CHANNEL_MAX_MESSAGE + 1, &one, 0) == -EMSGSIZE);
	check(shunt_loan(sender, 100, &one, 0), "loan");
	one.len = 101;
	assert(shunt_commit(sender, &one, NULL, 0, 0) == -EINVAL && one.len == 100 && one.loan != NULL);
	shunt_give_back(&one);
	shunt_give_back(&one);
	for (int at = 0; at < 4; at++)
		check(shunt_loan(sender, 1 << 20, &two[at], 0), "loan");
	assert(shunt_loan(sender, 1 << 20, &two[4], -1) == -EBUSY);
	for (int at = 0; at < 4; at++)
		shunt_give_back(&two[at]);
	assert(shunt_loan(NULL, 1, &one, 0) == -EFAULT && shunt_borrow(receiver, NULL, 0) == -EFAULT);
	shunt_sender_close(sender);
	shunt_receiver_close(receiver);
}

int main(int argc, char **argv)
{
	assert(argc == 2);
	two_processes(argv[1]);
	sockets_of_the_caller();
	puts("lent");
	return 0;
}
