/* A connection between this process and a child, on shared memory where that is possible. The
 * child executes orders that it reads from a pipe. The file `gate` appears when the connection
 * is on the transport that the test wants. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LEN(array) (sizeof(array) / sizeof *(array))

static void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(2);
}

static void pause_ms(int ms)
{
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    while (syscall(SYS_nanosleep, &time, &time) < 0)
        ;
}

/* Sends all bytes, in spite of interruptions. */
static void put(int fd, const void *from, size_t len)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = send(fd, (const char *)from + done, len - done, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR)
            die("send");
        done += n > 0 ? n : 0;
    }
}

static void get(int fd, void *to, size_t len)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = recv(fd, (char *)to + done, len - done, 0);
        if (n == 0 || (n < 0 && errno != EINTR))
            die("recv");
        done += n > 0 ? n : 0;
    }
}

/* An order to the child: send `len` bytes after `ms` milliseconds, receive `len` bytes, or
 * close. */
struct order {
    char what; /* s, r, c as above; e: echo all; l: look; w: wait, then look */
    int len, ms;
};

struct peer {
    int fd; /* our end */
    int orders, done;
    pid_t pid;
};

/* Returns what a receive would find: b for bytes, e for the end, r for an error, - for nothing. */
static inline char look(int fd)
{
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n > 0 ? 'b' : n == 0 ? 'e' : errno == EAGAIN ? '-' : 'r';
}

static inline void obey(int fd, int orders, int done)
{
    static char bytes[1 << 16];
    struct order order;
    while (read(orders, &order, sizeof order) == sizeof order) {
        pause_ms(order.ms);
        for (int left = order.len; left > 0 && strchr("sr", order.what);) {
            size_t part = (size_t)left < sizeof bytes ? (size_t)left : sizeof bytes;
            if (order.what == 's')
                put(fd, bytes, part);
            else
                get(fd, bytes, part);
            left -= part;
        }
        if (order.what == 'e')
            for (ssize_t n; (n = recv(fd, bytes, sizeof bytes, 0)) > 0;)
                put(fd, bytes, n);
        if (order.what == 'c')
            close(fd);
        struct pollfd polled = {fd, POLLIN | POLLRDHUP, 0};
        if (order.what == 'w')
            poll(&polled, 1, 20000);
        char found = strchr("lw", order.what) ? look(fd) : 0;
        if (write(done, &found, 1) != 1)
            exit(0);
    }
    exit(0);
}

static void tell(struct peer *peer, char what, int len, int ms)
{
    struct order order = {what, len, ms};
    if (write(peer->orders, &order, sizeof order) != sizeof order)
        die("order");
}

static char wait_done(struct peer *peer)
{
    char byte = 0;
    while (read(peer->done, &byte, 1) < 0)
        if (errno != EINTR)
            die("done");
    return byte;
}

/* Opens `count` connections to children that listen on `port`. Each has a pipe for its orders. */
static inline void connect_peers(struct peer *peers, int count, int port)
{
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, count))
        die("listen");
    for (int i = 0; i < count; i++) {
        int orders[2], done[2];
        if (pipe(orders) || pipe(done))
            die("pipe");
        if ((peers[i].pid = fork()) == 0) {
            for (int other = 0; other < i; other++)
                close(peers[other].orders), close(peers[other].fd);
            close(orders[1]), close(done[0]);
            int fd = accept(listener, NULL, NULL);
            close(listener);
            if (write(done[1], "", 1) == 1)
                obey(fd, orders[0], done[1]);
            exit(0);
        }
        close(orders[0]), close(done[1]);
        peers[i].orders = orders[1], peers[i].done = done[0];
        peers[i].fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(peers[i].fd, (void *)&address, sizeof address))
            die("connect");
        /* Wait until this child has accepted it, and not the next. */
        wait_done(&peers[i]);
    }
    close(listener);
}

/* Makes small round trips on all connections until the file exists. */
static inline void warm_up(struct peer *peers, int count, const char *gate)
{
    do
        for (int i = 0; i < count; i++) {
            char bytes[8] = {0};
            tell(&peers[i], 'r', 8, 0);
            put(peers[i].fd, bytes, 8);
            wait_done(&peers[i]);
            tell(&peers[i], 's', 8, 0);
            get(peers[i].fd, bytes, 8);
            wait_done(&peers[i]);
        }
    while (access(gate, F_OK) != 0);
}

static inline void end_peers(struct peer *peers, int count)
{
    for (int i = 0; i < count; i++) {
        close(peers[i].orders);
        close(peers[i].fd);
        waitpid(peers[i].pid, NULL, 0);
    }
}

/* Waits until a thread of this process sleeps, according to the kernel. Checks repeatedly, so
 * that a short sleep does not count. */
static inline void wait_asleep(pid_t tid)
{
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", tid);
    for (int seen = 0; seen < 3; pause_ms(10)) {
        FILE *file = fopen(path, "r");
        if (!file)
            return;
        int found = fgets(line, sizeof line, file) && strrchr(line, ')') && strrchr(line, ')')[2] == 'S';
        fclose(file);
        seen = found ? seen + 1 : 0;
    }
}
