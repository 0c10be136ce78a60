// The least that a server of constant answers does with epoll and one thread: one recv and one send
// for each message. Usage: epoll_constant PORT FILE, whose content is the answer.

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static char answer[65536], message[65536];

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(argc > 1 ? atoi(argv[1]) : 0) };
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), epoll = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = listener }, events[64];
	ssize_t length = argc > 2 ? read(open(argv[2], O_RDONLY), answer, sizeof(answer)) : 0;

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (length <= 0 || bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 64))
		return 1;
	epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
	for (;;) {
		int count = epoll_wait(epoll, events, 64, -1);

		for (int at = 0; at < count; at++) {
			int client = events[at].data.fd;
			ssize_t got;

			if (client == listener) {
				client = accept(listener, NULL, NULL);
				setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
				event.events = EPOLLIN | EPOLLET;
				event.data.fd = client;
				epoll_ctl(epoll, EPOLL_CTL_ADD, client, &event);
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
