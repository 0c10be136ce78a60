/* Invalid numbers as a descriptor, a count, a length, a flag, a time or a signal. usage: numbers
 * PORT GATE */
#include "questions.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#pragma GCC diagnostic ignored "-Wstringop-overflow"

static const int numbers[] = {-1, INT32_MIN, INT32_MAX, 1 << 28, 1 << 20, -100};
static char label_text[128], bytes[64] = "0123456789";
static int ends[2], file, set;

static const char *label(const char *what, int number)
{
    snprintf(label_text, sizeof label_text, "%s, %d", what, number);
    return label_text;
}

/* Passes the number to every call that takes a descriptor. */
static void as_descriptor(int n)
{
    struct iovec list = {bytes, 4};
    struct msghdr message = {.msg_iov = &list, .msg_iovlen = 1};
    struct mmsghdr messages = {.msg_hdr = message};
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct epoll_event event = {.events = EPOLLIN};
    struct timespec now = {0, 0};
    struct pollfd polled = {n, POLLIN, 0};
    socklen_t len = sizeof address;
    int value = 0;
    ASK(label("read", n), read(n, bytes, 4));
    ASK(label("write", n), write(n, bytes, 4));
    ASK(label("readv", n), readv(n, &list, 1));
    ASK(label("writev", n), writev(n, &list, 1));
    ASK(label("preadv2", n), preadv2(n, &list, 1, -1, 0));
    ASK(label("pwritev2", n), pwritev2(n, &list, 1, -1, 0));
    ASK(label("recv", n), recv(n, bytes, 4, 0));
    ASK(label("send", n), send(n, bytes, 4, 0));
    ASK(label("recvfrom", n), recvfrom(n, bytes, 4, 0, (void *)&address, &len));
    ASK(label("sendto", n), sendto(n, bytes, 4, 0, (void *)&address, len));
    ASK(label("sendto, fast open", n), sendto(n, bytes, 4, MSG_FASTOPEN, (void *)&address, len));
    ASK(label("recvmsg", n), recvmsg(n, &message, 0));
    ASK(label("sendmsg", n), sendmsg(n, &message, 0));
    ASK(label("recvmmsg", n), recvmmsg(n, &messages, 1, 0, NULL));
    ASK(label("sendmmsg", n), sendmmsg(n, &messages, 1, 0));
    ASK(label("sendfile to", n), sendfile(n, file, NULL, 4));
    ASK(label("sendfile from", n), sendfile(ours, n, NULL, 4));
    ASK(label("splice to", n), splice(ends[0], NULL, n, NULL, 4, SPLICE_F_NONBLOCK));
    ASK(label("splice from", n), splice(n, NULL, ends[1], NULL, 4, SPLICE_F_NONBLOCK));
    ASK(label("accept", n), accept(n, NULL, NULL));
    ASK(label("accept4", n), accept4(n, NULL, NULL, SOCK_CLOEXEC));
    ASK(label("connect", n), connect(n, (void *)&address, sizeof address));
    ASK(label("shutdown", n), shutdown(n, SHUT_RDWR));
    ASK(label("getpeername", n), getpeername(n, (void *)&address, &len));
    ASK(label("getsockopt", n), getsockopt(n, SOL_SOCKET, SO_ERROR, &value, &len));
    ASK(label("setsockopt", n), setsockopt(n, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof value));
    ASK(label("close", n), close(n));
    ASK(label("dup", n), dup(n));
    ASK(label("dup2 of it to itself", n), dup2(n, n));
    ASK(label("dup2 of it to a connection", n), dup2(n, ours));
    ASK(label("dup2 of it to a listener", n), dup2(n, listener));
    ASK(label("dup2 of it to a set", n), dup2(n, set));
    ASK(label("dup2 of it to nothing", n), dup2(n, 50));
    ASK(label("dup2 of a connection to it", n), dup2(ours, n));
    ASK(label("dup2 of a listener to it", n), dup2(listener, n));
    ASK(label("dup2 of a set to it", n), dup2(set, n));
    ASK(label("dup2 of a pipe to it", n), dup2(ends[0], n));
    ASK(label("dup3 of it to a connection", n), dup3(n, ours, O_CLOEXEC));
    ASK(label("dup3 of a connection to it", n), dup3(ours, n, 0));
    ASK(label("fcntl", n), fcntl(n, F_GETFL));
    ASK(label("F_DUPFD of it", n), fcntl(n, F_DUPFD, 0));
    ASK(label("F_DUPFD of a connection from it on", n), fcntl(ours, F_DUPFD, n));
    ASK(label("ioctl", n), ioctl(n, FIONREAD, &value));
    ASK(label("epoll_ctl of it", n), epoll_ctl(n, EPOLL_CTL_ADD, listener, &event));
    ASK(label("epoll_ctl with it", n), epoll_ctl(set, EPOLL_CTL_ADD, n, &event));
    ASK(label("epoll_ctl without it", n), epoll_ctl(set, EPOLL_CTL_DEL, n, NULL));
    ASK(label("epoll_wait", n), epoll_wait(n, &event, 1, 0));
    ASK(label("epoll_pwait", n), epoll_pwait(n, &event, 1, 0, NULL));
    ASK(label("epoll_pwait2", n), epoll_pwait2(n, &event, 1, &now, NULL));
    ASK(label("poll", n), poll(&polled, 1, 0));
    printf("... %x\n", polled.revents);
    ASK(label("ppoll", n), ppoll(&polled, 1, &now, NULL));
    ASK(label("fdopen", n), fdopen(n, "r") != NULL);
    ASK(label("dprintf", n), dprintf(n, "text"));
    ASK(label("fexecve", n), fexecve(n, (char *[]){"true", NULL}, environ));
    ASK(label("close_range", n), close_range((unsigned)INT32_MAX, (unsigned)n, 0));
}

