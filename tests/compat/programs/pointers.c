/* Bad addresses, which the kernel refuses. They are passed in system calls by number, where no
 * libc function checks them, and through functions that pass them on. Unread data must still be
 * there afterwards. usage: pointers PORT GATE */
#include "questions.h"

static char *none, *fixed; /* Pages without any access, and pages that are read-only. */
static char bytes[64] = "0123456789", label_text[128];
static int ends[2], file, folder;

/* Addresses that cannot be accessed, each for another reason. */
static char *bad[4];

/* Leaves no end of a string before the inaccessible page. */
static void leave_no_end(void)
{
    memset(none - 64, 'x', 64);
}

static const char *label(const char *what, int index)
{
    snprintf(label_text, sizeof label_text, "%s, bad %d", what, index);
    return label_text;
}

static void waits_by_number(int index)
{
    char *at = bad[index];
    sigset_t mask;
    struct timespec now = {0, 0};
    struct pollfd polled = {theirs, POLLIN, 0};
    struct epoll_event event = {.events = EPOLLIN};
    unsigned long readable[16] = {0}, pack[] = {(unsigned long)&mask, 8}, wrong[] = {(unsigned long)&mask, 128},
                  lost[] = {(unsigned long)at, 8};
    int set = epoll_create1(0), count = theirs + 1;
    epoll_ctl(set, EPOLL_CTL_ADD, theirs, &event);
    sigemptyset(&mask);
#define READABLE (readable[theirs / 64] = 1ul << theirs % 64, readable)
    ASK(label("poll", index), syscall(SYS_poll, at, 1, 0));
    ASK(label("ppoll", index), syscall(SYS_ppoll, at, 1, &now, &mask, 8));
    ASK(label("ppoll, time", index), syscall(SYS_ppoll, &polled, 1, at, &mask, 8));
    ASK(label("ppoll, mask", index), syscall(SYS_ppoll, &polled, 1, &now, at, 8));
    ASK(label("ppoll, size of mask", index), syscall(SYS_ppoll, &polled, 1, &now, &mask, 128));
    ASK(label("ppoll, size of no mask", index), syscall(SYS_ppoll, &polled, 1, &now, NULL, 128));
    ASK(label("pselect6, set", index), syscall(SYS_pselect6, count, at, NULL, NULL, &now, pack));
    ASK(label("pselect6, time", index), syscall(SYS_pselect6, count, READABLE, NULL, NULL, at, pack));
    ASK(label("pselect6, pack", index), syscall(SYS_pselect6, count, READABLE, NULL, NULL, &now, at));
    ASK(label("pselect6, mask", index), syscall(SYS_pselect6, count, READABLE, NULL, NULL, &now, lost));
    ASK(label("pselect6, size", index), syscall(SYS_pselect6, count, READABLE, NULL, NULL, &now, wrong));
    ASK(label("select, set", index), syscall(SYS_select, count, at, NULL, NULL, &(struct timeval){0, 0}));
    ASK(label("select, other set", index), syscall(SYS_select, count, READABLE, at, NULL, &(struct timeval){0, 0}));
    ASK(label("select, time", index), syscall(SYS_select, count, READABLE, NULL, NULL, at));
    ASK(label("epoll_ctl", index), syscall(SYS_epoll_ctl, set, EPOLL_CTL_MOD, theirs, at));
    ASK(label("epoll_pwait, mask", index), syscall(SYS_epoll_pwait, set, &event, 1, 0, at, 8));
    ASK(label("epoll_pwait, size of mask", index), syscall(SYS_epoll_pwait, set, &event, 1, 0, &mask, 128));
    ASK(label("epoll_pwait2, time", index), syscall(SYS_epoll_pwait2, set, &event, 1, at, NULL, 8));
    ASK(label("epoll_pwait2, mask", index), syscall(SYS_epoll_pwait2, set, &event, 1, &now, at, 8));
    ASK(label("epoll_pwait2, size of mask", index), syscall(SYS_epoll_pwait2, set, &event, 1, &now, &mask, 4));
    close(set);
}

