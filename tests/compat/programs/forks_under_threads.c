/* Forks while other threads create, watch, duplicate and close connections. The child must find
 * consistent state, whatever a thread was changing at that moment. A child uses what it has
 * inherited, and new connections. Prints how many children succeeded. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define THREADS 4
#define CHILDREN 300

static struct sockaddr_in address = {.sin_family = AF_INET};
static int listener, kept[2], watching;
static atomic_int over;

static void need(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        _exit(2);
    }
}

/* Stores an end of a new connection and an accepted one. Several threads accept from one listener,
 * so the two may belong to different connections. */
static void connection(int ends[2])
{
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    need(ends[0] >= 0, "socket");
    need(connect(ends[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
    ends[1] = accept(listener, NULL, NULL);
    need(ends[1] >= 0, "accept");
}

/* One connection: bytes in both directions, a private epoll instance and a shared one, and a
 * duplicate. */
static void one_life(int with_shared_set)
{
    int ends[2], set = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLOUT};
    char byte = 'x';
    connection(ends);
    need(set >= 0, "epoll_create1");
    need(epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event) == 0, "epoll_ctl");
    if (with_shared_set)
        need(epoll_ctl(watching, EPOLL_CTL_ADD, ends[1], &event) == 0, "epoll_ctl of the shared set");
    int copy = dup(ends[0]);
    need(copy >= 0, "dup");
    need(epoll_wait(set, &event, 1, 5000) == 1, "epoll_wait");
    need(write(copy, &byte, 1) == 1 && write(ends[1], &byte, 1) == 1, "write");
    close(copy);
    close(set);
    close(ends[0]);
    close(ends[1]);
}

static void *live(void *unused)
{
    (void)unused;
    while (!atomic_load(&over))
        one_life(1);
    return NULL;
}

static void child(void)
{
    struct epoll_event events[8];
    char byte = 0;
    need(send(kept[0], "y", 1, 0) == 1, "send on what was inherited");
    need(recv(kept[1], &byte, 1, 0) == 1 && byte == 'y', "recv on what was inherited");
    need(epoll_wait(watching, events, 8, 0) >= 0, "epoll_wait on what was inherited");
    for (int fd = 0; fd < 256; fd++)
        if (fd != listener && fd != watching && fd > 2)
            close(fd);
    /* The parent's threads accept from the listener too, so the child creates another. */
    close(listener);
    socklen_t len = sizeof address;
    address.sin_port = 0;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    need(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 8) == 0, "listen");
    need(getsockname(listener, (struct sockaddr *)&address, &len) == 0, "getsockname");
    for (int count = 0; count < 3; count++)
        one_life(0);
    _exit(0);
}

/* Returns the child's status, or -1 if it hangs. */
static int ended(pid_t pid)
{
    int status = -1;
    for (int tries = 0; tries < 2000; tries++) {
        if (waitpid(pid, &status, WNOHANG) == pid)
            return status;
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return -1;
}

int main(void)
{
    pthread_t threads[THREADS];
    socklen_t len = sizeof address;
    int well = 0;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    need(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 64) == 0, "listen");
    need(getsockname(listener, (struct sockaddr *)&address, &len) == 0, "getsockname");
    connection(kept);
    for (int count = 0; count < 2000; count++) {
        char byte = 'k';
        need(send(kept[0], &byte, 1, 0) == 1 && recv(kept[1], &byte, 1, 0) == 1, "a round");
    }
    watching = epoll_create1(0);
    need(watching >= 0, "epoll_create1");
    for (int count = 0; count < THREADS; count++)
        need(pthread_create(&threads[count], NULL, live, NULL) == 0, "pthread_create");
    for (int count = 0; count < CHILDREN; count++) {
        pid_t pid = fork();
        need(pid >= 0, "fork");
        if (pid == 0)
            child();
        int status = ended(pid);
        if (status == 0)
            well++;
        else
            fprintf(stderr, "child %d: status %d\n", count, status);
    }
    atomic_store(&over, 1);
    for (int count = 0; count < THREADS; count++)
        pthread_join(threads[count], NULL);
    printf("%d of %d children ended well\n", well, CHILDREN);
    return 0;
}
