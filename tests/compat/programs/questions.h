/* Questions about calls that are refused: their results, errno, and the bytes that the
 * connection still holds. Both ends of a connection are in this process. Prints one line for
 * each question, which must be the same without shunt. */
#pragma once
#include "lane.h"
#include <aio.h>
#include <limits.h>
#include <linux/aio_abi.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>

/* The value of errno before a call. A call that succeeds must not change it. */
#define UNTOUCHED 4242

static int listener, ours, theirs;

#define ASK(label, call)                                                                                               \
    do {                                                                                                               \
        errno = UNTOUCHED;                                                                                             \
        long result_ = (long)(call);                                                                                   \
        answer(label, result_, errno);                                                                                 \
    } while (0)

static void answer(const char *label, long result, int error)
{
    printf("%s: %ld", label, result);
    if (error != UNTOUCHED)
        printf(", errno %d", error);
    printf("\n");
    fflush(stdout);
}

static inline void listen_on(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 8))
        die("listen");
}

static inline void use(int rounds)
{
    char byte = 0;
    for (int round = 0; round < rounds; round++) {
        put(ours, &byte, 1);
        get(theirs, &byte, 1);
        put(theirs, &byte, 1);
        get(ours, &byte, 1);
    }
}

static inline void connect_anew(void)
{
    struct sockaddr_in address;
    socklen_t len = sizeof address;
    getsockname(listener, (void *)&address, &len);
    ours = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(ours, (void *)&address, sizeof address))
        die("connect");
    theirs = accept(listener, NULL, NULL);
    /* Bytes that are sent arrive immediately. */
    setsockopt(ours, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    setsockopt(theirs, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
}

/* Opens the first connection, and waits until it is on the transport that the test wants. */
static inline void first_connection(const char *gate)
{
    connect_anew();
    do
        use(8);
    while (access(gate, F_OK) != 0);
}

/* Opens another connection, and gives it time to attach. */
static inline void next_connection(void)
{
    close(ours), close(theirs);
    connect_anew();
    for (int pause = 0; pause < 4; pause++, pause_ms(3))
        use(8);
}

/* Sends bytes that are there when a question is asked. */
static inline void lay(const char *text)
{
    struct pollfd there = {theirs, POLLIN, 0};
    put(ours, text, strlen(text));
    poll(&there, 1, 5000);
}

/* Prints the unread bytes at both ends. */
static inline void show_left(const char *label)
{
    char bytes[4096];
    for (int turn = 0; turn < 2; turn++) {
        ssize_t count = recv(turn ? ours : theirs, bytes, sizeof bytes, MSG_DONTWAIT);
        int error = count < 0 ? errno : 0;
        printf("%s: left %s %zd, errno %d, \"%.*s\"\n", label, turn ? "here" : "there", count, error,
               count > 0 ? (int)(count < 30 ? count : 30) : 0, bytes);
    }
    fflush(stdout);
}