static void others_by_number(int index)
{
    struct {
        void *handler;
        unsigned long flags;
        void *restorer;
        unsigned long mask;
    } action = {.handler = SIG_IGN}, old = {0};
    char *at = bad[index], *list[] = {at, NULL}, *arguments[] = {"true", NULL};
    struct iocb *requests[] = {(void *)at};
    aio_context_t context = 0;
    syscall(SYS_io_setup, 4, &context);
    ASK(label("io_submit, list", index), syscall(SYS_io_submit, context, 1, at));
    ASK(label("io_submit, request", index), syscall(SYS_io_submit, context, 1, requests));
    ASK(label("io_submit, no such context", index), syscall(SYS_io_submit, 0x1234, 1L << 40, at));
    syscall(SYS_io_destroy, context);
    ASK(label("clone3", index), syscall(SYS_clone3, at, 64));
    ASK(label("rt_sigaction", index), syscall(SYS_rt_sigaction, SIGUSR1, at, NULL, 8));
    ASK(label("rt_sigaction, size", index), syscall(SYS_rt_sigaction, SIGUSR1, &action, NULL, 16));
    ASK(label("rt_sigaction, old", index), syscall(SYS_rt_sigaction, SIGUSR1, &action, at, 8));
    syscall(SYS_rt_sigaction, SIGUSR1, NULL, &old, 8);
    printf("... which has been done: %d\n", old.handler == SIG_IGN);
    signal(SIGUSR1, SIG_DFL);
    leave_no_end();
    ASK(label("execve", index), syscall(SYS_execve, at, arguments, environ));
    ASK(label("execve, arguments", index), syscall(SYS_execve, "/bin/true", at, environ));
    ASK(label("execve, an argument", index), syscall(SYS_execve, "/bin/true", list, environ));
    ASK(label("execve, environment", index), syscall(SYS_execve, "/bin/true", arguments, at));
    ASK(label("execve, a variable", index), syscall(SYS_execve, "/bin/true", arguments, list));
    ASK(label("execveat", index), syscall(SYS_execveat, AT_FDCWD, at, arguments, environ, 0));
    ASK(label("execveat, a variable", index), syscall(SYS_execveat, AT_FDCWD, "/bin/true", arguments, list, 0));
}

/* Functions of libc that pass addresses on. */
static void functions(int index)
{
    char *at = bad[index], *list[] = {at, NULL}, *arguments[] = {"true", NULL};
    struct iovec one = {at, 4};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1}, nowhere = {.msg_iov = (void *)at, .msg_iovlen = 1};
    struct mmsghdr messages = {.msg_hdr = message};
    int value = 0;
    pid_t pid;
    leave_no_end();
    ASK(label("execve, environment by libc", index), execve("/bin/true", arguments, (void *)at));
    ASK(label("execve, a variable by libc", index), execve("/bin/true", arguments, list));
    ASK(label("fexecve, a variable", index), fexecve(file, arguments, list));
    ASK(label("posix_spawn, environment", index), posix_spawn(&pid, "/bin/true", NULL, NULL, arguments, (void *)at));
    ASK(label("read", index), read(theirs, at, 4));
    ASK(label("write", index), write(ours, at, 4));
    ASK(label("readv, list", index), readv(theirs, (void *)at, 1));
    ASK(label("writev, list", index), writev(ours, (void *)at, 1));
    ASK(label("readv", index), readv(theirs, &one, 1));
    ASK(label("writev", index), writev(ours, &one, 1));
    ASK(label("recvmsg", index), recvmsg(theirs, &message, 0));
    ASK(label("sendmsg", index), sendmsg(ours, &message, 0));
    ASK(label("recvmsg, header", index), recvmsg(theirs, (void *)at, 0));
    ASK(label("sendmsg, header", index), sendmsg(ours, (void *)at, 0));
    ASK(label("recvmsg, list", index), recvmsg(theirs, &nowhere, 0));
    ASK(label("sendmsg, list", index), sendmsg(ours, &nowhere, 0));
    ASK(label("recvmmsg, header", index), recvmmsg(theirs, (void *)at, 1, 0, NULL));
    ASK(label("sendmmsg, header", index), sendmmsg(ours, (void *)at, 1, 0));
    ASK(label("recvmmsg, time", index), recvmmsg(theirs, &messages, 1, 0, (void *)at));
    ASK(label("sendfile, offset", index), sendfile(ours, file, (void *)at, 4));
    ASK(label("splice, offset", index), splice(theirs, (void *)at, ends[1], NULL, 4, 0));
    ASK(label("splice, offset there", index), splice(ends[0], NULL, ours, (void *)at, 4, SPLICE_F_NONBLOCK));
    ASK(label("getsockopt", index), getsockopt(ours, SOL_SOCKET, SO_ERROR, at, &(socklen_t){4}));
    ASK(label("getsockopt, length", index), getsockopt(ours, SOL_SOCKET, SO_ERROR, &value, (void *)at));
    ASK(label("setsockopt", index), setsockopt(ours, SOL_SOCKET, SO_RCVLOWAT, at, 4));
    ASK(label("getpeername", index), getpeername(ours, (void *)at, &(socklen_t){16}));
    ASK(label("FIONREAD", index), ioctl(theirs, FIONREAD, at));
    ASK(label("FIONBIO", index), ioctl(theirs, FIONBIO, at));
    ASK(label("F_GETLK", index), fcntl(theirs, F_GETLK, at));
    ASK(label("connect", index), connect(ours, (void *)at, 16));
    ASK(label("epoll_wait of a socket", index), epoll_wait(ours, (void *)at, 1, 0));
    ASK(label("lio_listio, mode", index), lio_listio(99, (void *)at, 1, NULL));
}

