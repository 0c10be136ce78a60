/* Connections of one exchange, one after another, with both ends in one thread. The measured
 * calls have separate functions, which a profiler finds by name. All other work happens outside
 * of them.
 *
 * The first argument is the number of connections. The second is "set" if the server registers
 * them in an epoll instance, "plain" if not, and "stays" for a single connection with that
 * number of exchanges. "select" and "poll" make that number of calls on many connections, one of
 * which is readable. "server" and "client" are the two ends of one connection in two
 * processes. The server counts after a long conversation, and the third argument is the port. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { LENGTH = 64, BACKLOG = 8, LONG_EXCHANGES = 20000, LONG_SECONDS = 4, WATCHED = 100 };

static char message[LENGTH], buffer[4096];
static struct sockaddr_in address = { .sin_family = AF_INET };

static void check(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        exit(1);
    }
}

__attribute__((noinline)) int measured_client_begins(void)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(!connect(fd, (struct sockaddr *)&address, sizeof address), "connect");
    check(send(fd, message, LENGTH, 0) == LENGTH, "send");
    return fd;
}

__attribute__((noinline)) void measured_client_ends(int fd)
{
    check(recv(fd, buffer, sizeof buffer, 0) == LENGTH, "recv");
    check(!close(fd), "close");
}

static void answer(int fd)
{
    check(recv(fd, buffer, sizeof buffer, 0) == LENGTH, "recv");
    check(send(fd, message, LENGTH, 0) == LENGTH, "send");
}

static void end(int fd)
{
    check(recv(fd, buffer, sizeof buffer, 0) == 0, "recv of the end");
    check(!close(fd), "close");
}

__attribute__((noinline)) int measured_server_answers(int listener)
{
    int fd = accept(listener, NULL, NULL);
    check(fd >= 0, "accept");
    answer(fd);
    return fd;
}

__attribute__((noinline)) void measured_server_ends(int fd)
{
    end(fd);
}

static void wait_for(int set, int fd)
{
    struct epoll_event event;
    check(epoll_wait(set, &event, 1, -1) == 1 && event.data.fd == fd, "epoll_wait");
}

__attribute__((noinline)) int measured_set_answers(int set, int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    check(fd >= 0, "accept4");
    struct epoll_event event = { .events = EPOLLIN, .data.fd = fd };
    check(!epoll_ctl(set, EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
    wait_for(set, fd);
    answer(fd);
    return fd;
}

__attribute__((noinline)) void measured_set_ends(int set, int fd)
{
    wait_for(set, fd);
    check(!epoll_ctl(set, EPOLL_CTL_DEL, fd, NULL), "epoll_ctl");
    end(fd);
}

__attribute__((noinline)) void measured_stay(int set, int fd)
{
    wait_for(set, fd);
    answer(fd);
}

static void exchange(int set, int listener, int left)
{
    int client = measured_client_begins(), server = measured_set_answers(set, listener);
    check(recv(client, buffer, sizeof buffer, 0) == LENGTH, "recv");
    for (; left > 0; left--) {
        check(send(client, message, LENGTH, 0) == LENGTH, "send");
        measured_stay(set, server);
        check(recv(client, buffer, sizeof buffer, 0) == LENGTH, "recv");
    }
}

/* Both arrays lie within one page each, because the library checks each page that they touch. */
static struct pollfd watched[WATCHED] __attribute__((aligned(1024)));
static fd_set watched_set __attribute__((aligned(128)));

__attribute__((noinline)) void measured_select(int count, fd_set *set)
{
    check(select(count, set, NULL, NULL, NULL) == 1, "select");
}

__attribute__((noinline)) void measured_poll(void)
{
    check(poll(watched, WATCHED, -1) == 1, "poll");
}

static void watch(int listener, int left, int selects)
{
    int last = 0;
    for (int one = 0; one < WATCHED; one++) {
        int client = socket(AF_INET, SOCK_STREAM, 0);
        check(!connect(client, (struct sockaddr *)&address, sizeof address), "connect");
        int server = accept(listener, NULL, NULL);
        check(server >= 0, "accept");
        if (one == 0)
            check(send(server, message, LENGTH, 0) == LENGTH, "send");
        watched[one] = (struct pollfd) { .fd = client, .events = POLLIN };
        last = client > last ? client : last;
    }
    for (; left > 0; left--) {
        if (!selects) {
            measured_poll();
            continue;
        }
        FD_ZERO(&watched_set);
        for (int one = 0; one < WATCHED; one++)
            FD_SET(watched[one].fd, &watched_set);
        measured_select(last + 1, &watched_set);
    }
}

static void serve(int set, int listener, int left)
{
    int fd = measured_set_answers(set, listener);
    time_t begin = time(NULL);
    for (int done = 0; done < LONG_EXCHANGES || time(NULL) - begin < LONG_SECONDS; done++) {
        wait_for(set, fd);
        answer(fd);
    }
    for (; left > 0; left--)
        measured_stay(set, fd);
}

static void ask(void)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    while (connect(fd, (struct sockaddr *)&address, sizeof address)) {
        close(fd);
        usleep(10000);
        fd = socket(AF_INET, SOCK_STREAM, 0);
    }
    while (send(fd, message, LENGTH, MSG_NOSIGNAL) == LENGTH && recv(fd, buffer, LENGTH, MSG_WAITALL) == LENGTH)
        ;
}

int main(int count, char **arguments)
{
    check(count >= 3, "how many, of which kind, and by which port?");
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(count > 3 ? atoi(arguments[3]) : 0);
    if (!strcmp(arguments[2], "client")) {
        ask();
        return 0;
    }
    int listener = socket(AF_INET, SOCK_STREAM, 0), set = epoll_create1(0), is_in_set = !strcmp(arguments[2], "set");
    socklen_t length = sizeof address;
    check(!bind(listener, (struct sockaddr *)&address, length), "bind");
    check(!listen(listener, BACKLOG), "listen");
    check(!getsockname(listener, (struct sockaddr *)&address, &length), "getsockname");
    if (!strcmp(arguments[2], "stays")) {
        exchange(set, listener, atoi(arguments[1]));
        return 0;
    }
    if (!strcmp(arguments[2], "server")) {
        serve(set, listener, atoi(arguments[1]));
        return 0;
    }
    int selects = !strcmp(arguments[2], "select");
    if (selects || !strcmp(arguments[2], "poll")) {
        watch(listener, atoi(arguments[1]), selects);
        return 0;
    }
    for (int left = atoi(arguments[1]); left > 0; left--) {
        int client = measured_client_begins();
        int server = is_in_set ? measured_set_answers(set, listener) : measured_server_answers(listener);
        measured_client_ends(client);
        if (is_in_set)
            measured_set_ends(set, server);
        else
            measured_server_ends(server);
    }
    return 0;
}