/* Passes the number to functions that start a child. */
static void as_a_childs(int n)
{
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    ASK(label("posix_spawn_file_actions_adddup2 of it", n), posix_spawn_file_actions_adddup2(&actions, n, 1));
    ASK(label("posix_spawn_file_actions_adddup2 to it", n), posix_spawn_file_actions_adddup2(&actions, ours, n));
    posix_spawn_file_actions_destroy(&actions);
}

/* Passes the number as other arguments, to calls that leave the connection intact. */
static void as_anything_else(int n)
{
    struct iovec list = {bytes, 4};
    struct mmsghdr messages = {.msg_hdr = {.msg_iov = &list, .msg_iovlen = 1}};
    struct msghdr message = {.msg_iov = &list, .msg_iovlen = (size_t)n};
    struct epoll_event events[4];
    struct pollfd polled = {theirs, POLLIN, 0};
    int value = 1;
    socklen_t len = n;
    ASK(label("readv of so many", n), readv(theirs, &list, n));
    ASK(label("writev of so many", n), writev(ours, &list, n));
    ASK(label("preadv2 of so many", n), preadv2(theirs, &list, n, -1, 0));
    ASK(label("preadv2 there", n), n == -1 ? 0 : preadv2(theirs, &list, 1, n, 0));
    ASK(label("pwritev2 there", n), n == -1 ? 0 : pwritev2(ours, &list, 1, n, 0));
    ASK(label("preadv2 with these flags", n), preadv2(theirs, &list, 1, -1, n | 0x10000));
    ASK(label("pwritev2 with these flags", n), pwritev2(ours, &list, 1, -1, n | 0x10000));
    ASK(label("recvmsg of so many", n), recvmsg(theirs, &message, MSG_DONTWAIT));
    ASK(label("sendmsg of so many", n), sendmsg(ours, &message, 0));
    ASK(label("splice with these flags", n), splice(theirs, NULL, ends[1], NULL, 4, (unsigned)n | 0x100));
    ASK(label("sendfile from there", n), ({
            off_t at = n;
            sendfile(ours, file, &at, 0);
        }));
    ASK(label("shutdown so", n), shutdown(ours, n));
    ASK(label("getsockopt of this level", n), getsockopt(ours, n, SO_ERROR, &value, &(socklen_t){4}));
    ASK(label("getsockopt of this name", n), getsockopt(ours, IPPROTO_TCP, n, &value, &(socklen_t){4}));
    ASK(label("getsockopt of this length", n), getsockopt(ours, SOL_SOCKET, SO_TYPE, &value, &len));
    len = n;
    ASK(label("getsockopt of this length of error", n), getsockopt(ours, SOL_SOCKET, SO_ERROR, &value, &len));
    len = n;
    ASK(label("getpeername of this length", n), getpeername(ours, (void *)bytes, &len));
    ASK(label("setsockopt of this length", n), setsockopt(ours, IPPROTO_TCP, TCP_NODELAY, &value, n));
    ASK(label("fcntl of this command", n), fcntl(ours, n, 0));
    ASK(label("epoll_ctl of this operation", n), epoll_ctl(set, n, theirs, events));
    ASK(label("epoll_wait for so many", n), n > 0 ? 0 : epoll_wait(set, events, n, 0));
    ASK(label("poll of so many", n), poll(&polled, (nfds_t)n, 0));
    ASK(label("socket of this domain", n), socket(n, SOCK_STREAM, 0));
    ASK(label("socket of this kind", n), socket(AF_INET, n, 0));
    ASK(label("socket of this protocol", n), socket(AF_INET, SOCK_STREAM, n));
    ASK(label("epoll_create", n > 0 ? -n : n), epoll_create(n > 0 ? -n : n));
    ASK(label("epoll_create1", n), epoll_create1(n | 1));
    ASK(label("accept4 with these flags", n), accept4(listener, NULL, NULL, n | 1));
    ASK(label("sendmmsg of none with these flags", n), sendmmsg(ours, &messages, 0, n));
    ASK(label("recvmmsg of none with these flags", n), recvmmsg(theirs, &messages, 0, n | MSG_DONTWAIT, NULL));
    memcpy(bytes, "0123456789", 11);
}

