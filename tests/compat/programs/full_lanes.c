/* Writes more than the ring of a lane holds to a child that does not read, or reads slowly. TCP's buffers take all of it, so no write may
 * be late. usage: full_lanes PORT GATE STYLE, where STYLE is how a writer waits: block, file (it sends one, and blocks), poll, epoll, or
 * busy: in an epoll instance that always has something else to tell. Prints how many writes were late. */
#include "lane.h"
#include <sys/mman.h>
#include <sys/sendfile.h>

enum { MESSAGE = 300000, LARGE = 1 << 20, UNREAD = 2500000, STEP = 64 << 10, ROUNDS = 50, KINDS = 5, LATE_MS = 300, ALL = 12 << 20 };

/* A connection for each kind, since one that has fallen back stays on TCP for a while. */
static struct peer peers[KINDS], *peer;
static const char *style;
static int set = -1, file = -1, calls;

static double now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

static int is(const char *name)
{
    return !strcmp(style, name);
}

static void begin(int kind)
{
    peer = &peers[kind];
    if (is("block") || is("file"))
        return;
    fcntl(peer->fd, F_SETFL, fcntl(peer->fd, F_GETFL) | O_NONBLOCK);
    if (is("poll"))
        return;
    struct epoll_event event = {.events = EPOLLOUT, .data.u32 = 1};
    int other[2];
    set = epoll_create1(0);
    if (epoll_ctl(set, EPOLL_CTL_ADD, peer->fd, &event) || pipe(other))
        die("epoll_ctl");
    event = (struct epoll_event){.events = EPOLLIN, .data.u32 = 2};
    if (is("busy") && (write(other[1], "", 1) != 1 || epoll_ctl(set, EPOLL_CTL_ADD, other[0], &event)))
        die("pipe");
}

static void wait_for_room(void)
{
    if (set < 0) {
        struct pollfd polled = {peer->fd, POLLOUT, 0};
        if (poll(&polled, 1, -1) != 1)
            die("poll");
        return;
    }
    for (;;) {
        struct epoll_event events[2];
        int count = epoll_wait(set, events, 2, -1);
        for (int i = 0; i < count; i++)
            if (events[i].data.u32 == 1)
                return;
    }
}

/* Writes it, and says whether that was late. */
static int write_all(int len)
{
    static char bytes[ALL];
    calls = 0;
    double start = now_ms();
    for (int done = 0; done < len; calls++) {
        off_t from = done;
        ssize_t n = is("file") ? sendfile(peer->fd, file, &from, len - done)
                               : send(peer->fd, bytes + done, len - done, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN)
            wait_for_room();
        else if (n < 0)
            die("send");
        done += n > 0 ? n : 0;
    }
    double took = now_ms() - start;
    if (took > 2)
        fprintf(stderr, "%s: %d bytes in %.1f ms\n", style, len, took);
    return took > LATE_MS;
}

static void read_all(int len)
{
    static char bytes[STEP];
    while (len > 0) {
        ssize_t n = recv(peer->fd, bytes, len < STEP ? len : STEP, 0);
        struct pollfd polled = {peer->fd, POLLIN, 0};
        if (n < 0 && errno == EAGAIN)
            poll(&polled, 1, -1);
        else if (n <= 0)
            die("recv");
        len -= n > 0 ? n : 0;
    }
}

/* Writes to a child that reads it only once it has been written. */
static int write_unread(int len)
{
    int late = write_all(len);
    tell(peer, 'r', len, 0);
    wait_done(peer);
    return late;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    style = argv[3];
    if (is("file") && ((file = memfd_create("file", MFD_CLOEXEC)) < 0 || ftruncate(file, ALL)))
        die("memfd_create");
    connect_peers(peers, KINDS, atoi(argv[1]));
    warm_up(peers, KINDS, argv[2]);

    begin(0);
    int late = 0;
    for (int i = 0; i < ROUNDS; i++) {
        tell(peer, 's', MESSAGE, 0);
        tell(peer, 'r', MESSAGE, 0);
        late += write_all(MESSAGE);
        read_all(MESSAGE);
        wait_done(peer);
        wait_done(peer);
    }
    printf("both write before they read: %d late\n", late);

    begin(1);
    late = 0;
    for (int i = 0; i < ROUNDS; i++)
        late += write_unread(LARGE);
    printf("the reader pauses: %d late\n", late);

    begin(2);
    for (int i = 0; i < LARGE / STEP; i++)
        tell(peer, 'r', STEP, 100);
    late = write_all(LARGE);
    for (int i = 0; i < LARGE / STEP; i++)
        wait_done(peer);
    printf("the reader is slow: %d late\n", late);

    begin(3);
    late = 0;
    for (int i = 0; i < ROUNDS; i++)
        late += write_unread(UNREAD);
    printf("as much as TCP takes: %d late\n", late);

    /* More than TCP takes, to a reader that pauses until a lane falls back: a call that blocks goes on. */
    begin(4);
    tell(peer, 'r', ALL, 2500);
    write_all(ALL);
    wait_done(peer);
    printf("more than TCP takes: %s\n", calls > 1 && (is("block") || is("file")) ? "short" : "whole");
    end_peers(peers, KINDS);
    return 0;
}
