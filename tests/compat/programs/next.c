// A thread polls a connection that falls back to TCP in the meantime. Another connection then
// reuses its place on shared memory. A thread that waits for that connection must be woken,
// whatever event the first thread receives later.

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MESSAGE = 16, ROUNDS = 60, LATER = 4 };

static void must(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static void give(int fd) {
    static const char message[MESSAGE] = "next";
    must(write(fd, message, MESSAGE) == MESSAGE, "write");
}

static void take(int fd) {
    char message[MESSAGE];
    must(recv(fd, message, MESSAGE, MSG_WAITALL) == MESSAGE, "recv");
}

static void ask(int fd, int rounds) {
    for (int round = 0; round < rounds; round++) {
        give(fd);
        take(fd);
        // The broker answers during the pauses.
        usleep(300);
    }
}

static void answer(int fd, int rounds) {
    for (int round = 0; round < rounds; round++) {
        take(fd);
        give(fd);
    }
}

static void *sleep_for_the_end(void *argument) {
    struct pollfd first = {.fd = *(int *)argument, .events = POLLPRI};
    must(poll(&first, 1, -1) == 1 && first.revents & POLLHUP, "poll");
    return NULL;
}

static int serve(int listener, int go) {
    char byte;
    int first = accept(listener, NULL, NULL);
    answer(first, ROUNDS + LATER);
    int second = accept(listener, NULL, NULL);
    answer(second, ROUNDS);
    must(read(go, &byte, 1) == 1, "read");
    usleep(100 * 1000);
    // The thread is woken, and sleeps again.
    shutdown(first, SHUT_WR);
    usleep(100 * 1000);
    give(second);
    take(second);
    return 0;
}

static int dial(const struct sockaddr_in *address) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    must(connect(fd, (const struct sockaddr *)address, sizeof *address) == 0, "connect");
    return fd;
}

int main(int count, char **arguments) {
    must(count == 2, "a port");
    alarm(20);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(arguments[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int go[2];
    must(pipe(go) == 0, "pipe");
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)) == 0, "setsockopt");
    must(bind(listener, (struct sockaddr *)&address, sizeof address) == 0, "bind");
    must(listen(listener, 2) == 0, "listen");
    pid_t server = fork();
    if (server == 0) {
        alarm(20);
        exit(serve(listener, go[0]));
    }

    int first = dial(&address);
    ask(first, ROUNDS);
    pthread_t sleeper;
    must(pthread_create(&sleeper, NULL, sleep_for_the_end, &first) == 0, "pthread_create");
    usleep(100 * 1000);
    // The connection falls back to TCP, and both ends release their place.
    must(setsockopt(first, SOL_SOCKET, SO_RCVLOWAT, &(int){2}, sizeof(int)) == 0, "setsockopt");
    ask(first, LATER);
    int second = dial(&address);
    ask(second, ROUNDS);
    must(write(go[1], "", 1) == 1, "write");
    take(second);
    give(second);
    must(shutdown(first, SHUT_WR) == 0, "shutdown");
    must(pthread_join(sleeper, NULL) == 0, "pthread_join");
    int status;
    must(waitpid(server, &status, 0) == server && status == 0, "the server");
    puts("everybody was woken");
    return 0;
}
