/* A server that `shunt attach` enters while it works. It answers each byte with its successor, for
 * as long as its standard input, a directory entry, lacks the file "end".
 *
 * running PORT THREADS STYLE
 *   epoll     threads wait in one epoll instance that exists from the beginning, for ever
 *   each      each thread has another instance, and the listener is in all of them
 *   signals   as `epoll`, and a timer interrupts the threads all the time
 *   blocking  each thread accepts a connection and serves it
 *   masked    as `epoll`, and a signal is blocked except during the waits
 *   handler   no server: it waits in a handler of a signal
 *   vfork     no server: its child by vfork waits
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SHARE 1000

/* Copies of addresses of libc's functions, which no relocation describes. */
struct calls {
    ssize_t (*read)(int, void *, size_t);
    ssize_t (*write)(int, const void *, size_t);
    int (*wait)(int, struct epoll_event *, int, int);
    int (*close)(int);
};

static struct calls *calls;
static int listener, shared;
static const char *style;
static volatile sig_atomic_t ticks;
static int interrupted;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void tick(int signal) {
    (void)signal;
    ticks++;
}

static int serve(int fd) {
    char bytes[4096];
    ssize_t got = calls->read(fd, bytes, sizeof bytes);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return 1;
    if (got < 0 && errno != ECONNRESET) {
        fprintf(stderr, "descriptor %d: ", fd);
        die("read");
    }
    if (got <= 0) {
        calls->close(fd);
        return 0;
    }
    for (ssize_t at = 0; at < got; at++)
        bytes[at]++;
    for (ssize_t at = 0; at < got;) {
        ssize_t put = calls->write(fd, bytes + at, got - at);
        if (put < 0 && errno != EAGAIN && errno != EINTR)
            die("write");
        at += put > 0 ? put : 0;
    }
    return 1;
}

static void add(int instance, int fd, unsigned events) {
    struct epoll_event event = {.events = events, .data.fd = fd};
    if (epoll_ctl(instance, EPOLL_CTL_ADD, fd, &event) != 0)
        die("epoll_ctl");
}

static int wait_masked(int instance, struct epoll_event *events, int most, int time) {
    sigset_t none, now;
    sigemptyset(&none);
    int count = epoll_pwait(instance, events, most, time, &none);
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    if (!sigismember(&now, SIGUSR1)) {
        fprintf(stderr, "a wait has changed what is blocked\n");
        interrupted = 1;
    }
    return count;
}

static void wait_in_handler(int signal) {
    (void)signal;
    poll(NULL, 0, -1);
}

static void *by_epoll(void *argument) {
    int instance = argument ? shared : epoll_create1(0);
    if (!argument)
        add(instance, listener, EPOLLIN);
    for (;;) {
        struct epoll_event events[16];
        int count = calls->wait(instance, events, 16, -1);
        if (count < 0 && errno == EINTR && strcmp(style, "signals") == 0)
            continue;
        if (count <= 0) {
            fprintf(stderr, "a wait without end has returned %d: %s\n", count, strerror(errno));
            interrupted = 1;
            continue;
        }
        for (int at = 0; at < count; at++) {
            int fd = events[at].data.fd;
            if (fd == listener) {
                int fresh = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (fresh >= 0)
                    add(instance, fresh, EPOLLIN | EPOLLONESHOT);
            } else if (serve(fd)) {
                struct epoll_event again = {.events = EPOLLIN | EPOLLONESHOT, .data.fd = fd};
                if (epoll_ctl(instance, EPOLL_CTL_MOD, fd, &again) != 0)
                    die("epoll_ctl");
            }
        }
    }
    return NULL;
}

static void *by_blocking(void *argument) {
    (void)argument;
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            die("accept");
        while (serve(fd))
            ;
    }
    return NULL;
}

/* As the threads of allocators and of virtual machines, which wait for minutes. */
static void *by_waiting(void *argument) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
    struct timespec late;
    clock_gettime(CLOCK_REALTIME, &late);
    late.tv_sec += 1000;
    pthread_mutex_lock(&mutex);
    while (pthread_cond_timedwait(&never, &mutex, &late) == 0)
        ;
    return argument;
}

int main(int count, char **arguments) {
    if (count != 4)
        return 2;
    style = arguments[3];
    if (strcmp(style, "handler") == 0) {
        signal(SIGUSR1, wait_in_handler);
        raise(SIGUSR1);
    }
    if (strcmp(style, "vfork") == 0 && vfork() == 0) {
        pause();
        _exit(0);
    }
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    int is_masked = strcmp(style, "masked") == 0;
    if (is_masked)
        pthread_sigmask(SIG_BLOCK, &usr1, NULL);
    calls = malloc(sizeof *calls);
    *calls = (struct calls){read, write, is_masked ? wait_masked : epoll_wait, close};
    int is_blocking = strcmp(style, "blocking") == 0, on = 1;
    listener = socket(AF_INET, SOCK_STREAM | (is_blocking ? 0 : SOCK_NONBLOCK), 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons(atoi(arguments[1])),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 100) != 0)
        die("listen");
    shared = epoll_create1(0);
    add(shared, listener, EPOLLIN);
    if (strcmp(style, "signals") == 0) {
        struct sigaction action = {.sa_handler = tick};
        sigaction(SIGALRM, &action, NULL);
        struct itimerval time = {{0, SHARE}, {0, SHARE}};
        setitimer(ITIMER_REAL, &time, NULL);
    }
    for (int made = 0; made < atoi(arguments[2]); made++) {
        pthread_t thread;
        void *(*run)(void *) = is_blocking ? by_blocking : by_epoll;
        if (pthread_create(&thread, NULL, run, strcmp(style, "each") == 0 ? NULL : calls) != 0)
            die("pthread_create");
    }
    pthread_t waiting;
    if (pthread_create(&waiting, NULL, by_waiting, NULL) != 0)
        die("pthread_create");
    sigset_t term;
    sigemptyset(&term);
    sigaddset(&term, SIGALRM);
    if (strcmp(style, "signals") != 0)
        pthread_sigmask(SIG_BLOCK, &term, NULL);
    /* If its waits are masked, this thread is not the one that `shunt attach` borrows. */
    const struct timespec pause = {0, 20000000};
    while (access("end", F_OK) != 0)
        is_masked ? (void)sigtimedwait(&usr1, NULL, &pause) : (void)usleep(20000);
    return interrupted;
}
