/* Threads that wait in every possible way, for several connections at a time, while others send
 * on them. Connections start, attach during the waits, carry a few exchanges and end. With
 * `fork` both processes also fork all the time, so that connections fall back to TCP. Every byte
 * is checked.
 *
 *   mingle serve PORT 0 [fork]
 *   mingle load PORT SECONDS [fork] */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WAYS = 5, THREADS = 2 * WAYS, CONNECTIONS = 4, MOST = 64, LARGEST = 20000, PATIENCE = 20 };

static struct sockaddr_in address = {.sin_family = AF_INET};
static time_t end;
static volatile long exchanges;

static void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    _exit(2);
}

static uint32_t next(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    return *state ^= *state << 5;
}

/* Waits in the way of thread `way` until any of these descriptors has bytes. Fills `ready`.
 * Waits no longer than PATIENCE. */
static void wait_for(int way, const int *fds, int count, char *ready)
{
    struct timespec limit = {PATIENCE, 0};
    int found = 0;
    memset(ready, 0, count);
    if (way % WAYS == 3) {
        struct epoll_event events[MOST];
        int set = epoll_create1(EPOLL_CLOEXEC);
        for (int i = 0; i < count; i++) {
            struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
            if (epoll_ctl(set, EPOLL_CTL_ADD, fds[i], &event))
                die("epoll_ctl");
        }
        found = epoll_wait(set, events, MOST, PATIENCE * 1000);
        for (int i = 0; i < found; i++)
            ready[events[i].data.u32] = 1;
        close(set);
    } else if (way % WAYS == 2) {
        struct timeval time = {PATIENCE, 0};
        int most = 0;
        fd_set set;
        FD_ZERO(&set);
        for (int i = 0; i < count; i++) {
            FD_SET(fds[i], &set);
            most = fds[i] > most ? fds[i] : most;
        }
        found = select(most + 1, &set, NULL, NULL, &time);
        for (int i = 0; i < count && found > 0; i++)
            ready[i] = FD_ISSET(fds[i], &set) != 0;
    } else {
        struct pollfd set[MOST];
        sigset_t mask;
        sigemptyset(&mask);
        for (int i = 0; i < count; i++)
            set[i] = (struct pollfd){fds[i], POLLIN, 0};
        found = way % WAYS == 0 ? poll(set, count, PATIENCE * 1000) : ppoll(set, count, &limit, &mask);
        for (int i = 0; i < count && found > 0; i++)
            ready[i] = set[i].revents != 0;
    }
    if (found < 0)
        die("waiting");
    if (found == 0) {
        printf("nothing was heard for %d s in way %d\n", PATIENCE, way % WAYS);
        fflush(stdout);
        _exit(3);
    }
}

static ssize_t receive(int fd, void *to, size_t len, uint32_t *state)
{
    size_t half = len / 2;
    struct iovec list[2] = {{to, half}, {(char *)to + half, len - half}};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = list, .msg_iovlen = 2}};
    switch (next(state) % 5) {
    case 0:
        return read(fd, to, len);
    case 1:
        return readv(fd, list, 2);
    case 2:
        return recvmsg(fd, &message.msg_hdr, 0);
    case 3:
        return recvmmsg(fd, &message, 1, 0, NULL) < 0 ? -1 : (ssize_t)message.msg_len;
    default:
        return recv(fd, to, len, 0);
    }
}

static void send_all(int fd, const char *from, size_t len, uint32_t *state)
{
    while (len > 0) {
        size_t half = len / 2;
        struct iovec list[2] = {{(char *)from, half}, {(char *)from + half, len - half}};
        struct mmsghdr message = {.msg_hdr = {.msg_iov = list, .msg_iovlen = 2}};
        ssize_t n = 0;
        switch (next(state) % 4) {
        case 0:
            n = write(fd, from, len);
            break;
        case 1:
            n = writev(fd, list, 2);
            break;
        case 2:
            n = sendmmsg(fd, &message, 1, MSG_NOSIGNAL) < 0 ? -1 : (ssize_t)message.msg_len;
            break;
        default:
            n = send(fd, from, len, MSG_NOSIGNAL);
        }
        if (n < 0)
            die("sending");
        from += n;
        len -= n;
    }
}

/* Echoes all bytes. Every thread also waits for new connections. */
static int listener;

__attribute__((noreturn)) static void *serve(void *argument)
{
    int way = (int)(intptr_t)argument, fds[MOST] = {listener}, count = 1;
    uint32_t state = way + 1;
    char ready[MOST], bytes[LARGEST];
    for (;;) {
        wait_for(way, fds, count, ready);
        for (int i = count - 1; i > 0; i--) {
            if (!ready[i])
                continue;
            ssize_t n = receive(fds[i], bytes, sizeof bytes, &state);
            if (n < 0)
                die("the server receives");
            if (n > 0) {
                send_all(fds[i], bytes, n, &state);
            } else {
                close(fds[i]);
                fds[i] = fds[--count];
            }
        }
        if (ready[0] && count < MOST) {
            int one = 1, fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
            if (fd >= 0) {
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
                fds[count++] = fd;
            }
        }
    }
}

