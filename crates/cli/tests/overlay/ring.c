/* Programs that have an io_uring.
 *
 * ring serve PORT FIRST: accepts FIRST connections with accept, and the others with an io_uring. The
 * answer is "PEER LOCAL BYTES": the addresses from accept and getsockname, and the received bytes.
 *
 * ring connect ADDRESS PORT plain|fixed|closed|polled|ring: connects, sends, receives, and prints
 * the answer. The word says how the io_uring refers to the socket before there is a connection:
 *
 *   plain   not at all; it only sends and receives
 *   fixed   as a registered file
 *   closed  as a registered file, and the io_uring's own descriptor is closed
 *   polled  by a poll request
 *   ring    by the request that connects */
#include <arpa/inet.h>
#include <liburing.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static struct io_uring ring;

static void make_ring(void) {
    if (io_uring_queue_init(8, &ring, 0) != 0) exit(3);
}

/* Submits the prepared entry, and returns its result. */
static int await(void) {
    struct __kernel_timespec limit = {.tv_sec = 10};
    struct io_uring_cqe *done;
    io_uring_submit(&ring);
    if (io_uring_wait_cqe_timeout(&ring, &done, &limit) != 0) exit(4);
    int result = done->res;
    io_uring_cqe_seen(&ring, done);
    return result;
}

static struct io_uring_sqe *entry(void) {
    return io_uring_get_sqe(&ring);
}

static void serve(int fd, struct sockaddr_in *peer, int by_ring) {
    struct sockaddr_in own;
    socklen_t length = sizeof own;
    char bytes[100] = {0}, host[INET_ADDRSTRLEN], answer[300];
    if (by_ring) {
        io_uring_prep_recv(entry(), fd, bytes, sizeof bytes - 1, 0);
        await();
    } else if (read(fd, bytes, sizeof bytes - 1) < 0) {
        exit(5);
    }
    getsockname(fd, (struct sockaddr *)&own, &length);
    inet_ntop(AF_INET, &peer->sin_addr, host, sizeof host);
    int said = snprintf(answer, sizeof answer, "%s:%d ", host, ntohs(peer->sin_port));
    inet_ntop(AF_INET, &own.sin_addr, host, sizeof host);
    said += snprintf(answer + said, sizeof answer - said, "%s:%d %s", host, ntohs(own.sin_port), bytes);
    if (by_ring) {
        io_uring_prep_send(entry(), fd, answer, said, 0);
        await();
    } else if (write(fd, answer, said) != said) {
        exit(5);
    }
    close(fd);
}

static int listen_at(int port, int first) {
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(port)}, peer;
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&any, sizeof any) != 0 || listen(listener, 128) != 0) return 2;
    puts("listening");
    fflush(stdout);
    for (int count = 0;; count++) {
        socklen_t length = sizeof peer;
        if (count < first) {
            serve(accept(listener, (struct sockaddr *)&peer, &length), &peer, 0);
            continue;
        }
        if (count == first) {
            make_ring();
            puts("a ring");
            fflush(stdout);
        }
        struct __kernel_timespec limit = {.tv_sec = 60};
        struct io_uring_cqe *done;
        io_uring_prep_accept(entry(), listener, (struct sockaddr *)&peer, &length, 0);
        io_uring_submit(&ring);
        if (io_uring_wait_cqe_timeout(&ring, &done, &limit) != 0 || done->res < 0) return 4;
        int fd = done->res;
        io_uring_cqe_seen(&ring, done);
        serve(fd, &peer, 1);
    }
}

static int connect_to(const char *host, int port, const char *how) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), closed = strcmp(how, "closed") == 0;
    int fixed = closed || strcmp(how, "fixed") == 0;
    char answer[300] = {0};
    inet_pton(AF_INET, host, &to.sin_addr);
    make_ring();
    if (fixed && io_uring_register_files(&ring, &fd, 1) != 0) return 5;
    if (closed && (io_uring_register_ring_fd(&ring) != 1 || close(ring.ring_fd) != 0)) return 5;
    if (strcmp(how, "polled") == 0) {
        /* The poll request waits for bytes before there is a connection. */
        struct io_uring_sqe *poll = entry();
        io_uring_prep_poll_multishot(poll, fd, POLLIN);
        io_uring_submit(&ring);
        struct io_uring_cqe *seen;
        if (io_uring_wait_cqe(&ring, &seen) != 0) return 5;
        io_uring_cqe_seen(&ring, seen);
    }
    if (strcmp(how, "ring") == 0) {
        io_uring_prep_connect(entry(), fd, (struct sockaddr *)&to, sizeof to);
        if (await() != 0) return 6;
    } else if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0) {
        return 6;
    }
    if (strcmp(how, "polled") == 0) {
        if (write(fd, "bytes", 5) != 5) return 5;
        for (;;) {
            struct __kernel_timespec limit = {.tv_sec = 10};
            struct io_uring_cqe *seen;
            if (io_uring_wait_cqe_timeout(&ring, &seen, &limit) != 0) return 4;
            int events = seen->res;
            io_uring_cqe_seen(&ring, seen);
            if (events > 0 && events & POLLIN) break;
        }
        if (read(fd, answer, sizeof answer - 1) <= 0) return 5;
    } else {
        struct io_uring_sqe *send = entry();
        io_uring_prep_send(send, fixed ? 0 : fd, "bytes", 5, 0);
        if (fixed) send->flags |= IOSQE_FIXED_FILE;
        if (await() != 5) return 5;
        struct io_uring_sqe *receive = entry();
        io_uring_prep_recv(receive, fixed ? 0 : fd, answer, sizeof answer - 1, 0);
        if (fixed) receive->flags |= IOSQE_FIXED_FILE;
        if (await() <= 0) return 5;
    }
    puts(answer);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "serve") == 0) return listen_at(atoi(argv[2]), atoi(argv[3]));
    if (argc == 5 && strcmp(argv[1], "connect") == 0) return connect_to(argv[2], atoi(argv[3]), argv[4]);
    return 1;
}
