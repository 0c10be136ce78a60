/* The two sides of a test in phases; see peer.c. A scenario accepts one connection, answers its
 * frames, and changes its process between two phases. Every answer contains the letter of the
 * process that gave it. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST 4096

struct frame {
    uint32_t number;
    uint16_t length; /* of what follows */
    uint8_t last;    /* of its phase */
    uint8_t who;     /* in an answer */
};

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    _exit(1);
}

static void expect(int holds, const char *what) {
    if (!holds)
        fail(what);
}

/* Reads `length` bytes. Returns 0 at the end of the stream. */
static int read_all(int fd, void *buffer, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t count = read(fd, (char *)buffer + done, length - done);
        if (count == 0)
            return 0;
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return -1;
        done += count;
    }
    return 1;
}

static int write_all(int fd, const void *buffer, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t count = write(fd, (const char *)buffer + done, length - done);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return -1;
        done += count;
    }
    return 1;
}

__attribute__((unused)) static char pattern(uint32_t number, size_t at) {
    return (char)(number * 31 + at * 7);
}

/* Answers frames until the phase ends (returns 1) or the peer has closed the connection (returns
 * 0). */
__attribute__((unused)) static int serve(int fd, char who) {
    struct {
        struct frame head;
        char body[MOST];
    } message;
    for (;;) {
        int got = read_all(fd, &message.head, sizeof message.head);
        if (got <= 0)
            return 0;
        expect(message.head.length <= MOST, "a frame of that length");
        if (message.head.length > 0)
            expect(read_all(fd, message.body, message.head.length) > 0, "the rest of a frame");
        message.head.who = who;
        if (write_all(fd, &message, sizeof message.head + message.head.length) < 0)
            return 0;
        if (message.head.last)
            return 1;
    }
}

static int listen_on(int port) {
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    expect(bind(listener, (struct sockaddr *)&address, sizeof address) == 0, "bind");
    expect(listen(listener, 16) == 0, "listen");
    return listener;
}

/* Listens, prints "ready", and accepts one connection. */
__attribute__((unused)) static int accept_one(int port) {
    int listener = listen_on(port);
    printf("ready\n");
    fflush(stdout);
    int connection = accept(listener, NULL, NULL);
    expect(connection >= 0, "accept");
    close(listener);
    return connection;
}

__attribute__((unused)) static void wait_for(pid_t child) {
    int status = 0;
    expect(waitpid(child, &status, 0) == child, "waitpid");
    if (WIFEXITED(status))
        printf("a child exited with %d\n", WEXITSTATUS(status));
    else
        printf("a child was killed by signal %d\n", WTERMSIG(status));
    fflush(stdout);
}

struct scenario {
    const char *name;
    void (*run)(int connection);
};

/* Runs the scenario on the command line: PROGRAM SCENARIO PORT */
__attribute__((unused)) static int run_scenario(int argc, char **argv, const struct scenario *all, size_t count) {
    for (size_t index = 0; argc >= 3 && index < count; index++)
        if (strcmp(all[index].name, argv[1]) == 0) {
            all[index].run(accept_one(atoi(argv[2])));
            return 0;
        }
    fprintf(stderr, "no such scenario\n");
    return 2;
}

#define RUN(argc, argv, all) run_scenario(argc, argv, all, sizeof(all) / sizeof *(all))
