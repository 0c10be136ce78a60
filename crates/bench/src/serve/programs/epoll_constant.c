// The least that a server of constant answers does with epoll and one thread: one recv and one send
// for each message. Usage: epoll_constant PORT FILE, whose content is the answer.

#include <fcntl.h>

#include "epoll.h"

static char answer[65536], message[65536];

int main(int argc, char **argv)
{
	int epoll = epoll_create1(0), listener = listen_at(argc > 1 ? argv[1] : NULL, epoll);
	struct epoll_event events[64];
	ssize_t length = argc > 2 ? read(open(argv[2], O_RDONLY), answer, sizeof(answer)) : 0;

	if (length <= 0 || listener < 0)
		return 1;
	for (;;) {
		int count = epoll_wait(epoll, events, 64, -1);

		for (int at = 0; at < count; at++) {
			int client = events[at].data.fd;
			ssize_t got;

			if (client == listener) {
				watch(epoll, accept(listener, NULL, NULL), EPOLLIN | EPOLLET);
				continue;
			}
			got = recv(client, message, sizeof(message), MSG_DONTWAIT);
			if (got < 0 && errno == EAGAIN)
				continue;
			if (got <= 0 || send(client, answer, length, MSG_NOSIGNAL) != length)
				close(client);
		}
	}
}
