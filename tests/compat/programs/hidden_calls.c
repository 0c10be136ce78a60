// One connection, used by ordinary calls until both ends were seen on shared memory, and then by
// unusual ways to reach a socket: stdio, system calls by number, urings, and aliases of functions.
//
//   hidden_calls client|server PORT SCENARIO GATE LAST_GATE
//
// The server is the subject: 5000 bytes wait for it when it starts to use the scenario's calls.
// Both ends print what they observe, to be compared with TCP.
#define _GNU_SOURCE
#include <aio.h>
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/aio_abi.h>
#include <linux/sched.h>
#include <mqueue.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <pty.h>
#include <resolv.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/fanotify.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <syslog.h>
#include <termios.h>
#include <unistd.h>
#include <utmp.h>

#define BULK 5000
#define LITTLE 700

static int failures;

static void check(int good, const char *what) {
    if (good) return;
    printf("FAILED: %s: %s\n", what, strerror(errno));
    failures++;
}

// ---- aliases and other ways ---------------------------------------------------------------------

typedef ssize_t reader(int, char *, size_t);
typedef ssize_t writer(int, const char *, size_t);

struct scenario {
    const char *name;
    reader *read;
    writer *write;
    int (*close)(int);
    void (*before)(void);  // before the first byte of the connection
};

ssize_t __read(int, void *, size_t);
ssize_t __write(int, const void *, size_t);
ssize_t __send(int, const void *, size_t, int);
int __close(int);
int __poll(struct pollfd *, nfds_t, int);
int __select(int, fd_set *, fd_set *, fd_set *, struct timeval *);
ssize_t __read_chk(int, void *, size_t, size_t);
ssize_t __recv_chk(int, void *, size_t, size_t, int);
ssize_t __recvfrom_chk(int, void *, size_t, size_t, int, struct sockaddr *, socklen_t *);
int __poll_chk(struct pollfd *, nfds_t, int, size_t);
int __ppoll_chk(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *, size_t);
int __dprintf_chk(int, int, const char *, ...);
int __vdprintf_chk(int, int, const char *, va_list);

static ssize_t alias_read(int fd, char *to, size_t len) { return __read(fd, to, len); }
static ssize_t alias_write(int fd, const char *from, size_t len) {
    return len % 2 ? __write(fd, from, len) : __send(fd, from, len, 0);
}
static ssize_t fortified_read(int fd, char *to, size_t len) {
    static int turn;
    struct pollfd one = {fd, POLLIN, 0};
    struct timespec time = {10, 0};
    check(__poll_chk(&one, 1, 10000, sizeof one) == 1 && one.revents == POLLIN, "__poll_chk");
    check(__ppoll_chk(&one, 1, &time, NULL, sizeof one) == 1 && time.tv_sec == 10, "__ppoll_chk");
    check(__poll(&one, 1, 10000) == 1, "__poll");
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    check(__select(fd + 1, &set, NULL, NULL, NULL) == 1, "__select");
    switch (turn++ % 3) {
    case 0: return __read_chk(fd, to, len, len);
    case 1: return __recv_chk(fd, to, len, len, 0);
    default: return __recvfrom_chk(fd, to, len, len, 0, NULL, NULL);
    }
}

// ---- stdio --------------------------------------------------------------------------------------

static FILE *stream;
static int stream_of;

static FILE *opened(int fd, const char *mode) {
    if (!stream) stream = fdopen(fd, mode), stream_of = fd;
    check(stream != NULL && fileno(stream) == fd, "fdopen");
    return stream;
}
static ssize_t stdio_read(int fd, char *to, size_t len) { return fread(to, 1, len, opened(fd, "r+")); }
static ssize_t stdio_write(int fd, const char *from, size_t len) {
    FILE *f = opened(fd, "r+");
    size_t n = fwrite(from, 1, len, f);
    check(fflush(f) == 0, "fflush");
    return n;
}
static ssize_t unbuffered_read(int fd, char *to, size_t len) {
    setvbuf(opened(fd, "r+"), NULL, _IONBF, 0);
    for (size_t i = 0; i < len; i++) to[i] = getc(stream);
    return len;
}
static ssize_t unbuffered_write(int fd, const char *from, size_t len) {
    opened(fd, "r+");
    return fprintf(stream, "%.*s", (int)len, from);
}
// A stream that has read ahead, and plain reads of the bytes behind its buffer.
static ssize_t mixed_read(int fd, char *to, size_t len) {
    static char ahead[512];
    FILE *f = opened(fd, "r");
    setvbuf(f, ahead, _IOFBF, sizeof ahead);
    size_t n = 0;
    while (n < sizeof ahead) to[n++] = getc(f);
    while (n < len) {
        ssize_t got = read(fileno(f), to + n, len - n);
        if (got <= 0) return got;
        n += got;
    }
    return n;
}
static ssize_t line_read(int fd, char *to, size_t len) {
    char *line = NULL;
    size_t room = 0;
    ssize_t got = getline(&line, &room, opened(fd, "r"));
    check(got == (ssize_t)len, "getline");
    memcpy(to, line, len);
    free(line);
    return got;
}
static int stdio_close(int fd) {
    if (stream && stream_of == fd) {
        // These bytes stay in the buffer, and fclose must write them.
        if (fwrite("last", 1, 4, stream) != 4) return -1;
        return fclose(stream);
    }
    return close(fd);
}
static int reopen_close(int fd) {
    opened(fd, "r+");
    if (fwrite("last", 1, 4, stream) != 4) return -1;
    stream = freopen("/dev/null", "r", stream);
    return stream ? fclose(stream) : -1;
}
static int vd(int fd, int checked, const char *format, ...) {
    va_list list;
    va_start(list, format);
    int n = checked ? __vdprintf_chk(fd, 1, format, list) : vdprintf(fd, format, list);
    va_end(list);
    return n;
}
static ssize_t dprintf_write(int fd, const char *from, size_t len) {
    static int turn;
    double half = 0.5, third = 0.25;
    char small[64];
    int tail = snprintf(small, sizeof small, "%.1f%.2f%d", half, third, 7);
    int body = len - tail, n = 0;
    // Floating-point arguments are passed in other registers than the rest.
    switch (turn++ % 4) {
    case 0: n = dprintf(fd, "%.*s%.1f%.2f%d", body, from, half, third, 7); break;
    case 1: n = __dprintf_chk(fd, 1, "%.*s%.1f%.2f%d", body, from, half, third, 7); break;
    case 2: n = vd(fd, 0, "%.*s%.1f%.2f%d", body, from, half, third, 7); break;
    case 3: n = vd(fd, 1, "%.*s%.1f%.2f%d", body, from, half, third, 7); break;
    }
    return n;
}