static fd_set *only(int fd, fd_set *into)
{
    FD_ZERO(into);
    FD_SET(fd, into);
    return into;
}

/* Passes the number as a time or a count of descriptors, while there are bytes to read. */
static void as_a_limit(int n)
{
    struct epoll_event events[4];
    struct pollfd polled = {theirs, POLLIN, 0};
    struct timespec time = {0, n}, seconds = {n, 0};
    struct timeval micros = {0, n}, whole = {n, 0};
    struct iovec list = {bytes + 32, 4};
    struct mmsghdr messages = {.msg_hdr = {.msg_iov = &list, .msg_iovlen = 1}};
    fd_set readable;
    ASK(label("poll for", n), poll(&polled, 1, n));
    ASK(label("ppoll for nanoseconds", n), ppoll(&polled, 1, &time, NULL));
    ASK(label("ppoll for seconds", n), ppoll(&polled, 1, &seconds, NULL));
    ASK(label("epoll_wait for", n), epoll_wait(set, events, 4, n));
    ASK(label("epoll_pwait2 for nanoseconds", n), epoll_pwait2(set, events, 4, &time, NULL));
    ASK(label("epoll_pwait2 for seconds", n), epoll_pwait2(set, events, 4, &seconds, NULL));
    ASK(label("select for microseconds", n), select(theirs + 1, only(theirs, &readable), NULL, NULL, &micros));
    ASK(label("select for seconds", n), select(theirs + 1, only(theirs, &readable), NULL, NULL, &whole));
    ASK(label("pselect for nanoseconds", n), pselect(theirs + 1, only(theirs, &readable), NULL, NULL, &time, NULL));
    ASK(label("pselect for seconds", n), pselect(theirs + 1, only(theirs, &readable), NULL, NULL, &seconds, NULL));
    micros = (struct timeval){0, n}, whole = (struct timeval){n, n};
    ASK(label("SYS_select for microseconds", n), syscall(SYS_select, theirs + 1, only(theirs, &readable), 0, 0, &micros));
    ASK(label("SYS_select for both", n), syscall(SYS_select, theirs + 1, only(theirs, &readable), 0, 0, &whole));
    micros = (struct timeval){0, 0};
    ASK(label("select of so many", n), select(n, only(theirs, &readable), NULL, NULL, &micros));
    printf("... %d\n", FD_ISSET(theirs, &readable) != 0);
    time = (struct timespec){0, n};
    ASK(label("recvmmsg for nanoseconds", n < 0 ? n : -n), ({
            time.tv_nsec = n < 0 ? n : -n;
            recvmmsg(theirs, &messages, 1, 0, &time);
        }));
}

