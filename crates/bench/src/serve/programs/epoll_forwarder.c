// The least that a proxy does with epoll and one thread: it parses nothing, has a connection to the
// backend for each client, and does one recv and one send for each piece in either direction.
// Usage: epoll_forwarder PORT BACKEND

#include "epoll.h"

static char bytes[65536];
// The socket that gets what a socket receives, or -1 once one of them has ended.
static int others[65536];

static void forward(int epoll, int from, int to)
{
	others[from] = to;
	watch(epoll, from, EPOLLIN | EPOLLET);
}

int main(int argc, char **argv)
{
	struct sockaddr_in backend = loopback(argc > 2 ? argv[2] : NULL);
	int epoll = epoll_create1(0), listener = listen_at(argc > 1 ? argv[1] : NULL, epoll);
	struct epoll_event events[64];

	if (listener < 0)
		return 1;
	for (;;) {
		int count = epoll_wait(epoll, events, 64, -1);

		for (int at = 0; at < count; at++) {
			int from = events[at].data.fd;
			ssize_t got;

			if (from == listener) {
				int client = accept(listener, NULL, NULL), to = socket(AF_INET, SOCK_STREAM, 0);

				if (connect(to, (struct sockaddr *)&backend, sizeof(backend)))
					return 1;
				forward(epoll, client, to);
				forward(epoll, to, client);
				continue;
			}
			if (others[from] < 0)
				continue;
			got = recv(from, bytes, sizeof(bytes), MSG_DONTWAIT);
			if (got < 0 && errno == EAGAIN)
				continue;
			// Nothing is closed, so no number is used twice: the process ends with the measurement.
			if (got <= 0 || send(others[from], bytes, got, MSG_NOSIGNAL) != got) {
				shutdown(from, SHUT_RDWR);
				shutdown(others[from], SHUT_RDWR);
				others[others[from]] = -1;
				others[from] = -1;
			}
		}
	}
}