// The socket becomes stdin and stdout, as in a server started by inetd, and they are restored
// later.
static int saved[2];
static void become_standard(int fd) {
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        saved[i] = fcntl(i, F_DUPFD_CLOEXEC, 100);
        check(dup2(fd, i) == i, "dup2");
    }
}
static void give_standard_back(void) {
    fflush(stdout);
    for (int i = 0; i < 2; i++) check(dup2(saved[i], i) == i && close(saved[i]) == 0, "dup2 back");
}
static ssize_t standard_read(int fd, char *to, size_t len) {
    become_standard(fd);
    setvbuf(stdin, NULL, _IONBF, 0);
    size_t n = fread(to, 1, len, stdin);
    give_standard_back();
    return n;
}
static ssize_t standard_write(int fd, const char *from, size_t len) {
    become_standard(fd);
    ssize_t n = printf("%.*s", (int)len, from);
    give_standard_back();
    return n;
}
// The socket replaces the descriptor of a stream that the program has opened.
static FILE *own;
static void open_own(void) { own = fopen("/dev/null", "r+"); }
static ssize_t placed_write(int fd, const char *from, size_t len) {
    check(dup2(fd, fileno(own)) == fileno(own), "dup2 onto a stream");
    size_t n = fwrite(from, 1, len, own);
    check(fflush(own) == 0, "fflush");
    return n;
}
static int placed_close(int fd) { return close(fd) || fclose(own); }
// A stream that was created before the connection.
static FILE *early;
static ssize_t early_write(int fd, const char *from, size_t len) {
    (void)fd;
    size_t n = fwrite(from, 1, len, early);
    check(fflush(early) == 0, "fflush");
    return n;
}

// ---- system calls by number ---------------------------------------------------------------------