static void handler(int signal)
{
    (void)signal;
}

static void as_a_signal(int n)
{
    struct sigaction action = {.sa_handler = handler}, old;
    int before;
    ASK(label("sigaction", n), sigaction(n, &action, &old));
    ASK(label("sigaction that asks", n), sigaction(n, NULL, &old));
    ASK(label("signal", n), signal(n, handler) == SIG_ERR);
    ASK(label("sysv_signal", n), sysv_signal(n, handler) == SIG_ERR);
    ASK(label("sigset", n), sigset(n, handler) == SIG_ERR);
    ASK(label("sigset, held", n), sigset(n, SIG_HOLD) == SIG_ERR);
    ASK(label("siginterrupt", n), siginterrupt(n, 1));
    ASK(label("SYS_rt_sigaction", n), syscall(SYS_rt_sigaction, n, NULL, bytes, 8));
    ASK(label("pthread_setcanceltype", n), pthread_setcanceltype(n, &before));
    ASK(label("prctl", n), prctl(n, 0, 0, 0, 0));
    ASK(label("by number", n), n == -1 ? 0 : syscall(n, 0, 0, 0));
}

static void as_memory(int n)
{
    char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASK(label("munmap", n), n > 0 ? 0 : munmap(page, n));
    ASK(label("mprotect", n), n > 0 ? 0 : mprotect(page, n, PROT_READ));
    ASK(label("mprotect so", n), mprotect(page, 4096, n));
    ASK(label("mmap so", n), mmap(NULL, 4096, PROT_READ, n & ~MAP_FIXED & ~MAP_TYPE, -1, 0) == MAP_FAILED);
    ASK(label("mmap of it", n), mmap(NULL, 4096, PROT_READ, MAP_SHARED, n, 0) == MAP_FAILED);
    ASK(label("mremap so", n), mremap(page, 4096, 4096, n) == MAP_FAILED);
    munmap(page, 8192);
}

/* Each of these flags may make the connection fall back to TCP, so each has a new connection. */
static void flags_of_data(void)
{
    static const int flags[] = {-1, INT32_MIN, INT32_MAX & ~MSG_OOB & ~MSG_FASTOPEN, 1 << 28, 1 << 20, 1 << 19};
    for (size_t i = 0; i < LEN(flags); i++) {
        int n = flags[i];
        next_connection();
        ASK(label("send with these flags", n), send(ours, bytes, 4, n & ~MSG_OOB & ~MSG_FASTOPEN));
        pause_ms(30);
        show_left(label("send with these flags", n));
        next_connection();
        lay("abcdef");
        ASK(label("recv with these flags", n), recv(theirs, bytes + 32, 4, n & ~MSG_OOB & ~MSG_ERRQUEUE));
        show_left(label("recv with these flags", n));
    }
}

/* Bytes that are sent with such a flag are transmitted immediately, unless earlier bytes are
 * unacknowledged. */
static void nothing_is_held_back(void)
{
    int held_back = 0;
    for (int round = 0; round < 30; round++) {
        int queued = 0;
        next_connection();
        setsockopt(ours, IPPROTO_TCP, TCP_NODELAY, &(int){0}, sizeof(int));
        pause_ms(round % 6);
        send(ours, bytes, 4, MSG_PEEK);
        ioctl(ours, SIOCOUTQNSD, &queued);
        held_back += queued > 0;
    }
    printf("held back: %d\n", held_back);
}

