// An echo server with one thread and a level-triggered epoll instance: `epoll_echo HOST:PORT`. The
// source is the same for every libc. It speaks the protocol of the bench's synthetic servers, and
// ends with its standard input.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static void check(int result, const char *what) {
    if (result < 0) {
        perror(what);
        exit(1);
    }
}

// Sends back the received bytes in one call. A client has at most one message in flight on a
// connection, for which there is room.
static int answer(int connection) {
    static char buffer[65536];
    ssize_t count = recv(connection, buffer, sizeof buffer, 0);
    if (count < 0)
        return errno == EAGAIN;
    for (ssize_t sent = 0; sent < count;) {
        ssize_t more = send(connection, buffer + sent, count - sent, MSG_NOSIGNAL);
        if (more < 0 && errno != EAGAIN)
            return 0;
        sent += more < 0 ? 0 : more;
    }
    return count > 0;
}

int main(int argc, char **argv) {
    char *port = argc > 1 ? strrchr(argv[1], ':') : NULL;
    if (!port)
        return 2;
    *port = 0;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(port + 1))};
    inet_pton(AF_INET, argv[1], &address.sin_addr);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    check(bind(listener, (struct sockaddr *)&address, sizeof address), "bind");
    check(listen(listener, 512), "listen");
    socklen_t len = sizeof address;
    check(getsockname(listener, (struct sockaddr *)&address, &len), "getsockname");
    printf("ready %s:%d\n", argv[1], ntohs(address.sin_port));
    fflush(stdout);
    int set = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event events[64], wanted = {.events = EPOLLIN};
    wanted.data.fd = listener;
    check(epoll_ctl(set, EPOLL_CTL_ADD, listener, &wanted), "epoll_ctl");
    wanted.data.fd = 0;
    check(epoll_ctl(set, EPOLL_CTL_ADD, 0, &wanted), "epoll_ctl");
    for (;;) {
        int count = epoll_wait(set, events, 64, -1);
        for (int index = 0; index < count; index++) {
            int ready = events[index].data.fd;
            if (ready == 0)
                return 0;
            if (ready == listener) {
                int connection = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
                check(connection, "accept");
                setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                wanted.data.fd = connection;
                check(epoll_ctl(set, EPOLL_CTL_ADD, connection, &wanted), "epoll_ctl");
            } else if (!answer(ready)) {
                close(ready);
            }
        }
    }
}
