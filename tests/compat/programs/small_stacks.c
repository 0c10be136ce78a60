/* Threads with the smallest possible stack connect, accept and use connections in many ways. So
 * does a handler on a signal stack that has 8 KiB in addition to the kernel's frame. Prints
 * "fine", and on standard error the stack depth of each. usage: small_stacks PORT */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef AT_MINSIGSTKSZ
#define AT_MINSIGSTKSZ 51
#endif

enum { ROUNDS = 400, CONNECTIONS = 3, PATTERN = 0x5a, ALTERNATE = 8192, LEAST = 16384 };

static struct sockaddr_in at = { .sin_family = AF_INET };
static int listener, in_handler;

static void must(int good, const char *what)
{
    if (!good) {
        /* stdio needs too much stack. */
        ssize_t ignored = write(2, what, strlen(what));
        _exit(1 + (ignored < 0));
    }
}

static void *fresh(size_t size)
{
    void *stack = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(stack != MAP_FAILED, "mmap\n");
    return memset(stack, PATTERN, size);
}

static size_t used(const unsigned char *stack, size_t size)
{
    size_t untouched = 0;
    while (untouched < size && stack[untouched] == PATTERN)
        untouched++;
    return size - untouched;
}

/* Sends one byte there and back, in a different way each time. */
static void exchange(int fd, int set, int way)
{
    char byte = 'x', back = 0;
    struct iovec one = { &byte, 1 }, other = { &back, 1 };
    struct msghdr out = { .msg_iov = &one, .msg_iovlen = 1 }, in = { .msg_iov = &other, .msg_iovlen = 1 };
    struct pollfd polled = { fd, POLLIN, 0 };
    struct timeval while_ = { 20, 0 };
    struct epoll_event event;
    fd_set readable;
    ssize_t sent = 0, got = 0;

    switch (way % 4) {
    case 0: sent = write(fd, &byte, 1); break;
    case 1: sent = send(fd, &byte, 1, MSG_NOSIGNAL); break;
    case 2: sent = writev(fd, &one, 1); break;
    case 3: sent = sendmsg(fd, &out, 0); break;
    }
    must(sent == 1, "send\n");
    switch (way / 4 % 4) {
    case 0: must(poll(&polled, 1, 20000) == 1, "poll\n"); break;
    case 1:
        FD_ZERO(&readable);
        FD_SET(fd, &readable);
        must(select(fd + 1, &readable, NULL, NULL, &while_) == 1, "select\n");
        break;
    case 2: must(epoll_wait(set, &event, 1, 20000) == 1, "epoll_wait\n"); break;
    }
    switch (way / 16 % 4) {
    case 0: got = read(fd, &back, 1); break;
    case 1: got = recv(fd, &back, 1, 0); break;
    case 2: got = readv(fd, &other, 1); break;
    case 3: got = recvmsg(fd, &in, 0); break;
    }
    must(got == 1 && back == 'x', "receive\n");
}

static void *client(void *unused)
{
    for (int number = 0; number < CONNECTIONS; number++) {
        struct epoll_event event = { .events = EPOLLIN };
        int fd = socket(AF_INET, SOCK_STREAM, 0), set = epoll_create1(0);
        must(!connect(fd, (void *)&at, sizeof at), "connect\n");
        must(!epoll_ctl(set, EPOLL_CTL_ADD, fd, &event), "epoll_ctl\n");
        for (int way = 0; way < ROUNDS; way++) {
            exchange(fd, set, way);
            /* Wait for messages of the broker. */
            if (way % 50 == 0)
                usleep(5000);
        }
        /* Let the test see the transport. */
        usleep(200000);
        /* Fall back to TCP: by a duplicate, and a call that lanes do not support. */
        int name = dup(fd);
        must(name >= 0 && !close(fd), "dup\n");
        exchange(name, set, 0);
        must(!shutdown(name, SHUT_WR) && !close(name) && !close(set), "close\n");
    }
    return unused;
}

static void *server(void *unused)
{
    for (int number = 0; number < CONNECTIONS + 1; number++) {
        char byte;
        int fd = accept(listener, NULL, NULL);
        must(fd >= 0, "accept\n");
        while (read(fd, &byte, 1) == 1)
            must(write(fd, &byte, 1) == 1, "echo\n");
        close(fd);
    }
    return unused;
}

static int handled_fd, handled_set;

static void handler(int signal)
{
    (void)signal;
    exchange(handled_fd, handled_set, in_handler++);
}

/* A thread whose handler uses a connection, on a separate signal stack. */
static void *signalled(void *alternate)
{
    size_t kernels = getauxval(AT_MINSIGSTKSZ);
    stack_t stack = { .ss_sp = alternate, .ss_size = kernels + ALTERNATE };
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_ONSTACK };
    struct epoll_event event = { .events = EPOLLIN };
    must(!sigaltstack(&stack, NULL) && !sigaction(SIGUSR1, &action, NULL), "sigaltstack\n");
    handled_fd = socket(AF_INET, SOCK_STREAM, 0);
    handled_set = epoll_create1(0);
    must(!connect(handled_fd, (void *)&at, sizeof at), "connect\n");
    must(!epoll_ctl(handled_set, EPOLL_CTL_ADD, handled_fd, &event), "epoll_ctl\n");
    for (int way = 0; way < ROUNDS; way++)
        raise(SIGUSR1);
    close(handled_fd);
    stack.ss_flags = SS_DISABLE;
    must(!sigaltstack(&stack, NULL), "sigaltstack\n");
    return NULL;
}

static pthread_t start(void *(*body)(void *), void *argument, void *stack, size_t size)
{
    pthread_attr_t attributes;
    pthread_t thread;
    must(!pthread_attr_init(&attributes) && !pthread_attr_setstack(&attributes, stack, size), "attributes\n");
    must(!pthread_create(&thread, &attributes, body, argument), "pthread_create\n");
    return thread;
}

int main(int count, char **arguments)
{
    /* musl allows 2 KiB, in which the 8 KiB of the library have no place (docs/differences.md). */
    size_t least = PTHREAD_STACK_MIN < LEAST ? LEAST : PTHREAD_STACK_MIN, kernels = getauxval(AT_MINSIGSTKSZ);
    void *stacks[] = { fresh(least), fresh(least), fresh(least), fresh(kernels + ALTERNATE) };
    int on = 1;

    must(count == 2, "usage: small_stacks PORT\n");
    at.sin_port = htons(atoi(arguments[1]));
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    must(!bind(listener, (void *)&at, sizeof at) && !listen(listener, 8), "listen\n");
    pthread_t serving = start(server, NULL, stacks[0], least);
    pthread_join(start(client, NULL, stacks[1], least), NULL);
    pthread_join(start(signalled, stacks[3], stacks[2], least), NULL);
    pthread_join(serving, NULL);
    fprintf(stderr, "of %zu: server %zu, client %zu, with handler %zu; of %zu for a handler: %zu\n", least,
            used(stacks[0], least), used(stacks[1], least), used(stacks[2], least), kernels + ALTERNATE,
            used(stacks[3], kernels + ALTERNATE));
    puts("fine");
    return 0;
}
