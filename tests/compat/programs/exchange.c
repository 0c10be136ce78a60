/* A server with threads and its clients in one process. Each client sends messages of all sizes
 * and compares the answers. Prints a checksum over all of them. Uses ordinary libc calls only. */

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CLIENTS = 3, MESSAGES = 400, LARGEST = 40000 };

static struct sockaddr_in address;
static int listener;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void put(int fd, const char *from, size_t len) {
    for (ssize_t count; len > 0; from += count, len -= count)
        if ((count = write(fd, from, len)) <= 0)
            fail("write");
}

static void get(int fd, char *to, size_t len) {
    for (ssize_t count; len > 0; to += count, len -= count)
        if ((count = read(fd, to, len)) <= 0)
            fail("read");
}

static void *echo(void *argument) {
    char bytes[1 << 14];
    int fd = (intptr_t)argument;
    ssize_t count;
    while ((count = read(fd, bytes, sizeof bytes)) > 0)
        put(fd, bytes, count);
    if (count < 0)
        fail("the server's read");
    close(fd);
    return NULL;
}

static void *serve(void *unused) {
    for (int number = 0; number < CLIENTS; number++) {
        pthread_t thread;
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            fail("accept");
        pthread_create(&thread, NULL, echo, (void *)(intptr_t)fd);
        pthread_detach(thread);
    }
    return unused;
}

static void *client(void *argument) {
    uint32_t number = (intptr_t)argument, seed = number + 1;
    uintptr_t sum = 0;
    static __thread char sent[LARGEST], got[LARGEST];
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address))
        fail("connect");
    for (int message = 0; message < MESSAGES; message++) {
        seed = seed * 1664525 + 1013904223;
        size_t len = 1 + (message % 20 == 7 ? (seed >> 8) % LARGEST : (seed >> 8) % 500);
        if (len > LARGEST)
            len = LARGEST;
        for (size_t at = 0; at < len; at++)
            sent[at] = seed + at * 7;
        put(fd, sent, len);
        get(fd, got, len);
        if (memcmp(sent, got, len)) {
            fprintf(stderr, "client %u, message %d: other bytes came back\n", number, message);
            exit(1);
        }
        sum = sum * 31 + len + (unsigned char)got[len - 1];
    }
    shutdown(fd, SHUT_WR);
    if (read(fd, got, 1) != 0)
        fail("the end of file");
    close(fd);
    return (void *)sum;
}

int main(void) {
    pthread_t server, clients[CLIENTS];
    socklen_t len = sizeof address;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, len) || listen(listener, CLIENTS) ||
        getsockname(listener, (struct sockaddr *)&address, &len))
        fail("listen");
    pthread_create(&server, NULL, serve, NULL);
    for (int number = 0; number < CLIENTS; number++)
        pthread_create(&clients[number], NULL, client, (void *)(intptr_t)number);
    for (int number = 0; number < CLIENTS; number++) {
        void *sum;
        pthread_join(clients[number], &sum);
        printf("client %d: %lx\n", number, (unsigned long)sum);
    }
    return 0;
}
