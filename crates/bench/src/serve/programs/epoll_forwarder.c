// The least that a proxy does with epoll and one thread: it parses nothing, has a connection to the
// backend for each client, and does one recv and one send for each piece in either direction.
// Usage: epoll_forwarder PORT BACKEND

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static char bytes[65536];
// The socket that gets what a socket receives, or -1 once one of them has ended.
static int others[65536];

static void watch(int epoll, int socket, int other)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLET, .data.fd = socket };
	int one = 1;

	others[socket] = other;
	setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event);
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(argc > 1 ? atoi(argv[1]) : 0) };
	struct sockaddr_in backend = { .sin_family = AF_INET, .sin_port = htons(argc > 2 ? atoi(argv[2]) : 0) };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), epoll = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = listener }, events[64];

	address.sin_addr.s_addr = backend.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 64))
		return 1;
	epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
	for (;;) {
		int count = epoll_wait(epoll, events, 64, -1);

		for (int at = 0; at < count; at++) {
			int from = events[at].data.fd;
			ssize_t got;

			if (from == listener) {
				int client = accept(listener, NULL, NULL), to = socket(AF_INET, SOCK_STREAM, 0);

				if (connect(to, (struct sockaddr *)&backend, sizeof(backend)))
					return 1;
				watch(epoll, client, to);
				watch(epoll, to, client);
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
