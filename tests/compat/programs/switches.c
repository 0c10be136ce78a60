/* A thread sleeps on two connections, of which one is on shared memory and one not yet, or on
 * the second alone. Another thread uses the second until it attaches, and then its peer sends.
 * The sleeper must be woken, whatever call it sleeps in. usage: switches PORT GATE */
#include "lane.h"

enum { ROUNDS = 3, SETTLED = 10 };

static int wait_by_poll(int one, int other)
{
    struct pollfd set[] = {{one, POLLIN, 0}, {other, POLLIN, 0}};
    return poll(set, LEN(set), SETTLED * 1000);
}

static int wait_by_ppoll(int one, int other)
{
    struct pollfd set[] = {{one, POLLIN, 0}, {other, POLLIN, 0}};
    struct timespec limit = {SETTLED, 0};
    sigset_t mask;
    sigemptyset(&mask);
    return ppoll(set, LEN(set), &limit, &mask);
}

static int wait_by_select(int one, int other)
{
    struct timeval limit = {SETTLED, 0};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(one, &set);
    FD_SET(other, &set);
    return select((one > other ? one : other) + 1, &set, NULL, NULL, &limit);
}

static int wait_by_epoll(int one, int other)
{
    struct epoll_event event = {.events = EPOLLIN};
    int set = epoll_create1(0);
    if (epoll_ctl(set, EPOLL_CTL_ADD, one, &event) || epoll_ctl(set, EPOLL_CTL_ADD, other, &event))
        die("epoll_ctl");
    int count = epoll_wait(set, &event, 1, SETTLED * 1000);
    close(set);
    return count;
}

/* Each of these functions receives the byte. */
static int take_by_recv(int one, int other)
{
    char byte;
    (void)one;
    return recv(other, &byte, 1, 0);
}

static int take_by_readv(int one, int other)
{
    char byte;
    struct iovec list = {&byte, 1};
    (void)one;
    return readv(other, &list, 1);
}

static int take_by_recvmsg(int one, int other)
{
    char byte;
    struct iovec list = {&byte, 1};
    struct msghdr message = {.msg_iov = &list, .msg_iovlen = 1};
    (void)one;
    return recvmsg(other, &message, 0);
}

static int take_by_recvmmsg(int one, int other)
{
    char byte;
    struct iovec list = {&byte, 1};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = &list, .msg_iovlen = 1}};
    (void)one;
    return recvmmsg(other, &message, 1, 0, NULL);
}

static int take_by_splice(int one, int other)
{
    int ends[2];
    (void)one;
    if (pipe(ends))
        die("pipe");
    int count = splice(other, NULL, ends[1], NULL, 1, 0);
    close(ends[0]);
    close(ends[1]);
    return count;
}

static const struct {
    const char *name;
    int (*wait)(int, int);
} ways[] = {
    {"poll", wait_by_poll},       {"ppoll", wait_by_ppoll},       {"select", wait_by_select},
    {"epoll", wait_by_epoll},     {"recv", take_by_recv},         {"readv", take_by_readv},
    {"recvmsg", take_by_recvmsg}, {"recvmmsg", take_by_recvmmsg}, {"splice", take_by_splice},
};

static int first[2], second[2], way, found;

static void *sleep_until_heard(void *unused)
{
    found = ways[way].wait(first[1], second[1]);
    return unused;
}

static void make_pair(int listener, const struct sockaddr_in *address, int pair[2])
{
    pair[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(pair[0], (const void *)address, sizeof *address))
        die("connect");
    pair[1] = accept(listener, NULL, NULL);
}

int main(int argc, char **argv)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    char bytes[8] = {0};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 8))
        die("listen");
    make_pair(listener, &address, first);
    do
        for (int turn = 0; turn < 2; turn++) {
            put(first[turn], bytes, sizeof bytes);
            get(first[!turn], bytes, sizeof bytes);
        }
    while (access(argv[2], F_OK) != 0);

    for (way = 0; way < (int)LEN(ways); way++) {
        int heard = 0;
        for (int round = 0; round < ROUNDS && heard == round; round++) {
            pthread_t sleeper;
            make_pair(listener, &address, second);
            if (pthread_create(&sleeper, NULL, sleep_until_heard, NULL))
                die("pthread_create");
            /* Repeat for long enough to be paired. */
            for (int used = 0; used < 300; used++) {
                put(second[1], bytes, sizeof bytes);
                get(second[0], bytes, sizeof bytes);
                pause_ms(1);
            }
            put(second[0], bytes, 1);
            struct timespec limit;
            clock_gettime(CLOCK_REALTIME, &limit);
            limit.tv_sec += SETTLED;
            if (pthread_timedjoin_np(sleeper, NULL, &limit))
                break;
            heard += found == 1;
            close(second[0]);
            close(second[1]);
        }
        printf("%s: heard in %d of %d rounds\n", ways[way].name, heard, ROUNDS);
    }
    return 0;
}