/* Sends bytes while a select waits, whose whole seconds are given as microseconds. */
static void *speak(void *of)
{
    wait_asleep(*(pid_t *)of);
    put(ours, "x", 1);
    return of;
}

static void sleepers(void)
{
    static const struct timeval limits[] = {{0, 20 * 1000 * 1000}, {1, 19 * 1000 * 1000 + 5}, {0, INT32_MAX}};
    for (int round = 0; round < 2 * (int)LEN(limits); round++) {
        struct timeval limit = limits[round / 2];
        pid_t self = gettid();
        pthread_t speaker;
        fd_set readable;
        next_connection();
        pthread_create(&speaker, NULL, speak, &self);
        if (round % 2)
            ASK("select", select(theirs + 1, only(theirs, &readable), NULL, NULL, &limit));
        else
            ASK("SYS_select", syscall(SYS_select, theirs + 1, only(theirs, &readable), NULL, NULL, &limit));
        printf("... %d, time left: %d\n", FD_ISSET(theirs, &readable) != 0, limit.tv_sec > 0);
        pthread_join(speaker, NULL);
    }
}

/* Calls that succeed must not change errno, whatever happens to the connection in the meantime. */
static void successes(void)
{
    struct sockaddr_in address;
    socklen_t len = sizeof address;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT};
    struct pollfd polled;
    fd_set writable;
    int changed = 0, value, watch;
    char byte;
    getsockname(listener, (void *)&address, &len);
    close(ours), close(theirs);
    ASK("socket", (ours = socket(AF_INET, SOCK_STREAM, 0)) < 0);
    ASK("connect", connect(ours, (void *)&address, sizeof address));
    ASK("accept", (theirs = accept(listener, NULL, NULL)) < 0);
    ASK("epoll_create1", (watch = epoll_create1(0)) < 0);
    ASK("epoll_ctl", epoll_ctl(watch, EPOLL_CTL_ADD, theirs, &event));
#define QUIETLY(call) (errno = UNTOUCHED, (call), changed += errno != UNTOUCHED)
    polled = (struct pollfd){theirs, POLLOUT, 0};
    for (int round = 0; round < 200; round++) {
        QUIETLY(write(ours, "x", 1));
        QUIETLY(recv(theirs, &byte, 1, 0));
        QUIETLY(send(theirs, "x", 1, 0));
        QUIETLY(read(ours, &byte, 1));
        QUIETLY(poll(&polled, 1, 0));
        QUIETLY(epoll_wait(watch, &event, 1, 0));
        QUIETLY(select(ours + 1, NULL, only(ours, &writable), NULL, &(struct timeval){0, 0}));
        if (round % 50 == 49)
            pause_ms(3);
    }
    printf("of a connection that comes to shared memory: %d\n", changed);
    ASK("getsockopt", getsockopt(ours, SOL_SOCKET, SO_ERROR, &value, &(socklen_t){sizeof value}));
    ASK("setsockopt", setsockopt(ours, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)));
    ASK("fcntl", fcntl(ours, F_SETFL, 0));
    ASK("ioctl", ioctl(theirs, FIONREAD, &value));
    ASK("epoll_ctl, changed", epoll_ctl(watch, EPOLL_CTL_MOD, theirs, &event));
    ASK("epoll_ctl, removed", epoll_ctl(watch, EPOLL_CTL_DEL, theirs, &event));
    ASK("epoll_ctl, added", epoll_ctl(watch, EPOLL_CTL_ADD, theirs, &event));
    ASK("dup", (value = dup(theirs)) < 0);
    ASK("close of a duplicate", close(value));
    ASK("dup2", dup2(theirs, 60) != 60);
    ASK("close of another", close(60));
    ASK("sendfile", sendfile(ours, file, &(off_t){0}, 4));
    ASK("recv", recv(theirs, bytes + 32, 4, 0));
    ASK("system", system("true"));
    ASK("send with a strange flag", send(ours, "x", 1, 1 << 20));
    ASK("recv of it", recv(theirs, bytes + 32, 4, 0));
    ASK("shutdown", shutdown(ours, SHUT_WR));
    ASK("recv of the end", recv(theirs, bytes + 32, 4, 0));
    ASK("close of a set", close(watch));
    ASK("close", close(theirs));
    ASK("close of the other end", close(ours));
    connect_anew();
}

