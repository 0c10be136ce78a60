// A plain echo server with epoll and one thread. Usage: epoll_echo PORT

#include "epoll.h"

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
	int epoll = epoll_create1(0), listener = listen_at(argc > 1 ? argv[1] : NULL, epoll);
	struct epoll_event events[64];

	if (listener < 0)
		return 1;
	for (;;) {
		int count = epoll_wait(epoll, events, 64, -1);

		for (int at = 0; at < count; at++) {
			int client = events[at].data.fd;
			ssize_t length;

			if (client == listener) {
				watch(epoll, accept(listener, NULL, NULL), EPOLLIN);
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