/* Memory that can be read but not written. */
static void written_by_the_kernel(void)
{
    struct iovec one = {bytes + 32, 2};
    struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = &one, .msg_iovlen = 1}}};
    unsigned long readable[16] = {0};
    int count = theirs + 1;
    struct pollfd polled = {theirs, POLLIN, 0};
    readable[theirs / 64] = 1ul << theirs % 64;
    mprotect(fixed, 4096, PROT_READ | PROT_WRITE);
    memcpy(fixed + 64, &polled, sizeof polled);
    memcpy(fixed + 128, readable, sizeof readable);
    mprotect(fixed, 4096, PROT_READ);
    ASK("poll of what stays, with nothing", poll((void *)(fixed + 64), 1, 5));
    ASK("select of what stays, with nothing", select(count, (void *)(fixed + 128), NULL, NULL, &(struct timeval){0, 5}));
    lay("abcdef");
    ASK("poll of what stays", poll((void *)(fixed + 64), 1, -1));
    ASK("ppoll of what stays", ppoll((void *)(fixed + 64), 1, NULL, NULL));
    ASK("select of what stays", select(count, (void *)(fixed + 128), NULL, NULL, NULL));
    ASK("sigaction of no signal", sigaction(-1, (void *)none, NULL));
    ASK("sigaction of one of libc's", sigaction(32, (void *)none, NULL));
    ASK("SYS_select, time that stays", syscall(SYS_select, count, READABLE, NULL, NULL, fixed));
    ASK("SYS_pselect6, time that stays", syscall(SYS_pselect6, count, READABLE, NULL, NULL, fixed, NULL));
    ASK("SYS_ppoll, time that stays",
        syscall(SYS_ppoll, &(struct pollfd){theirs, POLLIN, 0}, 1, fixed, NULL, 8));
    ASK("recvmmsg, time that stays", recvmmsg(theirs, messages, 1, 0, (void *)fixed));
    ASK("recv", recv(theirs, fixed, 4, 0));
    ASK("sendfile, offset that stays", sendfile(ours, file, (void *)fixed, 4));
    ASK("sendfile of a folder", sendfile(ours, folder, NULL, 4));
    show_left("what is written");
}

/* The second of two messages cannot be read. The first is sent, and the call succeeds. */
static void half_of_two(void)
{
    struct iovec one = {bytes, 4};
    struct mmsghdr *messages = (void *)(none - sizeof *messages);
    *messages = (struct mmsghdr){.msg_hdr = {.msg_iov = &one, .msg_iovlen = 1}};
    ASK("sendmmsg", sendmmsg(ours, messages, 2, 0));
    pause_ms(5);
    ASK("recvmmsg", recvmmsg(theirs, messages, 1, MSG_DONTWAIT, NULL));
    show_left("half of two");
}

