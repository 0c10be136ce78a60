// What the plain servers of the comparison have in common.

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static struct sockaddr_in loopback(const char *port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port ? atoi(port) : 0) };

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return address;
}

// Returns a listener on the port, which the epoll instance watches, or -1.
static int listen_at(const char *port, int epoll)
{
	struct sockaddr_in address = loopback(port);
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = listener };

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 64))
		return -1;
	return epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event) ? -1 : listener;
}

// Watches a connection, which sends without delay.
static void watch(int epoll, int connection, unsigned events)
{
	struct epoll_event event = { .events = events, .data.fd = connection };
	int one = 1;

	setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	epoll_ctl(epoll, EPOLL_CTL_ADD, connection, &event);
}
