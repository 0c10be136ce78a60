/* A server that accepts, reads and writes through libc, and waits by inline system calls, which
 * are not seen.
 *
 *   unseen serve PORT HOW WHEN    waits this way from message WHEN on, and before by recv
 *   unseen ask PORT HOW COUNT     makes COUNT requests, and waits for each answer this way */
#define _GNU_SOURCE
#include "lane.h"
#include <linux/io_uring.h>
#include <netinet/tcp.h>
#include <sys/mman.h>

enum { PATIENCE_MS = 10000, MESSAGE = 8 };

static long raw(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return number;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#endif
}

static void wait_by_poll(int fd)
{
    struct pollfd set = {fd, POLLIN, 0};
    struct timespec limit = {PATIENCE_MS / 1000, 0};
    raw(SYS_ppoll, (long)&set, 1, (long)&limit, 0, 0, 0);
}

static void wait_by_epoll(int fd)
{
    static int set = -1;
    struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT};
    if (set < 0) {
        set = raw(SYS_epoll_create1, EPOLL_CLOEXEC, 0, 0, 0, 0, 0);
        raw(SYS_epoll_ctl, set, EPOLL_CTL_ADD, fd, (long)&event, 0, 0);
    }
    raw(SYS_epoll_ctl, set, EPOLL_CTL_MOD, fd, (long)&event, 0, 0);
    raw(SYS_epoll_pwait, set, (long)&event, 1, PATIENCE_MS, 0, 0);
}

static void wait_by_signal(int fd)
{
    static int is_armed;
    sigset_t set;
    struct timespec limit = {0, 0};
    sigemptyset(&set);
    sigaddset(&set, SIGIO);
    if (!is_armed) {
        sigprocmask(SIG_BLOCK, &set, NULL);
        raw(SYS_fcntl, fd, F_SETOWN, getpid(), 0, 0, 0);
        raw(SYS_fcntl, fd, F_SETFL, O_RDWR | O_ASYNC | O_NONBLOCK, 0, 0, 0);
        is_armed = 1;
    }
    char byte;
    limit.tv_sec = PATIENCE_MS / 1000;
    while (recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN)
        if (raw(SYS_rt_sigtimedwait, (long)&set, 0, (long)&limit, 8, 0, 0) < 0)
            return;
}

/* Waits by a poll in a private uring. */
static void wait_by_ring(int fd)
{
    static int ring = -1;
    static unsigned *submitted, *completed, *array, mask;
    static struct io_uring_sqe *entries;
    if (ring < 0) {
        struct io_uring_params params = {0};
        ring = raw(SYS_io_uring_setup, 4, (long)&params, 0, 0, 0, 0);
        if (ring < 0) {
            wait_by_poll(fd);
            ring = -1;
            return;
        }
        char *queue = mmap(NULL, params.sq_off.array + params.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
        char *done = mmap(NULL, params.cq_off.cqes + params.cq_entries * 16, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
        entries = mmap(NULL, params.sq_entries * sizeof *entries, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
        submitted = (unsigned *)(queue + params.sq_off.tail);
        mask = *(unsigned *)(queue + params.sq_off.ring_mask);
        array = (unsigned *)(queue + params.sq_off.array);
        completed = (unsigned *)(done + params.cq_off.head);
    }
    unsigned place = *submitted & mask;
    memset(&entries[place], 0, sizeof *entries);
    entries[place].opcode = IORING_OP_POLL_ADD;
    entries[place].fd = fd;
    entries[place].poll32_events = POLLIN;
    array[place] = place;
    __atomic_store_n(submitted, *submitted + 1, __ATOMIC_RELEASE);
    raw(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0);
    __atomic_store_n(completed, *completed + 1, __ATOMIC_RELEASE);
}

/* Another thread sleeps for the program, in an inline call that peeks. */
static void *peek(void *fd)
{
    char byte;
    raw(SYS_recvfrom, *(int *)fd, (long)&byte, 1, MSG_PEEK, 0, 0);
    return NULL;
}

static void wait_by_thread(int fd)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, peek, &fd))
        die("pthread_create");
    pthread_join(thread, NULL);
}

static const struct {
    const char *name;
    void (*wait)(int);
} hidden[] = {{"poll", wait_by_poll}, {"epoll", wait_by_epoll}, {"signal", wait_by_signal}, {"ring", wait_by_ring}, {"thread", wait_by_thread}};

static void serve(struct sockaddr_in address, const char *how, int when)
{
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    void (*wait)(int) = NULL;
    for (size_t i = 0; i < LEN(hidden); i++)
        if (!strcmp(how, hidden[i].name))
            wait = hidden[i].wait;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (!wait || bind(listener, (void *)&address, sizeof address) || listen(listener, 8))
        die("listen");
    int fd = accept(listener, NULL, NULL);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    char message[MESSAGE];
    for (int i = 0;; i++) {
        int is_unseen = i > 0 && i >= when;
        if (is_unseen)
            wait(fd);
        ssize_t got = recv(fd, message, sizeof message, MSG_WAITALL | (is_unseen ? MSG_DONTWAIT : 0));
        if (got == 0 && i > 0)
            return;
        if (got == 0) {
            /* The test has only checked whether there is a server. */
            close(fd);
            fd = accept(listener, NULL, NULL);
            i--;
            continue;
        }
        if (got < 0 && errno == EAGAIN)
            die("nothing came for long");
        if (got != sizeof message || send(fd, message, sizeof message, 0) != sizeof message)
            die("a part only");
    }
}

static int by_recv(int fd)
{
    char byte;
    return recv(fd, &byte, 1, MSG_PEEK) == 1;
}

static int by_poll(int fd)
{
    struct pollfd set = {fd, POLLIN, 0};
    return poll(&set, 1, PATIENCE_MS) == 1;
}

static int by_select(int fd)
{
    struct timeval limit = {PATIENCE_MS / 1000, 0};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    return select(fd + 1, &set, NULL, NULL, &limit) == 1;
}

static int by_epoll(int fd)
{
    static int set = -1;
    struct epoll_event event = {.events = EPOLLIN};
    if (set < 0) {
        set = epoll_create1(0);
        epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
    }
    return epoll_wait(set, &event, 1, PATIENCE_MS) == 1;
}

static const struct {
    const char *name;
    int (*wait)(int);
} seen[] = {{"recv", by_recv}, {"poll", by_poll}, {"select", by_select}, {"epoll", by_epoll}};

static void ask(struct sockaddr_in address, const char *how, int count)
{
    int on = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    struct timeval limit = {PATIENCE_MS / 1000, 0};
    int (*wait)(int) = NULL;
    for (size_t i = 0; i < LEN(seen); i++)
        if (!strcmp(how, seen[i].name))
            wait = seen[i].wait;
    if (!wait || connect(fd, (void *)&address, sizeof address))
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    for (int i = 0; i < count; i++) {
        char message[MESSAGE + 1], answer[MESSAGE + 1] = "";
        snprintf(message, sizeof message, "%08u", i % 100000000u);
        put(fd, message, MESSAGE);
        if (!wait(fd) || recv(fd, answer, MESSAGE, MSG_WAITALL) != MESSAGE || strcmp(message, answer)) {
            printf("message %d: '%s'\n", i, answer);
            exit(1);
        }
        if (i % 20 == 0)
            pause_ms(2);
    }
    puts("every answer came");
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    (strcmp(argv[1], "serve") ? ask : serve)(address, argv[3], atoi(argv[4]));
    return 0;
}