/* The bytes that another thread must send. */
struct job {
    int fd;
    uint32_t seed, len;
};

static void fill(char *bytes, uint32_t seed, uint32_t len)
{
    for (uint32_t i = 0; i < len; i++)
        bytes[i] = (char)(seed + i * 7 + (i >> 8));
}

static void *send_for(void *argument)
{
    int jobs = (int)(intptr_t)argument;
    uint32_t state = jobs + 1;
    char bytes[LARGEST];
    struct job job;
    while (read(jobs, &job, sizeof job) == sizeof job) {
        fill(bytes, job.seed, job.len);
        send_all(job.fd, bytes, job.len, &state);
    }
    return NULL;
}

static int dial(void)
{
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (void *)&address, sizeof address))
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static void *load(void *argument)
{
    int way = (int)(intptr_t)argument, fds[CONNECTIONS], jobs[2];
    uint32_t state = way * 77 + 1, done[CONNECTIONS] = {0}, left[CONNECTIONS];
    struct job asked[CONNECTIONS];
    char ready[CONNECTIONS], bytes[LARGEST], expected[LARGEST];
    pthread_t sender;
    if (pipe(jobs) || pthread_create(&sender, NULL, send_for, (void *)(intptr_t)jobs[0]))
        die("a sender");
    for (int i = 0; i < CONNECTIONS; i++) {
        fds[i] = -1;
        left[i] = 0;
    }
    for (int open = CONNECTIONS; open > 0;) {
        int waiting[CONNECTIONS], count = 0, which[CONNECTIONS];
        open = 0;
        for (int i = 0; i < CONNECTIONS; i++) {
            if (left[i] == 0 && fds[i] >= 0) {
                close(fds[i]);
                fds[i] = -1;
            }
            if (fds[i] < 0 && time(NULL) < end) {
                fds[i] = dial();
                left[i] = 1 + next(&state) % 2000;
                done[i] = 0;
                asked[i].len = 0;
            }
            if (fds[i] < 0)
                continue;
            if (asked[i].len == done[i]) {
                uint32_t len = next(&state) % 16 ? 1 + next(&state) % 200 : 1 + next(&state) % LARGEST;
                asked[i] = (struct job){fds[i], next(&state), len};
                done[i] = 0;
                if (write(jobs[1], &asked[i], sizeof *asked) != sizeof *asked)
                    die("asking the sender");
            }
            open++;
            which[count] = i;
            waiting[count++] = fds[i];
        }
        if (count == 0)
            break;
        if (way % WAYS == 4) {
            /* Sleep in the receive itself. */
            memset(ready, 0, sizeof ready);
            ready[next(&state) % count] = 1;
        } else {
            wait_for(way, waiting, count, ready);
        }
        for (int at = 0; at < count; at++) {
            if (!ready[at])
                continue;
            int i = which[at];
            ssize_t n = receive(fds[i], bytes, asked[i].len - done[i], &state);
            if (n <= 0)
                die("receiving");
            fill(expected, asked[i].seed, asked[i].len);
            if (memcmp(bytes, expected + done[i], n) != 0) {
                printf("wrong bytes at %u of %u\n", done[i], asked[i].len);
                fflush(stdout);
                _exit(3);
            }
            done[i] += n;
            if (done[i] == asked[i].len) {
                left[i]--;
                __sync_fetch_and_add(&exchanges, 1);
            }
        }
    }
    close(jobs[1]);
    pthread_join(sender, NULL);
    return NULL;
}

static void *fork_now_and_then(void *unused)
{
    for (;;) {
        struct timespec pause = {0, 30000000};
        nanosleep(&pause, NULL);
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        if (child < 0 || waitpid(child, NULL, 0) != child)
            die("fork");
    }
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS], forker;
    int serves = argc > 1 && strcmp(argv[1], "serve") == 0, one = 1;
    if (argc < 4)
        die("usage");
    if (argc > 4 && pthread_create(&forker, NULL, fork_now_and_then, NULL))
        die("pthread_create");
    address.sin_port = htons(atoi(argv[2]));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (serves) {
        listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(listener, (void *)&address, sizeof address) || listen(listener, 128))
            die("listen");
    } else {
        end = time(NULL) + atoi(argv[3]);
    }
    for (long i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, serves ? serve : load, (void *)i))
            die("pthread_create");
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    fprintf(stderr, "%ld exchanges\n", exchanges);
    puts("every byte was right");
    return 0;
}