static ssize_t n_read(int fd, char *to, size_t len) { return syscall(SYS_read, fd, to, len); }
static ssize_t n_write(int fd, const char *from, size_t len) { return syscall(SYS_write, fd, from, len); }
static ssize_t n_readv(int fd, char *to, size_t len) {
    struct iovec v[2] = {{to, 1}, {to + 1, len - 1}};
    return syscall(SYS_readv, fd, v, 2);
}
static ssize_t n_writev(int fd, const char *from, size_t len) {
    struct iovec v[2] = {{(char *)from, 1}, {(char *)from + 1, len - 1}};
    return syscall(SYS_writev, fd, v, 2);
}
static ssize_t n_preadv2(int fd, char *to, size_t len) {
    struct iovec v = {to, len};
    return syscall(SYS_preadv2, fd, &v, 1, -1L, -1L, 0);
}
static ssize_t n_pwritev2(int fd, const char *from, size_t len) {
    struct iovec v = {(char *)from, len};
    return syscall(SYS_pwritev2, fd, &v, 1, -1L, -1L, 0);
}
static ssize_t n_recvfrom(int fd, char *to, size_t len) {
    struct sockaddr_storage from;
    socklen_t room = sizeof from;
    ssize_t n = syscall(SYS_recvfrom, fd, to, len, 0, &from, &room);
    check(room == 0, "TCP names no sender");
    return n;
}
static ssize_t n_sendto(int fd, const char *from, size_t len) {
    return syscall(SYS_sendto, fd, from, len, MSG_NOSIGNAL, NULL, 0);
}
static ssize_t n_recvmsg(int fd, char *to, size_t len) {
    struct iovec v = {to, len};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    return syscall(SYS_recvmsg, fd, &m, 0);
}
static ssize_t n_sendmsg(int fd, const char *from, size_t len) {
    struct iovec v = {(char *)from, len};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    return syscall(SYS_sendmsg, fd, &m, MSG_NOSIGNAL);
}
static ssize_t n_recvmmsg(int fd, char *to, size_t len) {
    struct iovec v = {to, len};
    struct mmsghdr m = {.msg_hdr = {.msg_iov = &v, .msg_iovlen = 1}};
    return syscall(SYS_recvmmsg, fd, &m, 1, 0, NULL) == 1 ? (ssize_t)m.msg_len : -1;
}
static ssize_t n_sendmmsg(int fd, const char *from, size_t len) {
    struct iovec v = {(char *)from, len};
    struct mmsghdr m = {.msg_hdr = {.msg_iov = &v, .msg_iovlen = 1}};
    return syscall(SYS_sendmmsg, fd, &m, 1, 0) == 1 ? (ssize_t)m.msg_len : -1;
}
static ssize_t n_splice(int fd, char *to, size_t len) {
    int ends[2];
    check(pipe(ends) == 0, "pipe");
    ssize_t n = syscall(SYS_splice, fd, NULL, ends[1], NULL, len, 0);
    if (n > 0) check(read(ends[0], to, n) == n, "what was spliced");
    close(ends[0]), close(ends[1]);
    return n;
}
static ssize_t n_sendfile(int fd, const char *from, size_t len) {
    FILE *file = tmpfile();
    off_t offset = 0;
    fwrite(from, 1, len, file), fflush(file);
    ssize_t n = syscall(SYS_sendfile, fd, fileno(file), &offset, len);
    fclose(file);
    return n;
}
static int n_close(int fd) { return syscall(SYS_close, fd); }
static int n_close_range(int fd) { return syscall(SYS_close_range, fd, fd, 0); }
static int n_shutdown(int fd) { return syscall(SYS_shutdown, fd, SHUT_WR) || close(fd); }
static int n_dup(int fd) {
    int one = syscall(SYS_dup, fd), two = syscall(SYS_dup2, fd, 200), three = syscall(SYS_dup3, fd, 201, O_CLOEXEC);
    int four = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 300);
    check(one > 0 && two == 200 && three == 201 && four == 300, "dups");
    close(fd);
    check(write(one, "one", 3) == 3 && write(two, "two", 3) == 3, "writes on dups");
    check(write(three, "three", 5) == 5 && write(four, "four", 4) == 4, "writes on dups");
    return close(one) || close(two) || close(three) || close(four);
}
static ssize_t n_options(int fd, char *to, size_t len) {
    int error = -1, on = 1, waiting = 0;
    socklen_t room = sizeof error;
    struct pollfd one = {fd, POLLIN, 0};
    check(poll(&one, 1, 20000) == 1, "poll");
    check(syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_ERROR, &error, &room) == 0 && error == 0, "getsockopt");
    check(syscall(SYS_setsockopt, fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0, "setsockopt");
    check(syscall(SYS_ioctl, fd, FIONREAD, &waiting) == 0 && waiting == (int)len, "FIONREAD");
    check(syscall(SYS_fcntl, fd, F_SETFL, O_NONBLOCK) == 0, "F_SETFL");
    check((syscall(SYS_fcntl, fd, F_GETFL) & O_NONBLOCK) != 0, "F_GETFL");
    ssize_t n = syscall(SYS_read, fd, to, len);
    char beyond;
    check(syscall(SYS_read, fd, &beyond, 1) == -1 && errno == EAGAIN, "a non-blocking read of nothing");
    check(syscall(SYS_fcntl, fd, F_SETFL, 0) == 0, "F_SETFL");
    check(syscall(SYS_fcntl, fd, F_GETOWN) == 0, "F_GETOWN");
    return n;
}
static ssize_t n_ready(int fd, char *to, size_t len) {
    struct pollfd one = {fd, POLLIN, 0};
    struct timespec time = {20, 0};
    struct timeval other = {20, 0};
    unsigned long mask = 0;
    struct { void *mask; size_t size; } pair = {&mask, 8};
    fd_set in, out;
    check(syscall(SYS_poll, &one, 1, 20000) == 1 && one.revents == POLLIN, "poll");
    one.events |= POLLOUT;
    check(syscall(SYS_ppoll, &one, 1, &time, &mask, 8) == 1 && one.revents == (POLLIN | POLLOUT), "ppoll");
    check(time.tv_sec == 19 && time.tv_nsec > 0, "ppoll leaves the time that is left");
    FD_ZERO(&in);
    FD_SET(fd, &in);
    out = in;
    check(syscall(SYS_select, fd + 1, &in, &out, NULL, &other) == 2, "select");
    check(other.tv_sec == 19 && FD_ISSET(fd, &in) && FD_ISSET(fd, &out), "select's sets and time");
    time = (struct timespec){20, 0};
    check(syscall(SYS_pselect6, fd + 1, &in, &out, NULL, &time, &pair) == 2 && time.tv_sec == 19, "pselect6");
    int sets[2] = {syscall(SYS_epoll_create, 1), syscall(SYS_epoll_create1, EPOLL_CLOEXEC)};
    for (int i = 0; i < 2; i++) {
        struct epoll_event event = {EPOLLIN, {.fd = 77}}, seen = {0};
        check(syscall(SYS_epoll_ctl, sets[i], EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
        check(syscall(SYS_epoll_wait, sets[i], &seen, 1, 20000) == 1 && seen.data.fd == 77, "epoll_wait");
        check(syscall(SYS_epoll_pwait, sets[i], &seen, 1, 20000, &mask, 8) == 1, "epoll_pwait");
        time = (struct timespec){20, 0};
        check(syscall(SYS_epoll_pwait2, sets[i], &seen, 1, &time, &mask, 8) == 1, "epoll_pwait2");
        check(syscall(SYS_close, sets[i]) == 0, "closing the set");
    }
    return syscall(SYS_read, fd, to, len);
}
// A socket and an eventfd in one epoll instance have the same user data. They must not be confused.
static ssize_t same_data_read(int fd, char *to, size_t len) {
    int set = epoll_create1(0), other = eventfd(0, EFD_NONBLOCK);
    struct epoll_event of_fd = {EPOLLIN, {.fd = 77}}, of_other = {EPOLLOUT, {.fd = 77}}, seen[4];
    check(epoll_ctl(set, EPOLL_CTL_ADD, other, &of_other) == 0, "an eventfd's registration");
    check(epoll_ctl(set, EPOLL_CTL_ADD, fd, &of_fd) == 0, "a socket's registration");
    struct pollfd one = {.fd = fd, .events = POLLIN};
    check(poll(&one, 1, 20000) == 1, "something to read");
    int in = 0, out = 0;
    for (int tries = 0; tries < 100 && (!in || !out); tries++) {
        int count = epoll_wait(set, seen, 4, 20000);
        for (int i = 0; i < count; i++) {
            check(seen[i].data.fd == 77, "its user data");
            in |= seen[i].events == EPOLLIN;
            out |= seen[i].events == EPOLLOUT;
        }
    }
    check(in && out, "each is reported for itself");
    // The readiness of one must not be reported for the other.
    of_fd.events = of_other.events = 0;
    check(epoll_ctl(set, EPOLL_CTL_MOD, other, &of_other) == 0, "nothing is asked of the eventfd");
    check(epoll_wait(set, seen, 4, 20000) == 1 && seen[0].events == EPOLLIN, "the socket alone");
    check(epoll_ctl(set, EPOLL_CTL_MOD, fd, &of_fd) == 0, "nothing is asked of the socket");
    check(epoll_wait(set, seen, 4, 0) == 0, "neither");
    close(other);
    close(set);
    return read(fd, to, len);
}

// A child that was forked past libc reads, and the parent continues after it.
static long by_fork(void) { return syscall(SYS_fork); }
static long by_clone(void) { return syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, 0); }
static long by_clone3(void) {
    struct clone_args arguments = {.exit_signal = SIGCHLD};
    return syscall(SYS_clone3, &arguments, sizeof arguments);
}
static ssize_t child_reads(long (*make)(void), int fd, char *to, size_t len) {
    int ends[2];
    check(pipe(ends) == 0, "pipe");
    long pid = make();
    if (pid == 0) {
        ssize_t n = read(fd, to, len);
        _exit(n <= 0 || write(ends[1], to, n) != n);
    }
    close(ends[1]);
    ssize_t n = read(ends[0], to, len);
    int status = -1;
    check(waitpid(pid, &status, 0) == pid && status == 0, "the child");
    close(ends[0]);
    return n;
}
static ssize_t fork_read(int fd, char *to, size_t len) { return child_reads(by_fork, fd, to, len); }
static ssize_t clone_read(int fd, char *to, size_t len) { return child_reads(by_clone, fd, to, len); }
static ssize_t clone3_read(int fd, char *to, size_t len) { return child_reads(by_clone3, fd, to, len); }
static ssize_t unshared_read(int fd, char *to, size_t len) {
    check(syscall(SYS_unshare, CLONE_FILES) == 0, "unshare");
    return read(fd, to, len);
}
static ssize_t range_unshared_read(int fd, char *to, size_t len) {
    check(close_range(900, 901, CLOSE_RANGE_UNSHARE) == 0, "close_range");
    return read(fd, to, len);
}

// ---- asynchronous I/O ---------------------------------------------------------------------------

static ssize_t finished(struct aiocb *request) {
    const struct aiocb *list[] = {request};
    while (aio_error(request) == EINPROGRESS) aio_suspend(list, 1, NULL);
    return aio_return(request);
}
static ssize_t posix_aio_read(int fd, char *to, size_t len) {
    struct aiocb request = {.aio_fildes = fd, .aio_buf = to, .aio_nbytes = len};
    check(aio_read(&request) == 0, "aio_read");
    return finished(&request);
}
static ssize_t posix_aio_write(int fd, const char *from, size_t len) {
    struct aiocb request = {.aio_fildes = fd, .aio_buf = (char *)from, .aio_nbytes = len};
    check(aio_write(&request) == 0, "aio_write");
    return finished(&request);
}
static ssize_t list_read(int fd, char *to, size_t len) {
    struct aiocb request = {.aio_fildes = fd, .aio_buf = to, .aio_nbytes = len, .aio_lio_opcode = LIO_READ};
    struct aiocb *list[] = {NULL, &request};
    check(lio_listio(LIO_WAIT, list, 2, NULL) == 0, "lio_listio");
    return finished(&request);
}
static ssize_t kernel_aio(int fd, void *buffer, size_t len, int operation) {
    aio_context_t context = 0;
    struct iocb request = {
        .aio_fildes = fd, .aio_lio_opcode = operation, .aio_buf = (unsigned long)buffer, .aio_nbytes = len};
    struct iocb *list[] = {&request};
    struct io_event event;
    check(syscall(SYS_io_setup, 8, &context) == 0, "io_setup");
    check(syscall(SYS_io_submit, context, 1, list) == 1, "io_submit");
    check(syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1, "io_getevents");
    syscall(SYS_io_destroy, context);
    return event.res;
}
static ssize_t kernel_aio_read(int fd, char *to, size_t len) { return kernel_aio(fd, to, len, IOCB_CMD_PREAD); }
static ssize_t kernel_aio_write(int fd, const char *from, size_t len) {
    return kernel_aio(fd, (char *)from, len, IOCB_CMD_PWRITE);
}

static struct io_uring ring;
static int ring_made;
static void make_ring(void) {
    check(io_uring_queue_init(8, &ring, 0) == 0, "io_uring_queue_init");
    ring_made = 1;
}
static ssize_t complete(void) {
    struct io_uring_cqe *cqe;
    check(io_uring_submit(&ring) == 1 && io_uring_wait_cqe(&ring, &cqe) == 0, "a ring");
    ssize_t n = cqe->res;
    io_uring_cqe_seen(&ring, cqe);
    return n;
}
static ssize_t ring_read(int fd, char *to, size_t len) {
    if (!ring_made) make_ring();
    io_uring_prep_recv(io_uring_get_sqe(&ring), fd, to, len, 0);
    return complete();
}
static ssize_t ring_write(int fd, const char *from, size_t len) {
    if (!ring_made) make_ring();
    io_uring_prep_send(io_uring_get_sqe(&ring), fd, from, len, 0);
    return complete();
}
// Sets up a uring as liburing does, but with system calls by number.
static void make_numbered_ring(void) {
    struct io_uring_params parameters = {0};
    int fd = syscall(SYS_io_uring_setup, 8, &parameters);
    check(fd >= 0 && io_uring_queue_mmap(fd, &parameters, &ring) == 0, "io_uring_setup");
    ring.enter_ring_fd = fd;
    for (unsigned i = 0; i < parameters.sq_entries; i++) ring.sq.array[i] = i;
    ring_made = 1;
}
static ssize_t numbered_ring_read(int fd, char *to, size_t len) {
    if (!ring_made) make_numbered_ring();
    return ring_read(fd, to, len);
}

// ---- urings for other files ---------------------------------------------------------------------

static int numbered;
static int ring_fd_of(void) { return ring.ring_fd; }
// Submits the filled entries in one call, and prints how each has completed.
static void submit(const char *what, int count) {
    if (numbered) {
        __atomic_store_n(ring.sq.ktail, ring.sq.sqe_tail, __ATOMIC_RELEASE);
        long done = syscall(SYS_io_uring_enter, ring_fd_of(), count, count, IORING_ENTER_GETEVENTS, NULL, 0);
        check(done == count, "io_uring_enter");
    } else {
        check(io_uring_submit_and_wait(&ring, count) == count, "io_uring_submit_and_wait");
    }
    printf("%s:", what);
    int results[8] = {0};
    for (int i = 0; i < count; i++) {
        struct io_uring_cqe *cqe;
        check(io_uring_wait_cqe(&ring, &cqe) == 0, "io_uring_wait_cqe");
        results[cqe->user_data % 8] = cqe->res;
        io_uring_cqe_seen(&ring, cqe);
    }
    for (int i = 0; i < count; i++) printf(" %d", results[i]);
    puts("");
}
static void some_ring(void) {
    if (ring_made) return;
    if (numbered) make_numbered_ring(); else make_ring();
}
static struct io_uring_sqe *entry(int number) {
    some_ring();
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
    memset(sqe, 0, sizeof *sqe);
    sqe->user_data = number;
    return sqe;
}
#define ENTRY(number, prepare, ...)               \
    ({                                            \
        struct io_uring_sqe *made = entry(number); \
        prepare(made, ##__VA_ARGS__);             \
        made->user_data = number;                 \
        made;                                     \
    })

// The uring operates on files, time and nothing; libc reads the connection.
static ssize_t beside_read(int fd, char *to, size_t len) {
    static int file = -1;
    char text[6] = "";
    struct __kernel_timespec moment = {.tv_nsec = 1000000};
    if (file < 0) file = open(".", O_TMPFILE | O_RDWR, 0600);
    ENTRY(0, io_uring_prep_write, file, "hello", 5, 0);
    submit("a write to a file", 1);
    ENTRY(0, io_uring_prep_read, file, text, 5, 0);
    ENTRY(1, io_uring_prep_nop);
    ENTRY(2, io_uring_prep_timeout, &moment, 0, 0);
    submit("a read of it, nothing, and time", 3);
    puts(text);
    // The entry's fd field equals the connection's descriptor, but is a number of buffers here.
    static char buffers[64][8];
    ENTRY(0, io_uring_prep_provide_buffers, buffers, 8, fd, 1, 0);
    submit("buffers", 1);
    // A registered file table, in which slot 0 is another file.
    if (io_uring_register_files(&ring, &file, 1) == 0) {
        ENTRY(0, io_uring_prep_read, 0, text, 5, 0)->flags |= IOSQE_FIXED_FILE;
        submit("a read by the table", 1);
        io_uring_unregister_files(&ring);
    }
    return read(fd, to, len);
}
static ssize_t numbered_beside_read(int fd, char *to, size_t len) {
    numbered = 1;
    return beside_read(fd, to, len);
}

// An epoll instance that is changed by the uring, and waited on through libc.
static int changed_set = -1;
static void wait_in_set(int data) {
    struct epoll_event event = {0};
    int n = epoll_wait(changed_set, &event, 1, 5000);
    printf("epoll_wait: %d, %x, %d\n", n, event.events, event.data.u32 == (unsigned)data);
}
static ssize_t set_read_with(int fd, char *to, size_t len, int flags) {
    struct epoll_event in = {EPOLLIN, {.u32 = 7}}, other = {EPOLLIN | EPOLLRDHUP, {.u32 = 8}};
    struct epoll_event once = {EPOLLIN | EPOLLONESHOT, {.u32 = 9}};
    if (changed_set < 0) changed_set = epoll_create1(EPOLL_CLOEXEC);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_ADD, &in)->flags |= flags;
    submit("added", 1);
    wait_in_set(7);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_ADD, &in);
    submit("added again", 1);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_MOD, &in);
    ENTRY(1, io_uring_prep_nop);
    ENTRY(2, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_MOD, &other);
    submit("changed twice", 3);
    wait_in_set(8);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_DEL, NULL)->flags |= IOSQE_ASYNC;
    submit("removed", 1);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_MOD, &in);
    submit("changed where it is not", 1);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_ADD, (struct epoll_event *)8);
    submit("added with a bad event", 1);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_ADD, &once);
    submit("for one event", 1);
    wait_in_set(9);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_DEL, NULL);
    submit("removed", 1);
    return read(fd, to, len);
}
static ssize_t set_read(int fd, char *to, size_t len) { return set_read_with(fd, to, len, 0); }
static ssize_t numbered_set_read(int fd, char *to, size_t len) {
    numbered = 1;
    return set_read_with(fd, to, len, 0);
}
static ssize_t linked_set_read(int fd, char *to, size_t len) { return set_read_with(fd, to, len, IOSQE_IO_LINK); }
static ssize_t drained_set_read(int fd, char *to, size_t len) { return set_read_with(fd, to, len, IOSQE_IO_DRAIN); }
// If the kernel refuses an entry, the effect of a later entry must not come first.
static ssize_t refused_set_read(int fd, char *to, size_t len) {
    struct epoll_event in = {EPOLLIN, {.u32 = 7}};
    if (changed_set < 0) changed_set = epoll_create1(EPOLL_CLOEXEC);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_DEL, NULL);
    ENTRY(1, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_ADD, &in);
    submit("removed before it was added", 2);
    wait_in_set(7);
    ENTRY(0, io_uring_prep_epoll_ctl, changed_set, fd, EPOLL_CTL_DEL, NULL);
    submit("removed", 1);
    return read(fd, to, len);
}