/* Descriptors are looked for in control data only within its length. */
static void control_data(void)
{
    static const size_t lengths[] = {0, 15, 16, 20, 24, 4000, SIZE_MAX, (size_t)SSIZE_MAX};
    int pair[2];
    struct cmsghdr *head = (void *)(none - 24);
    struct iovec one = {bytes, 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = head, .msg_controllen = 24};
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    for (size_t i = 0; i < LEN(lengths); i++) {
        *head = (struct cmsghdr){.cmsg_len = lengths[i], .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memset(CMSG_DATA(head), 0xff, 8);
        ASK(label("descriptors of this length", i), sendmsg(pair[0], &message, 0));
    }
    message.msg_controllen = 1 << 20;
    ASK("more control data than there is", sendmsg(pair[0], &message, 0));
    close(pair[0]), close(pair[1]);
}

/* Events that a wait cannot return must stay pending. */
static void events(uint32_t kind, const char *name)
{
    struct epoll_event event = {.events = EPOLLIN | kind, .data.fd = 1}, *edge = (void *)(none - sizeof event);
    struct epoll_event good[4];
    int set = epoll_create1(0), other[2];
    next_connection();
    epoll_ctl(set, EPOLL_CTL_ADD, theirs, &event);
    ASK(name, epoll_wait(set, (void *)none, 4, 0));
    ASK("... for a while", epoll_wait(set, (void *)none, 4, 20));
    lay("abcdef");
    ASK("... with bytes", epoll_wait(set, (void *)none, 4, 1000));
    ASK("... and again", epoll_wait(set, (void *)fixed, 4, 1000));
    ASK("... at an address of the kernel's", epoll_wait(set, (void *)bad[2], 4, 0));
    ASK("... where one has room", epoll_wait(set, edge, 4, 1000));
    ASK("... which has been told", epoll_wait(set, good, 4, 0));
    if (pipe(other))
        die("pipe");
    event.data.fd = 2;
    epoll_ctl(set, EPOLL_CTL_ADD, other[0], &event);
    event.data.fd = 1;
    epoll_ctl(set, EPOLL_CTL_MOD, theirs, &event);
    if (write(other[1], "x", 1) != 1)
        die("write");
    ASK("... one of two", epoll_wait(set, edge, 2, 1000));
    int first = edge->data.fd;
    ASK("... and the other, or both", epoll_wait(set, good, 2, 1000));
    printf("... which is %s\n", good[0].data.fd != first ? "the other" : "the same");
    ASK("recv", recv(theirs, bytes + 32, 6, MSG_DONTWAIT));
    close(set), close(other[0]), close(other[1]);
}

/* Descriptors in an fd_set beyond the process's descriptor table, and within it. */
static void stale_members(void)
{
    static const int numbers[] = {60, 63, 64, 127, 128, 900, 1023};
    unsigned long readable[16];
    for (size_t i = 0; i < LEN(numbers); i++)
        for (int with = 0; with < 2; with++) {
            memset(readable, 0, sizeof readable);
            readable[numbers[i] / 64] |= 1ul << numbers[i] % 64;
            if (with)
                readable[theirs / 64] |= 1ul << theirs % 64;
            ASK(label(with ? "with a connection" : "alone", numbers[i]),
                select(1024, (void *)readable, NULL, NULL, &(struct timeval){0, 0}));
            printf("... %lx %lx\n", readable[0], readable[numbers[i] / 64]);
        }
}

int main(int argc, char **argv)
{
    if (argc != 3 || pipe(ends))
        die("usage: pointers PORT GATE");
    char *pages = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    none = pages + 4096, fixed = pages + 2 * 4096;
    mprotect(none, 4096, PROT_NONE);
    memcpy(fixed, &(struct timespec){1, 1000}, sizeof(struct timespec));
    mprotect(fixed, 4096, PROT_READ);
    bad[0] = none, bad[1] = none - 2, bad[2] = (char *)(1ul << 63), bad[3] = (char *)8;
    file = open("/etc/passwd", O_RDONLY);
    folder = open("/", O_RDONLY);
    listen_on(atoi(argv[1]));
    first_connection(argv[2]);
    for (int index = 0; index < (int)LEN(bad); index++) {
        lay("abcdef");
        waits_by_number(index);
        functions(index);
        others_by_number(index);
        show_left(label("others", index));
        next_connection();
    }
    written_by_the_kernel();
    next_connection();
    half_of_two();
    control_data();
    events(0, "level");
    events(EPOLLET, "edge");
    events(EPOLLONESHOT, "once");
    events(EPOLLONESHOT | EPOLLET, "edge, once");
    next_connection();
    stale_members();
    return 0;
}
