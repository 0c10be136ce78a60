/* A program whose main thread installs a seccomp filter while other threads wait for connections:
 * sandbox_threads PORT STYLE BUSY
 *
 *   STYLE  level, edge or oneshot: how the epoll instance has its connection
 *   BUSY   1: bytes move while the filter is installed. 0: the threads sleep, and the main thread
 *          does the rest in the sandbox
 *
 * One thread waits by epoll_wait, one by poll, one by recv. Each sends every byte back, and each
 * wait must report exactly what a kernel would. The filter is installed when the file "go" is there. */

#include "phases.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

enum { BY_EPOLL, BY_POLL, BY_RECV, KINDS };

/* After the filter, so many bytes go to each thread and back. */
#define AFTER 300

static struct pair {
    int kind, near, far;
    atomic_int thread; /* of the waiting thread */
    atomic_ulong over; /* bytes that came back */
    int was_early;     /* whether a wait has reported a byte before recv found it */
} pairs[KINDS];

static int instance, events_asked;
static atomic_int is_over;
/* The user data of the registration, before and after the main thread has changed it. */
static const uint64_t datas[2] = {77, 78};
static atomic_int changed;

static void wait_by_epoll(int fd) {
    struct epoll_event event[4];
    int count = epoll_wait(instance, event, 4, -1);
    if (count != 1 || (event->data.u64 != datas[0] && event->data.u64 != datas[1]) || event->events != EPOLLIN) {
        fprintf(stderr, "epoll_wait has returned %d: %d, events %x, data %llx\n", count, errno, event->events,
                (unsigned long long)event->data.u64);
        _exit(1);
    }
    (void)fd;
}

static void check_no_more(void) {
    struct epoll_event event = {.events = 0};
    int count = epoll_wait(instance, &event, 1, 0);
    if (count != 0) {
        fprintf(stderr, "epoll_wait has repeated an event: %d, events %x, data %llx\n", count, event.events,
                (unsigned long long)event.data.u64);
        _exit(1);
    }
}

static void arm_again(int fd) {
    struct epoll_event event = {.events = events_asked, .data.u64 = datas[changed]};
    if (events_asked & EPOLLONESHOT)
        expect(epoll_ctl(instance, EPOLL_CTL_MOD, fd, &event) == 0, "epoll_ctl");
}

static void wait_by_poll(int fd) {
    struct pollfd set[2] = {{.fd = fd, .events = POLLIN}, {.fd = -1, .events = POLLIN}};
    int count = poll(set, 2, -1);
    if (count != 1 || set->revents != POLLIN) {
        fprintf(stderr, "poll has returned %d: %d, events %x\n", count, errno, set->revents);
        _exit(1);
    }
}

static void *answer(void *argument) {
    struct pair *pair = argument;
    pair->thread = syscall(SYS_gettid);
    for (unsigned char expected = 0;; expected++) {
        unsigned char got[2];
        if (pair->kind == BY_EPOLL)
            wait_by_epoll(pair->near);
        if (pair->kind == BY_POLL)
            wait_by_poll(pair->near);
        ssize_t count = recv(pair->near, got, sizeof got, pair->kind == BY_RECV ? 0 : MSG_DONTWAIT);
        if (count < 0 && errno == EAGAIN && !pair->was_early++) {
            /* The filter came between: the byte is on its way from shared memory to TCP. */
            if (pair->kind == BY_EPOLL)
                arm_again(pair->near);
            expected--;
            continue;
        }
        if (count != 1 || *got != expected) {
            fprintf(stderr, "kind %d: recv has returned %zd: %d, byte %d instead of %d\n", pair->kind, count, errno,
                    *got, expected);
            _exit(1);
        }
        if (pair->kind == BY_EPOLL) {
            check_no_more();
            arm_again(pair->near);
        }
        expect(send(pair->near, got, 1, 0) == 1, "send");
    }
    return NULL;
}

static void exchange(struct pair *pair) {
    unsigned char byte = pair->over, got = 0;
    expect(write(pair->far, &byte, 1) == 1, "write");
    expect(read(pair->far, &got, 1) == 1 && got == byte, "the byte comes back");
    pair->over++;
}

static void *drive(void *argument) {
    while (!is_over)
        exchange(argument);
    return NULL;
}

/* A wait that has lost a byte does not end. Then this shows which. */
static void show(int number) {
    for (int kind = 0; kind < KINDS; kind++) {
        char text[64], line[128], path[64];
        int length = snprintf(text, sizeof text, "kind %d: %lu bytes came back; ", kind, (unsigned long)pairs[kind].over);
        snprintf(path, sizeof path, "/proc/self/task/%d/syscall", pairs[kind].thread);
        int file = open(path, O_RDONLY);
        ssize_t got = read(file, line, sizeof line);
        if (write(2, text, length) < 0 || write(2, line, got > 0 ? got : 0) < 0)
            _exit(3);
    }
    _exit(number);
}

