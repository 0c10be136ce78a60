// The thesis's forwarder in user space: libevent, with one send for each message. Framed messages
// of `service Forwarder { oneway void msg(1: i32 key, 2: string payload) }` go to the sink of their
// key. Usage: libevent_forwarder PORT FIRST_SINK_PORT SINKS

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define MOST 256
// Bytes queued for a sink at which its clients must wait.
#define HIGH (256 * 1024)
// The offset of the key: frame length, version and kind, name with its length, sequence number,
// head of the first field.
#define KEY (4 + 4 + 4 + 3 + 4 + 3)

static struct event_base *base;
static struct bufferevent *sinks[MOST], *clients[MOST];
static int sink_count, client_count;

static uint32_t number(const unsigned char *bytes)
{
	return (uint32_t)bytes[0] << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
}

static void all_clients(int on)
{
	for (int at = 0; at < client_count; at++)
		on ? bufferevent_enable(clients[at], EV_READ) : bufferevent_disable(clients[at], EV_READ);
}

static void forward(struct bufferevent *sink, unsigned char *message, size_t length)
{
	struct evbuffer *waiting = bufferevent_get_output(sink);
	ssize_t sent = 0;

	if (!evbuffer_get_length(waiting))
		sent = send(bufferevent_getfd(sink), message, length, MSG_DONTWAIT | MSG_NOSIGNAL);
	if (sent < 0)
		sent = 0;
	if ((size_t)sent < length)
		bufferevent_write(sink, message + sent, length - sent);
	if (evbuffer_get_length(waiting) > HIGH)
		all_clients(0);
}

static void readable(struct bufferevent *client, void *unused)
{
	struct evbuffer *input = bufferevent_get_input(client);
	unsigned char head[KEY + 4];

	while (evbuffer_copyout(input, head, sizeof(head)) == sizeof(head)) {
		size_t length = 4 + number(head);

		if (evbuffer_get_length(input) < length)
			break;
		forward(sinks[number(head + KEY) % sink_count], evbuffer_pullup(input, length), length);
		evbuffer_drain(input, length);
	}
}

static void written(struct bufferevent *sink, void *unused)
{
	all_clients(1);
}

static void event(struct bufferevent *client, short what, void *unused)
{
	if (!(what & (BEV_EVENT_EOF | BEV_EVENT_ERROR)))
		return;
	for (int at = 0; at < client_count; at++)
		if (clients[at] == client)
			clients[at] = clients[--client_count];
	bufferevent_free(client);
}

static void accepted(struct evconnlistener *listener, evutil_socket_t fd, struct sockaddr *from, int length, void *unused)
{
	struct bufferevent *client = bufferevent_socket_new(base, fd, BEV_OPT_CLOSE_ON_FREE);

	if (client_count == MOST)
		return bufferevent_free(client);
	clients[client_count++] = client;
	bufferevent_setcb(client, readable, NULL, event, NULL);
	bufferevent_enable(client, EV_READ);
}

static int connect_to(int port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)))
		exit(1);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	evutil_make_socket_nonblocking(fd);
	return fd;
}

int main(int argc, char **argv)
{
	struct sockaddr_in address = { .sin_family = AF_INET };

	if (argc < 4 || (sink_count = atoi(argv[3])) > MOST)
		return 2;
	signal(SIGPIPE, SIG_IGN);
	base = event_base_new();
	for (int at = 0; at < sink_count; at++) {
		sinks[at] = bufferevent_socket_new(base, connect_to(atoi(argv[2]) + at), BEV_OPT_CLOSE_ON_FREE);
		bufferevent_setcb(sinks[at], NULL, written, NULL, NULL);
		bufferevent_enable(sinks[at], EV_WRITE);
	}
	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	address.sin_port = htons(atoi(argv[1]));
	if (!evconnlistener_new_bind(base, accepted, NULL, LEV_OPT_REUSEABLE | LEV_OPT_CLOSE_ON_FREE, 64,
				     (struct sockaddr *)&address, sizeof(address)))
		return 1;
	return event_base_dispatch(base);
}
