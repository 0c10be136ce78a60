/* Connections on which one thread sends while another receives, from the first byte: both_ways
 * PORT COUNT. */
#include <arpa/inet.h>
#include <err.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MESSAGES = 600 };

static void no_delay(int socket)
{
	int one = 1;

	setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static void *echo(void *argument)
{
	int socket = (int)(intptr_t)argument;
	char bytes[64];
	ssize_t count;

	no_delay(socket);
	while ((count = recv(socket, bytes, sizeof bytes, 0)) > 0)
		if (send(socket, bytes, (size_t)count, 0) != count)
			err(1, "send");
	close(socket);
	return NULL;
}

static void start(pthread_t *thread, void *(*runs)(void *), int socket)
{
	if (pthread_create(thread, NULL, runs, (void *)(intptr_t)socket))
		errx(1, "no thread");
}

static void *serve(void *argument)
{
	for (;;) {
		int socket = accept((int)(intptr_t)argument, NULL, NULL);
		pthread_t thread;

		if (socket < 0)
			err(1, "accept");
		start(&thread, echo, socket);
		pthread_detach(thread);
	}
}

static void *send_all(void *argument)
{
	for (int sent = 0; sent < MESSAGES; sent++)
		if (send((int)(intptr_t)argument, "x", 1, 0) != 1)
			err(1, "send");
	return NULL;
}

static void connection(const struct sockaddr_in *address)
{
	int client = socket(AF_INET, SOCK_STREAM, 0);
	pthread_t sender;
	char bytes[64];

	if (connect(client, (const void *)address, sizeof *address))
		err(1, "connect");
	no_delay(client);
	start(&sender, send_all, client);
	for (ssize_t got = 0, count; got < MESSAGES; got += count)
		if ((count = recv(client, bytes, sizeof bytes, 0)) <= 0)
			err(1, "recv");
	pthread_join(sender, NULL);
	shutdown(client, SHUT_WR);
	if (recv(client, bytes, sizeof bytes, 0) != 0)
		errx(1, "more than was sent");
	close(client);
}

int main(int count, char **words)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	pthread_t server;

	if (count != 3)
		errx(1, "PORT COUNT");
	address.sin_port = htons((uint16_t)atoi(words[1]));
	if (bind(listener, (void *)&address, sizeof address) || listen(listener, 100))
		err(1, "listen");
	start(&server, serve, listener);
	for (int left = atoi(words[2]); left > 0; left--)
		connection(&address);
	puts("done");
	return 0;
}