/* Lengths that exceed all memory. The buffers are valid for a few bytes, and far from the end of
 * memory. */
static void lengths(void)
{
    static const size_t longest[] = {SIZE_MAX, (size_t)SSIZE_MAX, (size_t)INT32_MAX + 1, (size_t)1 << 46, (size_t)1 << 47};
    static char far[64];
    for (size_t i = 0; i < LEN(longest); i++) {
        size_t n = longest[i];
        struct iovec one = {far, n}, two[] = {{far, 2}, {far + 2, n}};
        char name[64];
        struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1};
        struct mmsghdr messages = {.msg_hdr = message};
#define OF_LENGTH(what, call)                                                                                          \
    do {                                                                                                               \
        lay("abcdef");                                                                                                 \
        snprintf(name, sizeof name, "%s of %zx bytes", what, n);                                                       \
        ASK(name, call);                                                                                               \
        show_left(name);                                                                                               \
    } while (0)
        next_connection();
        OF_LENGTH("read", read(theirs, far, n));
        OF_LENGTH("recv", recv(theirs, far, n, 0));
        OF_LENGTH("recvfrom", recvfrom(theirs, far, n, 0, NULL, NULL));
        OF_LENGTH("readv", readv(theirs, &one, 1));
        OF_LENGTH("readv, in two", readv(theirs, two, 2));
        OF_LENGTH("recvmsg", recvmsg(theirs, &message, 0));
        OF_LENGTH("recvmmsg", recvmmsg(theirs, &messages, 1, 0, NULL));
        OF_LENGTH("sendfile", sendfile(ours, ends[0], NULL, n));
        OF_LENGTH("sendfile of a file", n < (size_t)1 << 46 ? 0 : sendfile(ours, file, NULL, n));
        lseek(file, 0, SEEK_SET);
        OF_LENGTH("write", (ssize_t)n > 0 ? 0 : write(ours, far, n));
        OF_LENGTH("splice", splice(theirs, NULL, ends[1], NULL, n, SPLICE_F_NONBLOCK));
        while (read(ends[0], far, sizeof far) > 0)
            ;
    }
}

int main(int argc, char **argv)
{
    struct epoll_event event = {.events = EPOLLIN};
    if (argc != 3 || pipe2(ends, O_NONBLOCK))
        die("usage: numbers PORT GATE");
    file = open("/etc/passwd", O_RDONLY);
    set = epoll_create1(0);
    listen_on(atoi(argv[1]));
    first_connection(argv[2]);
    epoll_ctl(set, EPOLL_CTL_ADD, theirs, &event);
    for (size_t i = 0; i < LEN(numbers); i++) {
        as_descriptor(numbers[i]);
        show_left(label("as a descriptor", numbers[i]));
    }
    next_connection();
    epoll_ctl(set, EPOLL_CTL_ADD, theirs, &event);
    for (size_t i = 0; i < LEN(numbers); i++) {
        lay("abcdef");
        as_a_limit(numbers[i]);
        show_left(label("as a limit", numbers[i]));
    }
    for (size_t i = 0; i < LEN(numbers); i++) {
        next_connection();
        as_anything_else(numbers[i]);
        show_left(label("as anything else", numbers[i]));
        as_a_signal(numbers[i]);
        as_memory(numbers[i]);
        as_a_childs(numbers[i]);
    }
    flags_of_data();
    nothing_is_held_back();
    sleepers();
    successes();
    lengths();
    return 0;
}