static int is_there(const char *file) {
    return access(file, F_OK) == 0;
}

/* Returns whether the thread sleeps in a system call that waits for a descriptor. */
static int is_waiting(int thread) {
    static const int waits[] = {SYS_epoll_wait, SYS_epoll_pwait, SYS_epoll_pwait2, SYS_poll, SYS_ppoll, SYS_recvfrom, SYS_recvmsg};
    char path[64], text[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/syscall", thread);
    int file = open(path, O_RDONLY);
    expect(file >= 0 && read(file, text, sizeof text - 1) > 0, path);
    close(file);
    for (size_t at = 0; at < sizeof waits / sizeof *waits; at++)
        if (text[0] >= '0' && text[0] <= '9' && atoi(text) == waits[at])
            return 1;
    return 0;
}

/* Kills the thread for calls that the shim needs and this program does not; or nothing. */
static void install(int allows_all) {
    static const int ours[] = {SYS_memfd_create, SYS_eventfd2,  SYS_socket, SYS_connect, SYS_sendmsg, SYS_recvmsg,
                               SYS_getsockopt,   SYS_ioctl,     SYS_fcntl,  SYS_madvise, SYS_preadv2, SYS_ppoll,
                               SYS_pidfd_open,   SYS_prlimit64, SYS_futex,  SYS_fstat,   SYS_getpid};
    static struct sock_filter code[64];
    unsigned short length = 0;
    code[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t at = 0; !allows_all && at < sizeof ours / sizeof *ours; at++) {
        code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ours[at], 0, 1);
        code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    }
    code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog filter = {length, code};
    expect(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no new privileges");
    expect(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0, "the filter");
}

static void in_quiet(void) {
    while (!is_there("go"))
        for (int kind = 0; kind < KINDS; kind++)
            exchange(&pairs[kind]);
    for (int kind = 0; kind < KINDS; kind++)
        while (!is_waiting(pairs[kind].thread))
            usleep(100);
    install(0);
    /* The thread is still in the wait that it has begun before. */
    struct epoll_event event = {.events = events_asked, .data.u64 = datas[1]};
    changed = 1;
    expect(epoll_ctl(instance, EPOLL_CTL_MOD, pairs[BY_EPOLL].near, &event) == 0, "epoll_ctl");
    for (int round = 0; round < AFTER; round++)
        for (int kind = 0; kind < KINDS; kind++)
            exchange(&pairs[kind]);
}

static void in_motion(void) {
    pthread_t threads[KINDS];
    for (int kind = 0; kind < KINDS; kind++)
        expect(pthread_create(&threads[kind], NULL, drive, &pairs[kind]) == 0, "pthread_create");
    while (!is_there("go"))
        usleep(1000);
    install(1);
    for (int kind = 0; kind < KINDS; kind++)
        for (unsigned long before = pairs[kind].over; pairs[kind].over < before + AFTER;)
            usleep(100);
    is_over = 1;
    for (int kind = 0; kind < KINDS; kind++)
        pthread_join(threads[kind], NULL);
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    int listener = listen_on(atoi(argv[1])), one = 1;
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    expect(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    instance = epoll_create1(0);
    events_asked = EPOLLIN;
    if (strcmp(argv[2], "edge") == 0)
        events_asked |= EPOLLET;
    if (strcmp(argv[2], "oneshot") == 0)
        events_asked |= EPOLLONESHOT;
    signal(SIGALRM, show);
    alarm(40);
    for (int kind = 0; kind < KINDS; kind++) {
        struct pair *pair = &pairs[kind];
        pair->kind = kind;
        pair->far = socket(AF_INET, SOCK_STREAM, 0);
        expect(connect(pair->far, (struct sockaddr *)&address, length) == 0, "connect");
        pair->near = accept(listener, NULL, NULL);
        setsockopt(pair->near, IPPROTO_TCP, 1, &one, sizeof one);
        struct epoll_event event = {.events = events_asked, .data.u64 = datas[0]};
        if (kind == BY_EPOLL)
            expect(epoll_ctl(instance, EPOLL_CTL_ADD, pair->near, &event) == 0, "epoll_ctl");
        pthread_t thread;
        expect(pthread_create(&thread, NULL, answer, pair) == 0, "pthread_create");
    }
    for (int kind = 0; kind < KINDS; kind++)
        while (pairs[kind].thread == 0)
            usleep(100);
    if (atoi(argv[3]))
        in_motion();
    else
        in_quiet();
    static const char over[] = "all bytes came back\n";
    expect(write(1, over, sizeof over - 1) > 0, "write");
    _exit(0);
}
