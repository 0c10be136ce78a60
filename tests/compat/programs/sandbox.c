/* Programs that install a seccomp filter while they hold a connection: sandbox SCENARIO PORT
 *
 * The filter kills the process for every call that the plain program does not need afterwards. */

#include "phases.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>

/* Builds a filter that allows the listed calls, up to -1, or, if negated, kills for these and
 * allows the others. */
static struct sock_fprog filter_of(const int *calls, int negated) {
    static struct sock_filter code[128];
    unsigned short length = 0;
    int match = negated ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ALLOW;
    int other = negated ? SECCOMP_RET_ALLOW : SECCOMP_RET_KILL_PROCESS;
    code[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (; *calls >= 0; calls++) {
        code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, *calls, 0, 1);
        code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, match);
    }
    code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, other);
    return (struct sock_fprog){length, code};
}

static void install(const int *calls, int negated) {
    struct sock_fprog filter = filter_of(calls, negated);
    expect(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no new privileges");
    expect(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0, "the filter");
}

#define ONLY(...) install((const int[]){__VA_ARGS__, SYS_exit_group, -1}, 0)

static void by_prctl(int connection) {
    serve(connection, 'P');
    ONLY(SYS_read, SYS_write);
    serve(connection, 'S');
    _exit(0);
}

static void by_seccomp(int connection) {
    serve(connection, 'P');
    /* This only asks whether the kernel has filters, and installs none. */
    expect(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, NULL) < 0 && errno == EFAULT, "a question");
    serve(connection, 'Q');
    struct sock_fprog filter = filter_of((const int[]){SYS_read, SYS_write, SYS_exit_group, -1}, 0);
    expect(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "no new privileges");
    expect(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0, "the filter");
    serve(connection, 'S');
    _exit(0);
}

static void strict(int connection) {
    serve(connection, 'P');
    expect(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) == 0, "the strict mode");
    serve(connection, 'S');
    syscall(SYS_exit, 0);
}

/* Installs the filter when a question is half read, and its rest is in the lane. */
static void half_read(int connection) {
    struct {
        struct frame head;
        char body[MOST];
    } message;
    serve(connection, 'P');
    do {
        expect(read_all(connection, &message.head, sizeof message.head) > 0, "a head");
        if (message.head.length < 100) {
            expect(read_all(connection, message.body, message.head.length) > 0 || message.head.length == 0, "a body");
            message.head.who = 's';
            expect(write_all(connection, &message, sizeof message.head + message.head.length) > 0, "an answer");
        }
    } while (message.head.length < 100);
    expect(read_all(connection, message.body, 50) > 0, "half a body");
    ONLY(SYS_read, SYS_write);
    expect(read_all(connection, message.body + 50, message.head.length - 50) > 0, "the other half");
    message.head.who = 's';
    expect(write_all(connection, &message, sizeof message.head + message.head.length) > 0, "an answer");
    if (!message.head.last)
        serve(connection, 'S');
    _exit(0);
}

/* Serves as serve() does, but waits before it reads. */
static int serve_waiting(int connection, char who, void (*wait)(void *), void *set) {
    struct {
        struct frame head;
        char body[MOST];
    } message;
    size_t had = 0;
    for (;;) {
        size_t wanted = sizeof message.head + (had < sizeof message.head ? 0 : message.head.length);
        if (had == wanted) {
            message.head.who = who;
            if (write_all(connection, &message, wanted) < 0)
                return 0;
            if (message.head.last)
                return 1;
            had = 0;
            continue;
        }
        ssize_t count = recv(connection, (char *)&message + had, wanted - had, MSG_DONTWAIT);
        if (count < 0) {
            expect(errno == EAGAIN, "nothing there");
            wait(set);
        } else if (count == 0)
            return 0;
        else
            had += count;
    }
}

static void wait_by_epoll(void *set) {
    struct epoll_event event;
    expect(epoll_wait(*(int *)set, &event, 1, -1) == 1 && event.data.u64 == 77, "the one event");
}

static void in_epoll(int connection, uint32_t edges) {
    int set = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | edges, .data.u64 = 77};
    expect(epoll_ctl(set, EPOLL_CTL_ADD, connection, &event) == 0, "epoll_ctl");
    serve_waiting(connection, 'P', wait_by_epoll, &set);
    ONLY(SYS_recvfrom, SYS_write, SYS_epoll_wait);
    serve_waiting(connection, 'S', wait_by_epoll, &set);
    _exit(0);
}

static void in_epoll_by_level(int connection) {
    in_epoll(connection, 0);
}

static void in_epoll_by_edge(int connection) {
    in_epoll(connection, EPOLLET);
}

static void wait_by_poll(void *connection) {
    struct pollfd set = {.fd = *(int *)connection, .events = POLLIN};
    expect(poll(&set, 1, -1) == 1 && set.revents == POLLIN, "poll");
}

static void wait_by_select(void *connection) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(*(int *)connection, &set);
    expect(select(*(int *)connection + 1, &set, NULL, NULL, NULL) == 1, "select");
}

static void polling(int connection) {
    serve_waiting(connection, 'P', wait_by_poll, &connection);
    ONLY(SYS_recvfrom, SYS_write, SYS_poll, SYS_pselect6);
    serve_waiting(connection, 'S', wait_by_poll, &connection);
    _exit(0);
}

