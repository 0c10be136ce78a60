/* A publisher and a subscriber in one event loop: gcc event-loop.c -lshunt_channel_c && ./a.out /tmp/socket */
#include <errno.h>
#include <sys/epoll.h>
#include <unistd.h>
#include <shunt_channel.h>

int main(int argc, char **argv)
{
	struct epoll_event event = { .events = EPOLLIN };
	struct shunt_publication publication;
	struct shunt_event message;
	shunt_publisher *publisher;
	shunt_subscriber *subscriber;
	int loop = epoll_create1(EPOLL_CLOEXEC), error = -EAGAIN;

	if (argc < 2 || shunt_publisher_listen(argv[1], NULL, &publisher) < 0)
		return 1;
	if (shunt_subscribe(argv[1], 0, 1000, &subscriber) < 0)
		return 1;
	event.data.u32 = 1;
	epoll_ctl(loop, EPOLL_CTL_ADD, shunt_publisher_fd(publisher), &event);
	event.data.u32 = 2;
	epoll_ctl(loop, EPOLL_CTL_ADD, shunt_subscriber_fd(subscriber), &event);
	while (error == -EAGAIN) {
		struct shunt_attended attended = { 0 };

		/* Before the first sleep, and after each: receive until -EAGAIN. */
		error = shunt_subscriber_receive(subscriber, &message, &publication, 0);
		if (error != -EAGAIN || epoll_wait(loop, &event, 1, -1) < 1)
			break;
		if (event.data.u32 == 1 && shunt_attend(publisher, &attended, 0) == 0 && attended.joined > 0)
			shunt_publish(publisher, "hello", 5, NULL);
	}
	if (error < 0 || write(1, message.bytes, message.len) != (ssize_t)message.len)
		return 1;
	shunt_subscriber_close(subscriber);
	shunt_publisher_close(publisher);
	return 0;
}