static ssize_t polled_read(int fd, char *to, size_t len) {
    ENTRY(0, io_uring_prep_poll_add, fd, POLLIN);
    submit("polled", 1);
    return read(fd, to, len);
}
static ssize_t set_polled_read(int fd, char *to, size_t len) {
    struct epoll_event in = {EPOLLIN, {.u32 = 7}};
    if (changed_set < 0) {
        changed_set = epoll_create1(EPOLL_CLOEXEC);
        check(epoll_ctl(changed_set, EPOLL_CTL_ADD, fd, &in) == 0, "epoll_ctl");
    }
    ENTRY(0, io_uring_prep_poll_add, changed_set, POLLIN);
    submit("a set polled", 1);
    wait_in_set(7);
    return read(fd, to, len);
}
static ssize_t registered_read(int fd, char *to, size_t len) {
    static int is_registered;
    some_ring();
    if (!is_registered++) check(io_uring_register_files(&ring, &fd, 1) == 0, "io_uring_register_files");
    io_uring_prep_recv(entry(0), 0, to, len, 0);
    ring.sq.sqes[(ring.sq.sqe_tail - 1) & *ring.sq.kring_mask].flags |= IOSQE_FIXED_FILE;
    return complete();
}
static ssize_t updated_read(int fd, char *to, size_t len) {
    static int is_registered, none = -1;
    some_ring();
    if (!is_registered++) {
        check(io_uring_register_files(&ring, &none, 1) == 0, "io_uring_register_files");
        ENTRY(0, io_uring_prep_files_update, &fd, 1, 0);
        submit("into the table", 1);
    }
    io_uring_prep_recv(entry(0), 0, to, len, 0);
    ring.sq.sqes[(ring.sq.sqe_tail - 1) & *ring.sq.kring_mask].flags |= IOSQE_FIXED_FILE;
    return complete();
}
static ssize_t entered_read(int fd, char *to, size_t len) {
    numbered = 1;
    some_ring();
    io_uring_prep_recv(entry(0), fd, to, len, 0);
    __atomic_store_n(ring.sq.ktail, ring.sq.sqe_tail, __ATOMIC_RELEASE);
    check(syscall(SYS_io_uring_enter, ring_fd_of(), 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1, "io_uring_enter");
    struct io_uring_cqe *cqe;
    check(io_uring_wait_cqe(&ring, &cqe) == 0, "io_uring_wait_cqe");
    ssize_t n = cqe->res;
    io_uring_cqe_seen(&ring, cqe);
    return n;
}
// The kernel polls for entries (SQPOLL), so submissions are not seen.
static void make_polling_ring(void) {
    check(io_uring_queue_init(8, &ring, IORING_SETUP_SQPOLL) == 0, "io_uring_queue_init");
    ring_made = 1;
}
static ssize_t polling_ring_read(int fd, char *to, size_t len) {
    if (!ring_made) make_polling_ring();
    return read(fd, to, len);
}
// Urings are created, used and destroyed many times. The connection's descriptor number was never
// that of a uring.
static ssize_t gone_read(int fd, char *to, size_t len) {
    for (int i = 0; i < 100; i++) {
        ENTRY(0, io_uring_prep_nop);
        check(io_uring_submit_and_wait(&ring, 1) == 1, "io_uring_submit_and_wait");
        int was = ring.ring_fd, again;
        if (i % 2) {
            io_uring_queue_exit(&ring);
        } else {
            check(close(ring.ring_fd) == 0, "close");
        }
        ring_made = 0;
        check((again = dup(0)) == was, "its number is free");
        close(again);
    }
    return read(fd, to, len);
}
static ssize_t duplicated_ring_read(int fd, char *to, size_t len) {
    static int again = -1;
    some_ring();
    if (again < 0) again = dup(ring.ring_fd);
    ring.ring_fd = ring.enter_ring_fd = again;
    ENTRY(0, io_uring_prep_nop);
    submit("by another number", 1);
    return read(fd, to, len);
}
// A child creates another uring, and its parent continues with the first.
static ssize_t forked_ring_read(int fd, char *to, size_t len) {
    ENTRY(0, io_uring_prep_nop);
    submit("before a fork", 1);
    pid_t child = fork();
    if (child == 0) {
        io_uring_queue_exit(&ring);
        ring_made = 0;
        ENTRY(0, io_uring_prep_nop);
        _exit(io_uring_submit_and_wait(&ring, 1) != 1);
    }
    int status;
    check(waitpid(child, &status, 0) == child && status == 0, "a child's ring");
    return read(fd, to, len);
}

// ---- calls that do not concern the shim ---------------------------------------------------------

// Prints the kernel's result for calls that have another meaning, or none, for a socket.
#define ANSWER(call)                                                    \
    do {                                                                \
        errno = 0;                                                      \
        long answered = (long)(call);                                   \
        printf("%s: %ld, %s\n", #call, answered, strerror(errno));      \
    } while (0)

static ssize_t passed_read(int fd, char *to, size_t len) {
    struct stat status = {0};
    struct statfs files;
    struct statvfs more_files;
    struct termios terminal;
    struct sockaddr_in address;
    struct timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
    struct timeval old_times[2] = {{0}};
    char buffer[64], other[64];
    socklen_t room = sizeof address;
    loff_t at = 0;
    off_t base = 0;
    struct iovec vector = {buffer, sizeof buffer};
    int file = open(".", O_RDONLY | O_DIRECTORY), pipes[2], pair[2];
    check(file >= 0 && pipe(pipes) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "descriptors");
    ANSWER(fstat(fd, &status) || !S_ISSOCK(status.st_mode));
    ANSWER(fstatat(fd, "", &status, AT_EMPTY_PATH) || status.st_size);
    ANSWER(fstatfs(fd, &files));
    ANSWER(fstatvfs(fd, &more_files));
    ANSWER(isatty(fd));
    ANSWER(ttyname(fd));
    ANSWER(ttyname_r(fd, buffer, sizeof buffer));
    ANSWER(tcgetattr(fd, &terminal));
    ANSWER(tcsetattr(fd, TCSANOW, &terminal));
    ANSWER(tcdrain(fd));
    ANSWER(tcflow(fd, TCOON));
    ANSWER(tcflush(fd, TCIOFLUSH));
    ANSWER(tcsendbreak(fd, 0));
    ANSWER(tcgetpgrp(fd));
    ANSWER(tcsetpgrp(fd, getpgrp()));
    ANSWER(tcgetsid(fd));
    ANSWER(lseek(fd, 0, SEEK_CUR));
    ANSWER(pread(fd, buffer, 1, 0));
    ANSWER(pwrite(fd, "x", 1, 0));
    ANSWER(preadv(fd, &vector, 1, 0));
    ANSWER(pwritev(fd, &vector, 1, 0));
    ANSWER(fsync(fd));
    ANSWER(fdatasync(fd));
    ANSWER(syncfs(fd));
    ANSWER(sync_file_range(fd, 0, 1, 0));
    ANSWER(ftruncate(fd, 0));
    ANSWER(fallocate(fd, 0, 0, 1));
    ANSWER(posix_fallocate(fd, 0, 1));
    ANSWER(posix_fadvise(fd, 0, 1, POSIX_FADV_NORMAL));
    ANSWER(readahead(fd, 0, 1));
    ANSWER(copy_file_range(fd, &at, fd, &at, 1, 0));
    ANSWER(tee(fd, pipes[1], 1, 0));
    ANSWER(vmsplice(fd, &vector, 1, 0));
    ANSWER(flock(fd, LOCK_SH));
    ANSWER(lockf(fd, F_TEST, 0));
    ANSWER(fchdir(fd));
    ANSWER(fdopendir(fd));
    ANSWER(getdirentries(fd, buffer, sizeof buffer, &base));
    ANSWER(getdents64(fd, buffer, sizeof buffer));
    ANSWER(fchmod(fd, 0600));
    ANSWER(fchown(fd, -1, -1));
    ANSWER(futimens(fd, times));
    ANSWER(futimes(fd, old_times));
    ANSWER(fgetxattr(fd, "user.none", other, sizeof other));
    ANSWER(fsetxattr(fd, "user.none", "x", 1, 0));
    ANSWER(flistxattr(fd, other, 0) >= 0);
    ANSWER(fremovexattr(fd, "user.none"));
    ANSWER(fpathconf(fd, _PC_PIPE_BUF));
    ANSWER(mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED);
    ANSWER(inotify_add_watch(fd, ".", IN_OPEN));
    ANSWER(inotify_rm_watch(fd, 1));
    ANSWER(signalfd(fd, &(sigset_t){0}, 0));
    ANSWER(timerfd_settime(fd, 0, &(struct itimerspec){0}, NULL));
    ANSWER(timerfd_gettime(fd, &(struct itimerspec){0}));
    ANSWER(setns(fd, CLONE_NEWNET));
    ANSWER(pidfd_send_signal(fd, 0, NULL, 0));
    ANSWER(pidfd_getfd(fd, 0, 0));
    ANSWER(mq_getattr(fd, &(struct mq_attr){0}));
    ANSWER(mq_send(fd, "x", 1, 0));
    ANSWER(mq_receive(fd, buffer, sizeof buffer, NULL));
    ANSWER(login_tty(fd));
    ANSWER(getsockname(fd, (struct sockaddr *)&address, &room) || address.sin_family != AF_INET);
    ANSWER(getpeername(fd, (struct sockaddr *)&address, &room) || address.sin_family != AF_INET);
    ANSWER(sockatmark(fd));
    ANSWER(isfdtype(fd, S_IFSOCK));
    ANSWER(bind(fd, (struct sockaddr *)&address, sizeof address));
    ANSWER(bindresvport(fd, NULL));
    ANSWER(listen(fd, 1));
    ANSWER(accept(fd, NULL, NULL));
    // Descriptors of other kinds, which must not be affected.
    eventfd_t count = 0;
    int event = eventfd(3, 0), memory = memfd_create("memory", 0), timer = timerfd_create(CLOCK_MONOTONIC, 0);
    ANSWER(eventfd_read(event, &count) || count != 3);
    ANSWER(eventfd_write(event, 1));
    ANSWER(write(pair[0], "ab", 2));
    ANSWER(read(pair[1], buffer, 2));
    ANSWER(write(memory, "abc", 3) != 3 || close(memory) || close(timer) || close(event));
    int terminal_ends[2], more_pipes[2];
    ANSWER(openpty(&terminal_ends[0], &terminal_ends[1], NULL, NULL, NULL));
    ANSWER(close(terminal_ends[0]) || close(terminal_ends[1]));
    ANSWER(pipe2(more_pipes, O_CLOEXEC) || close(more_pipes[0]) || close(more_pipes[1]));
    ANSWER(close(inotify_init()) || close(inotify_init1(IN_CLOEXEC)));
    ANSWER(close(pidfd_open(getpid(), 0)));
    ANSWER(fanotify_mark(fd, FAN_MARK_ADD, FAN_OPEN, AT_FDCWD, "."));
    int watch = fanotify_init(FAN_CLASS_NOTIF, O_RDONLY);
    ANSWER(watch < 0 ? watch : close(watch));
    struct iovec here = {buffer, 8}, there = {other, 8};
    ANSWER(process_vm_readv(getpid(), &here, 1, &there, 1, 0));
    ANSWER(process_vm_writev(getpid(), &here, 1, &there, 1, 0));
    struct mq_attr small = {.mq_maxmsg = 1, .mq_msgsize = 8};
    mqd_t queue = mq_open("/hidden_calls", O_CREAT | O_RDWR, 0600, &small);
    ANSWER(mq_timedsend(queue, "x", 1, 0, &(struct timespec){0}));
    ANSWER(mq_timedreceive(queue, buffer, sizeof buffer, NULL, &(struct timespec){0}));
    ANSWER(mq_notify(queue, NULL));
    ANSWER(mq_setattr(queue, &small, NULL) || mq_close(queue) || mq_unlink("/hidden_calls"));
    openlog("hidden_calls", 0, LOG_USER);
    syslog(LOG_DEBUG, "a test");
    closelog();
    close(file), close(pipes[0]), close(pipes[1]), close(pair[0]), close(pair[1]);
    return read(fd, to, len);
}

// The resolver uses TCP by calls inside libc. The numbers of its descriptors lie between those of
// this program.
static int names_port;
static void *serve_names(void *unused) {
    (void)unused;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t room = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 8) == 0, "names");
    getsockname(listener, (struct sockaddr *)&address, &room);
    __atomic_store_n(&names_port, ntohs(address.sin_port), __ATOMIC_RELEASE);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        unsigned char q[600];
        while (read(fd, q, 2) == 2 && read(fd, q + 2, q[0] << 8 | q[1]) > 0) {
            // The question again, followed by one address: the name as a pointer, type A, class IN,
            // 10.1.2.3.
            size_t end = 14;
            while (q[end]) end += q[end] + 1;
            int is_a = q[end + 2] == 1;
            end += 5;
            q[4] = 0x81, q[5] = 0x80, q[9] = is_a, q[13] = 0, q[11] = 0;
            unsigned char a[] = {0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 10, 1, 2, 3};
            if (is_a) memcpy(q + end, a, sizeof a), end += sizeof a;
            q[0] = (end - 2) >> 8, q[1] = end - 2;
            // Write in pieces, as a slow server does.
            check(write(fd, q, 1) == 1 && write(fd, q + 1, end - 1) == (ssize_t)end - 1, "an answer");
        }
        close(fd);
    }
    return NULL;
}
static void start_names(void) {
    pthread_t thread;
    check(pthread_create(&thread, NULL, serve_names, NULL) == 0, "pthread_create");
    while (!__atomic_load_n(&names_port, __ATOMIC_ACQUIRE)) usleep(100);
    res_init();
    _res.options |= RES_USEVC;
    _res.nscount = 1;
    _res.nsaddr_list[0].sin_family = AF_INET;
    _res.nsaddr_list[0].sin_port = htons(names_port);
    _res.nsaddr_list[0].sin_addr.s_addr = htonl(INADDR_LOOPBACK);
}
static ssize_t resolver_read(int fd, char *to, size_t len) {
    for (int i = 0; i < 10; i++) {
        struct addrinfo hints = {.ai_family = i % 2 ? AF_INET : AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *list = NULL;
        int result = getaddrinfo("host.example.org.", "80", &hints, &list);
        struct sockaddr_in *found = result ? NULL : (struct sockaddr_in *)list->ai_addr;
        printf("getaddrinfo: %s, %s\n", gai_strerror(result), found ? inet_ntoa(found->sin_addr) : "nothing");
        if (!result) freeaddrinfo(list);
        unsigned char answer[512];
        ANSWER(res_query("host.example.org.", 1, 1, answer, sizeof answer));
        struct hostent *host = gethostbyname("host.example.org.");
        ANSWER(host && host->h_length);
        ANSWER(gethostbyaddr(&(struct in_addr){htonl(0x0a010203)}, sizeof(struct in_addr), AF_INET));
    }
    struct gaicb request = {.ar_name = "127.0.0.1"}, *list[] = {&request};
    ANSWER(getaddrinfo_a(GAI_WAIT, list, 1, NULL));
    return read(fd, to, len);
}

static const struct scenario scenarios[] = {
    {"plain", NULL, NULL, NULL, NULL},
    {"aliases", alias_read, alias_write, __close, NULL},
    {"fortified", fortified_read, NULL, NULL, NULL},
    {"stdio", stdio_read, stdio_write, stdio_close, NULL},
    {"unbuffered", unbuffered_read, unbuffered_write, stdio_close, NULL},
    {"mixed", mixed_read, NULL, NULL, NULL},
    {"getline", line_read, NULL, NULL, NULL},
    {"freopen", stdio_read, NULL, reopen_close, NULL},
    {"dprintf", NULL, dprintf_write, NULL, NULL},
    {"standard-streams", standard_read, standard_write, NULL, NULL},
    {"placed-stream", NULL, placed_write, placed_close, open_own},
    {"fdopen-before-connect", NULL, NULL, NULL, NULL},
    {"number-read", n_read, n_write, n_close, NULL},
    {"number-readv", n_readv, n_writev, n_close_range, NULL},
    {"number-preadv2", n_preadv2, n_pwritev2, n_shutdown, NULL},
    {"number-recvfrom", n_recvfrom, n_sendto, n_dup, NULL},
    {"number-recvmsg", n_recvmsg, n_sendmsg, NULL, NULL},
    {"number-recvmmsg", n_recvmmsg, n_sendmmsg, NULL, NULL},
    {"number-sendmmsg", NULL, n_sendmmsg, NULL, NULL},
    {"number-splice", n_splice, NULL, NULL, NULL},
    {"number-sendfile", NULL, n_sendfile, NULL, NULL},
    {"number-options", n_options, NULL, NULL, NULL},
    {"number-ready", n_ready, NULL, NULL, NULL},
    {"same-data", same_data_read, NULL, NULL, NULL},
    {"number-fork", fork_read, NULL, NULL, NULL},
    {"number-clone", clone_read, NULL, NULL, NULL},
    {"number-clone3", clone3_read, NULL, NULL, NULL},
    {"number-unshare", unshared_read, NULL, NULL, NULL},
    {"close_range-unshare", range_unshared_read, NULL, NULL, NULL},
    {"posix-aio", posix_aio_read, posix_aio_write, NULL, NULL},
    {"lio_listio", list_read, NULL, NULL, NULL},
    {"kernel-aio", kernel_aio_read, kernel_aio_write, NULL, NULL},
    {"passed", passed_read, NULL, NULL, NULL},
    {"resolver", resolver_read, NULL, NULL, start_names},
    {"ring", ring_read, ring_write, NULL, NULL},
    {"ring-before", ring_read, ring_write, NULL, make_ring},
    {"number-ring", numbered_ring_read, ring_write, NULL, NULL},
    {"ring-beside", beside_read, NULL, NULL, some_ring},
    {"number-ring-beside", numbered_beside_read, NULL, NULL, NULL},
    {"ring-set", set_read, NULL, NULL, NULL},
    {"number-ring-set", numbered_set_read, NULL, NULL, NULL},
    {"ring-set-linked", linked_set_read, NULL, NULL, NULL},
    {"ring-set-drained", drained_set_read, NULL, NULL, NULL},
    {"ring-set-refused", refused_set_read, NULL, NULL, NULL},
    {"ring-poll", polled_read, NULL, NULL, some_ring},
    {"ring-set-polled", set_polled_read, NULL, NULL, NULL},
    {"ring-registered", registered_read, NULL, NULL, NULL},
    {"ring-updated", updated_read, NULL, NULL, some_ring},
    {"ring-entered", entered_read, NULL, NULL, NULL},
    {"ring-polling", polling_ring_read, NULL, NULL, NULL},
    {"ring-polling-before", polling_ring_read, NULL, NULL, make_polling_ring},
    {"ring-gone", gone_read, NULL, NULL, NULL},
    {"ring-duplicated", duplicated_ring_read, NULL, NULL, NULL},
    {"ring-forked", forked_ring_read, NULL, NULL, NULL},
};

// ---- the two ends -------------------------------------------------------------------------------

static void fill(char *buffer, size_t len, int seed) {
    for (size_t i = 0; i < len; i++) buffer[i] = 'a' + (i * 7 + i / 26 + seed) % 26;
    buffer[len - 1] = '\n';
}

static size_t read_all(reader *read_some, int fd, char *to, size_t len) {
    size_t done = 0;
    while (done < len) {
        ssize_t n = read_some(fd, to + done, len - done);
        if (n <= 0) {
            printf("read of %zu after %zu: %zd, %s\n", len, done, n, n < 0 ? strerror(errno) : "end");
            break;
        }
        done += n;
    }
    return done;
}

static size_t write_all(writer *write_some, int fd, const char *from, size_t len) {
    size_t done = 0;
    while (done < len) {
        ssize_t n = write_some(fd, from + done, len - done);
        if (n <= 0) {
            printf("write of %zu after %zu: %zd, %s\n", len, done, n, strerror(errno));
            break;
        }
        done += n;
    }
    return done;
}

static ssize_t plain_read(int fd, char *to, size_t len) { return read(fd, to, len); }
static ssize_t plain_write(int fd, const char *from, size_t len) { return write(fd, from, len); }

static void wait_for(const char *gate) {
    while (access(gate, F_OK)) usleep(2000);
}

static void expect(reader *read_some, int fd, size_t len, int seed) {
    static char expected[BULK], got[BULK];
    fill(expected, len, seed);
    memset(got, 0, len);
    size_t n = read_all(read_some, fd, got, len);
    size_t same = 0;
    while (same < n && got[same] == expected[same]) same++;
    printf("read %zu bytes, %zu as they were sent\n", n, same);
    if (same != len) failures++;
}

static void say(writer *write_some, int fd, size_t len, int seed) {
    char buffer[BULK];
    fill(buffer, len, seed);
    printf("wrote %zu bytes\n", write_all(write_some, fd, buffer, len));
}

// Reads the rest of the stream, whatever it is, by plain reads.
static void drain(int fd) {
    char buffer[256];
    size_t done = 0;
    ssize_t n;
    while ((n = read(fd, buffer + done, sizeof buffer - 1 - done)) > 0) done += n;
    buffer[done] = 0;
    printf("at the end: \"%s\", then %zd\n", buffer, n);
}

static void server(int fd, const struct scenario *how, const char *last_gate) {
    reader *read_some = how->read ? how->read : plain_read;
    writer *write_some = how->write ? how->write : plain_write;
    char message[8];
    while (read_all(plain_read, fd, message, 8) == 8 && memcmp(message, "go", 2))
        if (write_all(plain_write, fd, message, 8) != 8) exit(1);
    for (int waiting = 0; waiting < BULK;) {
        check(ioctl(fd, FIONREAD, &waiting) == 0, "FIONREAD");
        usleep(100);
    }
    expect(read_some, fd, BULK, 1);
    say(write_some, fd, BULK, 2);
    // A plain call in between, and then the other way round.
    say(plain_write, fd, 8, 3);
    expect(read_some, fd, LITTLE, 4);
    say(write_some, fd, LITTLE, 5);
    expect(how->read == mixed_read || !how->read ? plain_read : how->read, fd, LITTLE, 6);
    puts("done");
    fflush(stdout);
    wait_for(last_gate);
    int result = how->close ? how->close(fd) : close(fd);
    printf("closed: %d\n", result);
}

static void client(int fd, const char *gate) {
    char message[8] = "ping";
    do {
        if (write_all(plain_write, fd, message, 8) != 8 || read_all(plain_read, fd, message, 8) != 8) exit(1);
        usleep(500);
    } while (access(gate, F_OK));
    memcpy(message, "go", 3);
    writer *write_some = early ? early_write : plain_write;
    write_all(write_some, fd, message, 8);
    say(write_some, fd, BULK, 1);
    // The output of dprintf ends with its figures, which replace the original bytes.
    static char got[BULK], expected[BULK];
    for (int round = 0; round < 2; round++) {
        size_t len = round ? LITTLE : BULK;
        size_t n = read_all(plain_read, fd, got, len);
        fill(expected, len, round ? 5 : 2);
        size_t same = 0;
        while (same < n && got[same] == expected[same]) same++;
        printf("read %zu bytes, %zu as they were sent, last \"%.*s\"\n", n, same, 12, got + n - 12);
        if (round == 0) {
            expect(plain_read, fd, 8, 3);
            say(write_some, fd, LITTLE, 4);
        } else {
            say(write_some, fd, LITTLE, 6);
        }
    }
    puts("done");
    fflush(stdout);
    drain(fd);
    check(close(fd) == 0, "close");
}

int main(int count, char **words) {
    if (count != 6) return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(words[2]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const struct scenario *how = NULL;
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        if (!strcmp(scenarios[i].name, words[3])) how = &scenarios[i];
    if (!how) return 2;
    signal(SIGPIPE, SIG_IGN);
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (!strcmp(words[1], "server")) {
        if (how->before) how->before();
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, 1)) return perror("listen"), 1;
        puts("listening");
        fflush(stdout);
        int accepted = accept(fd, NULL, NULL);
        close(fd);
        server(accepted, how, words[5]);
    } else {
        if (!strcmp(how->name, "fdopen-before-connect")) early = fdopen(fd, "r+");
        if (connect(fd, (struct sockaddr *)&address, sizeof address)) return perror("connect"), 1;
        client(fd, words[4]);
    }
    return failures != 0;
}