static void selecting(int connection) {
    serve_waiting(connection, 'P', wait_by_select, &connection);
    ONLY(SYS_recvfrom, SYS_write, SYS_poll, SYS_pselect6);
    serve_waiting(connection, 'S', wait_by_select, &connection);
    _exit(0);
}

static volatile sig_atomic_t ticks;

static void tick(int number) {
    ticks += number == SIGALRM;
}

/* Uses handlers that were installed before. */
static void handlers(int connection) {
    signal(SIGALRM, tick);
    struct itimerval time = {{0, 500}, {0, 500}};
    setitimer(ITIMER_REAL, &time, NULL);
    serve(connection, 'P');
    ONLY(SYS_read, SYS_write, SYS_rt_sigreturn);
    int before = ticks;
    serve(connection, 'S');
    while (ticks == before)
        ;
    _exit(0);
}

/* Makes a connection to the program itself in the sandbox. */
static void made_inside(int connection) {
    serve(connection, 'P');
    int listener = listen_on(0), far, near;
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    expect(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    ONLY(SYS_read, SYS_write, SYS_socket, SYS_connect, SYS_accept, SYS_close, SYS_epoll_create1, SYS_epoll_ctl,
         SYS_epoll_wait, SYS_dup, SYS_dup2, SYS_shutdown, SYS_setsockopt);
    for (int round = 0; round < 3; round++) {
        near = socket(AF_INET, SOCK_STREAM, 0);
        expect(connect(near, (struct sockaddr *)&address, length) == 0, "connect");
        far = accept(listener, NULL, NULL);
        int set = epoll_create1(0), one = 1;
        struct epoll_event event = {.events = EPOLLIN, .data.u64 = 77};
        expect(epoll_ctl(set, EPOLL_CTL_ADD, far, &event) == 0, "epoll_ctl");
        expect(setsockopt(near, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one) == 0, "setsockopt");
        for (int message = 0; message < 500; message++) {
            char byte = message, got;
            expect(write(near, &byte, 1) == 1, "write");
            wait_by_epoll(&set);
            expect(read(far, &got, 1) == 1 && got == byte, "read");
        }
        int copy = dup(near);
        expect(dup2(near, copy) == copy && shutdown(near, SHUT_WR) == 0, "dup2 and shutdown");
        close(copy), close(near), close(far), close(set);
    }
    serve(connection, 'S');
    _exit(0);
}

/* Calls that the shim needs and this program does not. */
#define OURS                                                                                                      \
    SYS_memfd_create, SYS_eventfd2, SYS_socket, SYS_connect, SYS_sendmsg, SYS_recvmsg, SYS_getsockopt, SYS_ioctl, \
        SYS_fcntl, SYS_fstat, SYS_pidfd_open, SYS_getpid, SYS_getppid, SYS_madvise, SYS_preadv2, SYS_ppoll, SYS_prlimit64

static void fork_inside(int connection) {
    serve(connection, 'P');
    install((const int[]){OURS, -1}, 1);
    pid_t child = fork();
    if (child == 0) {
        serve(connection, 'C');
        _exit(7);
    }
    wait_for(child);
    serve(connection, 'S');
}

/* The child is in a sandbox, and its parent is not. The parent continues when the child has
 * ended. */
static void child_in_sandbox(int connection) {
    serve(connection, 'P');
    pid_t child = fork();
    if (child == 0) {
        ONLY(SYS_read, SYS_write);
        serve(connection, 'C');
        _exit(7);
    }
    wait_for(child);
    serve(connection, 'P');
}

/* A child in a sandbox forks unnoticed, and the grandchild may hold the connection. It ends when
 * its grandparent has served. */
static void grandchild_in_sandbox(int connection) {
    int over[2];
    char none;
    serve(connection, 'P');
    expect(pipe(over) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        close(over[1]);
        install((const int[]){OURS, -1}, 1);
        if (fork() == 0)
            expect(read(over[0], &none, 1) == 0, "the end");
        _exit(7);
    }
    wait_for(child);
    serve(connection, 'P');
}

static void exec_inside(int connection) {
    serve(connection, 'P');
    install((const int[]){SYS_memfd_create, SYS_getsockopt, -1}, 1);
    dup2(connection, 3);
    char *const arguments[] = {"serve_on", "3", NULL}, *const nothing[] = {NULL};
    execve("./serve_on", arguments, nothing);
    _exit(127);
}

static const struct scenario scenarios[] = {
    {"by_prctl", by_prctl},
    {"by_seccomp", by_seccomp},
    {"strict", strict},
    {"half_read", half_read},
    {"in_epoll_by_level", in_epoll_by_level},
    {"in_epoll_by_edge", in_epoll_by_edge},
    {"polling", polling},
    {"selecting", selecting},
    {"handlers", handlers},
    {"made_inside", made_inside},
    {"fork_inside", fork_inside},
    {"child_in_sandbox", child_in_sandbox},
    {"grandchild_in_sandbox", grandchild_in_sandbox},
    {"exec_inside", exec_inside},
};

int main(int argc, char **argv) {
    return RUN(argc, argv, scenarios);
}
