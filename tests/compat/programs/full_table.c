/* A listener in a process without room for another descriptor. accept fails with EMFILE, and the
 * connection stays in the accept queue. What poll, select and epoll report of the listener is
 * printed, in this thread and in one that was asleep when the connection came. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <unistd.h>

enum { LENGTH = 64, ROUNDS = 100, PAUSE = 1000, PENDING = 3, MOST = 200, LONG = 20000 };

static int listener, pair[2];

static void check(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static void exchange(int from, int to)
{
    static char message[LENGTH];
    check(write(from, message, LENGTH) == LENGTH, "write");
    check(read(to, message, LENGTH) == LENGTH, "read");
}

static short polled(int timeout)
{
    struct pollfd both[] = { { .fd = listener, .events = POLLIN }, { .fd = pair[0], .events = POLLIN } };
    check(poll(both, 2, timeout) >= 0, "poll");
    return both[0].revents | both[1].revents << 8;
}

static int selected(void)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(listener, &set);
    FD_SET(pair[0], &set);
    struct timeval soon = { .tv_sec = LONG / 1000 };
    check(select(FD_SETSIZE, &set, NULL, NULL, &soon) >= 0, "select");
    return (FD_ISSET(listener, &set) ? 1 : 0) | (FD_ISSET(pair[0], &set) ? 2 : 0);
}

static int waited(int set, int timeout)
{
    struct epoll_event event[2];
    int count = epoll_wait(set, event, 2, timeout), all = 0;
    check(count >= 0, "epoll_wait");
    for (int one = 0; one < count; one++)
        all |= event[one].events << event[one].data.u32;
    return all;
}

/* Only polls, and never accepts. */
static void *poller(void *unused)
{
    (void)unused;
    return (void *)(long)polled(LONG);
}

static int watch(unsigned flags)
{
    int set = epoll_create1(0);
    struct epoll_event event = { .events = EPOLLIN | flags, .data.u32 = 0 };
    check(!epoll_ctl(set, EPOLL_CTL_ADD, listener, &event), "epoll_ctl");
    event.data.u32 = 8;
    check(!epoll_ctl(set, EPOLL_CTL_ADD, pair[0], &event), "epoll_ctl");
    return set;
}

static void *waiter(void *set)
{
    return (void *)(long)waited((int)(long)set, LONG);
}

int main(int count, char **arguments)
{
    check(count == 2, "which port?");
    struct rlimit limit;
    check(!getrlimit(RLIMIT_NOFILE, &limit), "getrlimit");
    limit.rlim_cur = MOST;
    check(!setrlimit(RLIMIT_NOFILE, &limit), "setrlimit");

    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    address.sin_port = htons(atoi(arguments[1]));
    listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    check(!bind(listener, (struct sockaddr *)&address, sizeof address), "bind");
    check(!listen(listener, 10), "listen");
    pair[1] = socket(AF_INET, SOCK_STREAM, 0);
    check(!connect(pair[1], (struct sockaddr *)&address, sizeof address), "connect");
    check((pair[0] = accept(listener, NULL, NULL)) >= 0, "accept");
    int level = watch(0), edge = watch(EPOLLET);
    for (int round = 0; round < ROUNDS; round++) {
        exchange(pair[0], pair[1]);
        exchange(pair[1], pair[0]);
        waited(level, 0);
        waited(edge, 0);
        usleep(PAUSE);
    }

    int clients[PENDING], last = -1;
    for (int one = 0; one < PENDING; one++)
        check((clients[one] = socket(AF_INET, SOCK_STREAM, 0)) >= 0, "socket");
    for (int next; (next = dup(listener)) >= 0;)
        last = next;
    check(errno == EMFILE, "dup");

    for (int one = 0; one < PENDING; one++) {
        pthread_t threads[3];
        check(!pthread_create(&threads[0], NULL, poller, NULL), "pthread_create");
        check(!pthread_create(&threads[1], NULL, waiter, (void *)(long)level), "pthread_create");
        check(!pthread_create(&threads[2], NULL, waiter, (void *)(long)edge), "pthread_create");
        if (one == 0)
            usleep(100 * PAUSE);
        check(!connect(clients[one], (struct sockaddr *)&address, sizeof address), "connect");
        int new = accept(listener, NULL, NULL);
        printf("%d: %d %s\n", one, new < 0 ? -1 : 0, strerror(errno));
        for (int thread = 0; thread < 3; thread++) {
            void *seen;
            check(!pthread_join(threads[thread], &seen), "pthread_join");
            printf("thread %d: %lx\n", thread, (long)seen);
        }
        printf("poll %x, then %x, select %x, level %x, edge %x\n", polled(0), polled(LONG), selected(),
               waited(level, LONG), waited(edge, 0));
        exchange(pair[1], pair[0]);
        check(write(pair[1], "x", 1) == 1, "write");
        while (!(polled(LONG) >> 8))
            ;
        printf("with bytes: poll %x, select %x\n", polled(LONG), selected());
        char byte;
        check(read(pair[0], &byte, 1) == 1, "read");
        waited(edge, 0);
    }
    /* Room for one: the first of the queue comes, and the others are still reported. */
    for (int one = 0; one < PENDING; one++) {
        check(!close(last), "close");
        last = accept(listener, NULL, NULL);
        check(last >= 0, "accept");
        printf("accepted %d: poll %x, level %x\n", one, polled(0), waited(level, 0));
    }
    return 0;
}
