/* Changes that a process makes to itself while it holds a connection: processes SCENARIO PORT */

#include "phases.h"

#include <grp.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

/* ---- a descriptor that is passed to another process ------------------------------------- */

static ssize_t by_sendmsg(int to, struct msghdr *message) {
    return sendmsg(to, message, 0);
}

static ssize_t by_sendmmsg(int to, struct msghdr *message) {
    struct mmsghdr messages[2] = {{*message, 0}, {.msg_hdr = *message}};
    messages[1].msg_hdr.msg_controllen = 0;
    return sendmmsg(to, messages, 2, 0) == 2 ? (ssize_t)messages[0].msg_len : -1;
}

static ssize_t by_number(int to, struct msghdr *message) {
    return syscall(SYS_sendmsg, to, message, 0);
}

static int receive_descriptor(int from) {
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int fd = -1;
    expect(recvmsg(from, &message, 0) == 1, "a message");
    expect(message.msg_controllen > 0, "control data");
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

/* A child without the connection receives it, serves, and ends. The parent continues. */
static void pass_on(int connection, ssize_t (*pass)(int, struct msghdr *)) {
    int pair[2];
    expect(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    pid_t child = fork();
    if (child == 0) {
        close(connection);
        close(pair[1]);
        serve(receive_descriptor(pair[0]), 'C');
        _exit(7);
    }
    close(pair[0]);
    serve(connection, 'P');
    char byte = 'x', control[CMSG_SPACE(sizeof connection)] = {0};
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    *CMSG_FIRSTHDR(&message) = (struct cmsghdr){CMSG_LEN(sizeof connection), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), &connection, sizeof connection);
    expect(pass(pair[1], &message) == 1, "pass on");
    wait_for(child);
    serve(connection, 'P');
}

static void passed_by_sendmsg(int connection) {
    pass_on(connection, by_sendmsg);
}

static void passed_by_sendmmsg(int connection) {
    pass_on(connection, by_sendmmsg);
}

static void passed_by_number(int connection) {
    pass_on(connection, by_number);
}

/* Duplicates the descriptor, as tools do that show the open files of a process. */
static void looked_at_by_pidfd(int connection) {
    int pair[2];
    char byte;
    expect(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        close(connection);
        expect(read(pair[0], &byte, 1) == 1, "the word");
        int copy = pidfd_getfd(pidfd_open(parent, 0), connection, 0), number = 0;
        struct sockaddr_in address;
        socklen_t length = sizeof address, size = sizeof number;
        expect(copy >= 0 && getpeername(copy, (struct sockaddr *)&address, &length) == 0, "the copy's peer");
        expect(getsockopt(copy, SOL_SOCKET, SO_TYPE, &number, &size) == 0 && number == SOCK_STREAM, "its type");
        close(copy);
        _exit(7);
    }
    serve(connection, 'P');
    expect(write(pair[1], "x", 1) == 1, "the word");
    wait_for(child);
    serve(connection, 'P');
}

/* Echoes bytes: the third process, connected to a socket that two processes have held since
 * before the connect. */
static void echo(int listener) {
    int far = accept(listener, NULL, NULL);
    char byte;
    while (read(far, &byte, 1) == 1)
        expect(write(far, &byte, 1) == 1, "an echo");
    _exit(7);
}

static void ping(int fd, int times) {
    char byte = 'x';
    while (times-- > 0)
        expect(write(fd, &byte, 1) == 1 && read(fd, &byte, 1) == 1, "an echo comes back");
}

static void shared_before_connect(int connection) {
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    int listener = listen_on(0), near, turn[2], back[2];
    char byte;
    expect(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    pid_t far = fork();
    if (far == 0) {
        close(connection);
        echo(listener);
    }
    near = socket(AF_INET, SOCK_STREAM, 0);
    expect(pipe(turn) == 0 && pipe(back) == 0, "pipe");
    pid_t other = fork();
    if (other == 0) {
        close(connection);
        close(turn[1]);
        while (read(turn[0], &byte, 1) == 1) {
            ping(near, 1000);
            expect(write(back[1], &byte, 1) == 1, "my turn is over");
        }
        _exit(7);
    }
    expect(connect(near, (struct sockaddr *)&address, length) == 0, "connect");
    for (int round = 0; round < 3; round++) {
        ping(near, 1000);
        usleep(20000);
        ping(near, 1000);
        expect(write(turn[1], "x", 1) == 1 && read(back[0], &byte, 1) == 1, "the other's turn");
    }
    close(near), close(turn[1]);
    wait_for(other), wait_for(far);
    serve(connection, 'P');
}

/* ---- descriptor numbers that may be taken ---------------------------------------------- */

static void closing_everything_else(int connection) {
    serve(connection, 'P');
    for (int fd = 3; fd < 70000; fd++)
        if (fd != connection)
            close(fd);
    serve(connection, 'Q');
    for (int fd = 3; fd < 70000; fd++)
        if (fd != connection)
            syscall(SYS_close, fd);
    serve(connection, 'R');
    if (connection > 3)
        close_range(3, connection - 1, 0);
    close_range(connection + 1, ~0U, 0);
    serve(connection, 'S');
    closefrom(connection + 1);
    serve(connection, 'T');
}

static void duplicating_over_everything(int connection) {
    int null = open("/dev/null", O_RDWR);
    serve(connection, 'P');
    for (int fd = 3; fd < 1200; fd++)
        if (fd != connection && fd != null && dup2(null, fd) != fd)
            expect(errno == EBADF || errno == EMFILE, "dup2");
    serve(connection, 'Q');
    for (int fd = 3; fd < 1200; fd++)
        if (fd != connection && fd != null && dup3(null, fd, O_CLOEXEC) != fd)
            expect(errno == EBADF || errno == EMFILE, "dup3");
    serve(connection, 'R');
    for (int fd = 3; fd < 1200; fd++)
        if (fd != connection)
            close(fd);
    serve(connection, 'S');
}

static void daemon_without_descriptors(int connection) {
    serve(connection, 'P');
    int done[2];
    expect(pipe(done) == 0, "pipe");
    if (fork() == 0) {
        setsid();
        if (fork() != 0)
            _exit(0);
        expect(dup2(connection, 20) == 20, "dup2");
        expect(dup2(done[1], 21) == 21, "dup2");
        expect(close_range(3, 19, 0) == 0, "close_range");
        closefrom(22);
        serve(20, 'D');
        _exit(0);
    }
    close(connection);
    close(done[1]);
    wait(NULL);
    char none;
    expect(read(done[0], &none, 1) == 0, "the daemon ends");
}

static void limit_descriptors(rlim_t most) {
    struct rlimit limit = {most, most};
    expect(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
}

static void few_descriptors(int connection) {
    serve(connection, 'P');
    limit_descriptors(16);
    serve(connection, 'Q');
    for (int fd = 3; fd < 70000; fd++)
        if (fd != connection)
            close(fd);
    serve(connection, 'R');
}

static void no_descriptors(int connection) {
    serve(connection, 'P');
    limit_descriptors(0);
    serve(connection, 'Q');
}

static void few_descriptors_from_the_start(int connection) {
    limit_descriptors(connection + 2);
    serve(connection, 'P');
}

/* ---- users and namespaces --------------------------------------------------------------- */

static void another_user(int connection) {
    serve(connection, 'P');
    expect(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0, "the group");
    expect(setresuid(65534, 65534, 65534) == 0, "the user");
    serve(connection, 'Q');
}

static void without_capabilities(int connection) {
    serve(connection, 'P');
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[2] = {{0}};
    expect(syscall(SYS_capset, &header, none) == 0, "capset");
    expect(prctl(PR_SET_DUMPABLE, 0) == 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "prctl");
    serve(connection, 'Q');
}

static void another_root(int connection) {
    serve(connection, 'P');
    expect(mkdir("empty", 0755) == 0 && chroot("empty") == 0 && chdir("/") == 0, "chroot");
    serve(connection, 'Q');
}

static void another_root_from_the_start(int connection) {
    expect(mkdir("empty", 0755) == 0 && chroot("empty") == 0 && chdir("/") == 0, "chroot");
    serve(connection, 'P');
}

static void another_network(int connection) {
    serve(connection, 'P');
    expect(unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC) == 0, "unshare");
    serve(connection, 'Q');
}

/* The process's children are in a new PID namespace. */
static void another_numbering(int connection) {
    serve(connection, 'P');
    expect(unshare(CLONE_NEWPID) == 0, "unshare");
    pid_t child = fork();
    if (child == 0) {
        printf("a child is %d of %d\n", getpid(), getppid());
        fflush(stdout);
        serve(connection, 'C');
        _exit(7);
    }
    wait_for(child);
    serve(connection, 'P');
}

static const struct scenario scenarios[] = {
    {"passed_by_sendmsg", passed_by_sendmsg},
    {"passed_by_sendmmsg", passed_by_sendmmsg},
    {"passed_by_number", passed_by_number},
    {"looked_at_by_pidfd", looked_at_by_pidfd},
    {"shared_before_connect", shared_before_connect},
    {"closing_everything_else", closing_everything_else},
    {"duplicating_over_everything", duplicating_over_everything},
    {"daemon_without_descriptors", daemon_without_descriptors},
    {"few_descriptors", few_descriptors},
    {"no_descriptors", no_descriptors},
    {"few_descriptors_from_the_start", few_descriptors_from_the_start},
    {"another_user", another_user},
    {"without_capabilities", without_capabilities},
    {"another_root", another_root},
    {"another_root_from_the_start", another_root_from_the_start},
    {"another_network", another_network},
    {"another_numbering", another_numbering},
};

int main(int argc, char **argv) {
    return RUN(argc, argv, scenarios);
}
