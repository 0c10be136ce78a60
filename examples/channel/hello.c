/* Sends a message and a descriptor: gcc hello.c -lshunt_channel_c && ./a.out /tmp/socket */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <shunt_channel.h>

int main(int argc, char **argv)
{
	shunt_receiver *receiver;
	shunt_sender *sender;
	struct shunt_event event;
	int output = 1, error;

	if (argc < 2 || (error = shunt_listen(argv[1], &receiver)) < 0)
		return 1;
	if ((error = shunt_connect(argv[1], 5000, &sender)) < 0)
		return 1;
	if ((error = shunt_send(sender, "hello", 5, &output, 1, -1)) < 0)
		return 1;
	if ((error = shunt_receive(receiver, &event, 1000)) < 0) {
		fprintf(stderr, "receive: %s\n", strerror(-error));
		return 1;
	}
	/* The bytes and the descriptors belong to the receiver until it receives again. */
	if (write(event.descriptors[0], event.bytes, event.len) != (ssize_t)event.len)
		return 1;
	shunt_sender_close(sender);
	shunt_receiver_close(receiver);
	return 0;
}
