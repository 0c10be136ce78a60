/* Makes system calls fail that only the shim makes:
 *
 *     inject NTH once|on ERRNO COMMAND...
 *
 * The call NTH fails with ERRNO, either once, or together with all that follow. With 0 none
 * fails. The calls are those that create memfds, doorbells, shared mappings and private
 * descriptors, and those that send and receive messages with descriptors. COMMAND must make none
 * of them itself. At the end the number of calls is printed on standard error. The exit status
 * is that of the command. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define LOAD(what) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, what))
#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define TELL BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF)
/* Every call with this number. */
#define ALL(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##number, 0, 1), TELL
/* Calls whose argument equals `value`, or has that bit. */
#define WITH(number, argument, test, value)                                                                            \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##number, 0, 4), LOAD(args[argument]),                                     \
        BPF_JUMP(BPF_JMP | test | BPF_K, value, 0, 1), TELL, LOAD(nr)

static struct sock_filter filter[] = {
    LOAD(nr),
    ALL(memfd_create),
    ALL(ftruncate),
    ALL(eventfd2),
    ALL(epoll_create1),
    ALL(sendmsg),
    ALL(recvmsg),
    WITH(socket, 0, BPF_JEQ, AF_UNIX),
    WITH(mmap, 3, BPF_JSET, MAP_SHARED),
    WITH(madvise, 2, BPF_JEQ, 23 /* MADV_POPULATE_WRITE */),
    WITH(fcntl, 1, BPF_JEQ, F_DUPFD_CLOEXEC),
    WITH(fcntl, 1, BPF_JEQ, F_ADD_SEALS),
    WITH(fcntl, 1, BPF_JEQ, F_GET_SEALS),
    ALLOW,
};

static void die(const char *what) {
    perror(what);
    exit(99);
}

/* Runs in the child, which shares our descriptors until it executes the program. */
static int become(void *argv) {
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    char *word = getenv("INJECT_PIPE");
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        die("no_new_privs");
    int listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
    if (listener < 0)
        die("seccomp");
    if (write(atoi(word), &listener, sizeof listener) != sizeof listener)
        die("write");
    execvp(((char **)argv)[0], argv);
    die("exec");
    return 0;
}

int main(int argc, char **argv) {
    static char stack[1 << 16] __attribute__((aligned(16)));
    if (argc < 5)
        return 99;
    long nth = atol(argv[1]), seen = 0;
    int once = !strcmp(argv[2], "once"), error = atoi(argv[3]), ends[2], listener, status;
    char word[16];
    if (pipe2(ends, O_CLOEXEC))
        die("pipe");
    snprintf(word, sizeof word, "%d", ends[1]);
    setenv("INJECT_PIPE", word, 1);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    pid_t child = clone(become, stack + sizeof stack, CLONE_FILES | SIGCHLD, argv + 4);
    if (child < 0 || read(ends[0], &listener, sizeof listener) != sizeof listener)
        die("the child");
    for (;;) {
        struct seccomp_notif call = {0};
        struct seccomp_notif_resp answer = {0};
        struct pollfd told = {.fd = listener, .events = POLLIN};
        if (poll(&told, 1, 5) == 0 && waitpid(child, &status, WNOHANG) == child)
            break;
        if (!(told.revents & POLLIN)) {
            if (told.revents & POLLHUP) {
                waitpid(child, &status, 0);
                break;
            }
            continue;
        }
        /* ENOENT: the caller has ended. */
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call))
            continue;
        seen++;
        answer.id = call.id;
        if (nth > 0 && (once ? seen == nth : seen >= nth))
            answer.error = -error;
        else
            answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
        ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
    }
    fprintf(stderr, "calls: %ld\n", seen);
    if (WIFSIGNALED(status)) {
        fprintf(stderr, "killed by signal %d\n", WTERMSIG(status));
        return 98;
    }
    return WEXITSTATUS(status);
}
