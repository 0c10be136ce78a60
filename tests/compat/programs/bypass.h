/* A connection of this program, which attaches after both ends have used it for a while, and
 * calls that the shim does not see. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static struct sockaddr_in at(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

__attribute__((unused)) static int listen_at(int port) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = at(port);
    if (bind(fd, (void *)&address, sizeof address) || listen(fd, 99)) exit(3);
    return fd;
}

__attribute__((unused)) static int connect_to(int port) {
    for (int tries = 0; tries < 1500; tries++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        struct sockaddr_in address = at(port);
        if (!connect(fd, (void *)&address, sizeof address)) return fd;
        close(fd);
        usleep(20000);
    }
    exit(3);
}

__attribute__((unused)) static void put(int fd, const char *from, size_t len) {
    while (len) {
        ssize_t count = write(fd, from, len);
        if (count < 0) exit(4);
        from += count;
        len -= count;
    }
}

__attribute__((unused)) static void get(int fd, char *to, size_t len) {
    while (len) {
        ssize_t count = read(fd, to, len);
        if (count <= 0) exit(5);
        to += count;
        len -= count;
    }
}

/* Makes enough exchanges for both ends to be offered and attached. */
__attribute__((unused)) static void warm(int fd, int asks) {
    char one = 0;
    for (int round = 0; round < 400; round++) {
        if (asks) put(fd, "w", 1);
        get(fd, &one, 1);
        if (!asks) put(fd, "w", 1);
        if (round < 20) usleep(2000);
    }
}
