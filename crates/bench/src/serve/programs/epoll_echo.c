// A plain echo server with epoll and one thread. Usage: epoll_echo PORT

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static char bytes[65536];

// Blocks while the client does not read, like a minimal echo server.
static int send_all(int client, const char *from, ssize_t length)
{
	while (length > 0) {
		ssize_t sent = send(client, from, length, MSG_NOSIGNAL);

		if (sent < 0)
			return -1;
		from += sent;
		length -= sent;
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(argc > 1 ? atoi(argv[1]) : 0) };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), epoll = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = listener }, events[64];

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 64))
		return 1;
	epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
	for (;;) {
		int count = epoll_wait(epoll, events, 64, -1);

		for (int at = 0; at < count; at++) {
			int client = events[at].data.fd;
			ssize_t length;

			if (client == listener) {
				client = accept(listener, NULL, NULL);
				setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
				event.data.fd = client;
				epoll_ctl(epoll, EPOLL_CTL_ADD, client, &event);
				continue;
			}
			length = recv(client, bytes, sizeof(bytes), MSG_DONTWAIT);
			if (length < 0 && errno == EAGAIN)
				continue;
			if (length <= 0 || send_all(client, bytes, length))
				close(client);
		}
	}
}
