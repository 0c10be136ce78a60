/* Processes that share a connection or pass it on: forks SCENARIO PORT */

#include "phases.h"

#include <poll.h>
#include <sched.h>
#include <spawn.h>
#include <sys/syscall.h>

extern char **environ;

/* Forks by an inline system call, past libc's fork. With BY_LIBC, it uses syscall(2), so that the
 * program has no inline call. */
static pid_t bare_fork(void) {
    long pid;
#ifdef BY_LIBC
    pid = syscall(SYS_fork);
#else
    __asm__ volatile("syscall" : "=a"(pid) : "a"(SYS_fork) : "rcx", "r11", "memory");
#endif
    return pid;
}

static pid_t raw_fork(void) {
    return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

/* The parent closes its copy and waits while the child serves, like a server that forks for each
 * connection. */
static void hand_to_child(int connection, pid_t (*fork_by)(void)) {
    pid_t child = fork_by();
    if (child == 0) {
        serve(connection, 'C');
        _exit(7);
    }
    close(connection);
    wait_for(child);
}

static void child_takes_over(int connection) {
    serve(connection, 'P');
    hand_to_child(connection, fork);
}

static void child_from_the_start(int connection) {
    hand_to_child(connection, fork);
}

/* The parent has used the connection, and has therefore offered it, before it forks. It waits
 * for the child by poll, and never uses the connection again. */
static void child_after_an_offer(int connection) {
    int life[2];
    char byte;
    for (int count = 0; count < 6; count++)
        expect(recv(connection, &byte, 1, MSG_PEEK) == 1, "a peek");
    expect(pipe(life) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        close(life[0]);
        serve(connection, 'C');
        /* In the meantime the parent learns that the peer has offered it too. */
        usleep(200000);
        serve(connection, 'D');
        _exit(7);
    }
    close(life[1]);
    struct pollfd set = {.fd = life[0], .events = POLLIN};
    while (poll(&set, 1, 1) == 0)
        ;
    close(connection);
    wait_for(child);
}

static void child_of_bare_fork(int connection) {
    serve(connection, 'P');
    hand_to_child(connection, bare_fork);
}

static void child_of_raw_clone(int connection) {
    serve(connection, 'P');
    hand_to_child(connection, raw_fork);
}

static void child_of_Fork(int connection) {
    serve(connection, 'P');
    hand_to_child(connection, _Fork);
}

/* The child serves a phase while the parent holds the connection, and exits. The parent
 * continues. */
static void take_turns(int connection, pid_t (*fork_by)(void)) {
    serve(connection, 'P');
    pid_t child = fork_by();
    if (child == 0) {
        serve(connection, 'C');
        _exit(7);
    }
    wait_for(child);
    serve(connection, 'P');
}

static void turns(int connection) {
    take_turns(connection, fork);
}

static void turns_of_bare_fork(int connection) {
    take_turns(connection, bare_fork);
}

static void turns_of_raw_clone(int connection) {
    take_turns(connection, raw_fork);
}

/* The child exits immediately. The parent waits for it only after it has used the connection
 * again. */
static void child_ends_unseen(int connection) {
    serve(connection, 'P');
    pid_t child = fork();
    if (child == 0)
        _exit(7);
    serve(connection, 'P');
    wait_for(child);
}

static void daemonise(int connection) {
    serve(connection, 'P');
    int done[2];
    expect(pipe(done) == 0, "pipe");
    if (fork() == 0) {
        setsid();
        if (fork() != 0)
            _exit(0);
        for (int fd = 0; fd < 1024; fd++)
            if (fd != connection && fd != done[1])
                close(fd);
        serve(connection, 'D');
        _exit(0);
    }
    close(connection);
    close(done[1]);
    wait(NULL);
    char none;
    expect(read(done[0], &none, 1) == 0, "the daemon ends");
}

/* A program without the shim serves on descriptor 3, and then the parent continues. */
static void exec_a_server(int connection, char *const environment[]) {
    dup2(connection, 3);
    char *const arguments[] = {"serve_on", "3", NULL};
    execve("./serve_on", arguments, environment);
    _exit(127);
}

static char *no_environment[] = {NULL};

static void exec_without_the_shim(int connection) {
    serve(connection, 'P');
    exec_a_server(connection, no_environment);
}

static void exec_with_the_shim(int connection) {
    serve(connection, 'P');
    exec_a_server(connection, environ);
}

/* Waits for the next question, and leaves it unread for the following step. */
static void await_question(int connection) {
    struct pollfd set = {.fd = connection, .events = POLLIN};
    expect(poll(&set, 1, -1) == 1, "a question");
}

static void fork_and_exec(int connection) {
    serve(connection, 'P');
    await_question(connection);
    pid_t child = fork();
    if (child == 0)
        exec_a_server(connection, no_environment);
    wait_for(child);
    serve(connection, 'P');
}

/* Both programs have the shim, and the parent continues when the child has ended. */
static void fork_and_exec_with_the_shim(int connection) {
    serve(connection, 'P');
    await_question(connection);
    pid_t child = fork();
    if (child == 0)
        exec_a_server(connection, environ);
    wait_for(child);
    serve(connection, 'P');
}

/* A server that executes another program for each connection, as sshd does. */
static void another_program_takes_over(int connection) {
    serve(connection, 'P');
    pid_t child = fork();
    if (child == 0)
        exec_a_server(connection, environ);
    close(connection);
    wait_for(child);
}

/* A failed exec leaves everything unchanged, also in a child. */
static void exec_of_nothing(int connection) {
    char *const arguments[] = {"nothing", NULL};
    serve(connection, 'P');
    expect(execve("./nothing", arguments, environ) < 0 && errno == ENOENT, "no such program");
    serve(connection, 'Q');
    pid_t child = fork();
    if (child == 0) {
        fcntl(connection, F_SETFD, FD_CLOEXEC);
        expect(execve("./nothing", arguments, no_environment) < 0 && errno == ENOENT, "no such program");
        serve(connection, 'C');
        _exit(7);
    }
    wait_for(child);
    serve(connection, 'P');
}

/* A program that keeps running, but has not inherited the connection. */
static void beside_another_program(int connection) {
    int life[2];
    fcntl(connection, F_SETFD, FD_CLOEXEC);
    serve(connection, 'P');
    expect(pipe(life) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        char *const arguments[] = {"cat", NULL};
        dup2(life[0], 0);
        close(life[1]);
        execve("/bin/cat", arguments, no_environment);
        _exit(127);
    }
    serve(connection, 'P');
    close(life[1]);
    wait_for(child);
}

/* A program that the shim cannot enter leaves a child with the connection, and then executes a
 * program that it can enter. */
static void through_a_static_program(int connection) {
    serve(connection, 'P');
    dup2(connection, 3);
    char *const arguments[] = {"static_program", NULL};
    execve("./static_program", arguments, environ);
    _exit(127);
}

static void vfork_and_exec(int connection) {
    serve(connection, 'P');
    pid_t child = vfork();
    if (child == 0)
        exec_a_server(connection, no_environment);
    wait_for(child);
    serve(connection, 'P');
}

/* The connection of a process that shares this process's memory. */
static int connection_of_clone;

/* A vfork child closes the connection, and the parent still has it: before the first use, and
 * after it. */
static void vfork_and_close(int connection) {
    for (int turn = 0; turn < 2; turn++) {
        pid_t child = vfork();
        if (child == 0) {
            close(connection);
            /* This socket gets the closed descriptor's number. */
            close(socket(AF_INET, SOCK_STREAM, 0));
            _exit(7);
        }
        wait_for(child);
        serve(connection, 'P');
    }
}

static int close_in_clone(void *unused) {
    (void)unused;
    close(connection_of_clone);
    close(socket(AF_INET, SOCK_STREAM, 0));
    return 7;
}

static void clone_and_close(int connection) {
    static char stack[256 * 1024] __attribute__((aligned(16)));
    const int flags[] = {CLONE_VM | CLONE_VFORK, CLONE_VM};
    connection_of_clone = connection;
    for (int turn = 0; turn < 2; turn++) {
        pid_t child = clone(close_in_clone, stack + sizeof stack, flags[turn] | SIGCHLD, NULL);
        expect(child > 0, "clone");
        wait_for(child);
        serve(connection, 'P');
    }
}

static void spawn(int connection, char *const environment[]) {
    serve(connection, 'P');
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, connection, 9);
    posix_spawn_file_actions_addclose(&actions, connection);
    char *const arguments[] = {"serve_on", "9", NULL};
    pid_t child;
    errno = posix_spawn(&child, "./serve_on", &actions, NULL, arguments, environment);
    expect(errno == 0, "posix_spawn");
    posix_spawn_file_actions_destroy(&actions);
    wait_for(child);
    serve(connection, 'P');
}

static void spawn_without_the_shim(int connection) {
    fcntl(connection, F_SETFD, FD_CLOEXEC);
    spawn(connection, no_environment);
}

static void spawn_with_the_shim(int connection) {
    fcntl(connection, F_SETFD, FD_CLOEXEC);
    spawn(connection, environ);
}

/* system(3) and popen(3) start their children inside libc. */
static void shell(int connection) {
    char command[64];
    serve(connection, 'P');
    snprintf(command, sizeof command, "env -i ./serve_on %d", connection);
    printf("system: %d\n", WEXITSTATUS(system(command)));
    serve(connection, 'P');
}

static void pipe_to_a_shell(int connection) {
    char command[64], line[64] = "";
    serve(connection, 'P');
    snprintf(command, sizeof command, "env -i ./serve_on %d", connection);
    FILE *pipe = popen(command, "r");
    expect(pipe != NULL, "popen");
    while (fgets(line, sizeof line, pipe))
        fputs(line, stdout);
    printf("popen: %d\n", WEXITSTATUS(pclose(pipe)));
    serve(connection, 'P');
}

static int serve_in_clone(void *unused) {
    (void)unused;
    serve(connection_of_clone, 'C');
    return 7;
}

static void clone_with_our_memory(int connection) {
    static char stack[256 * 1024] __attribute__((aligned(16)));
    serve(connection, 'P');
    connection_of_clone = connection;
    pid_t child = clone(serve_in_clone, stack + sizeof stack, CLONE_VM | SIGCHLD, NULL);
    expect(child > 0, "clone");
    wait_for(child);
    serve(connection, 'P');
}

static void clone_with_a_copy(int connection) {
    static char stack[256 * 1024] __attribute__((aligned(16)));
    serve(connection, 'P');
    connection_of_clone = connection;
    pid_t child = clone(serve_in_clone, stack + sizeof stack, SIGCHLD, NULL);
    expect(child > 0, "clone");
    wait_for(child);
    serve(connection, 'P');
}

/* A child of such a fork outlives its killed parent. It has a copy of everything but the
 * connection. The parent dies with a question half read, so TCP sends a reset. */
static void orphan_of_bare_fork(int connection) {
    serve(connection, 'P');
    if (bare_fork() == 0) {
        long closed;
#ifdef BY_LIBC
        closed = syscall(SYS_close, connection);
#else
        __asm__ volatile("syscall" : "=a"(closed) : "a"(SYS_close), "D"(connection) : "rcx", "r11", "memory");
#endif
        expect(closed == 0, "close");
        for (int step = 0; step < 6000 && access("over", F_OK) != 0; step++)
            usleep(10000);
        _exit(0);
    }
    struct frame head;
    expect(read_all(connection, &head, sizeof head) > 0, "half a question");
    usleep(200000);
    kill(getpid(), SIGKILL);
}

static const struct scenario scenarios[] = {
    {"child_takes_over", child_takes_over},
    {"child_from_the_start", child_from_the_start},
    {"child_after_an_offer", child_after_an_offer},
    {"child_of_bare_fork", child_of_bare_fork},
    {"child_of_raw_clone", child_of_raw_clone},
    {"child_of_Fork", child_of_Fork},
    {"turns", turns},
    {"turns_of_bare_fork", turns_of_bare_fork},
    {"turns_of_raw_clone", turns_of_raw_clone},
    {"child_ends_unseen", child_ends_unseen},
    {"daemonise", daemonise},
    {"exec_without_the_shim", exec_without_the_shim},
    {"exec_with_the_shim", exec_with_the_shim},
    {"fork_and_exec", fork_and_exec},
    {"fork_and_exec_with_the_shim", fork_and_exec_with_the_shim},
    {"another_program_takes_over", another_program_takes_over},
    {"exec_of_nothing", exec_of_nothing},
    {"beside_another_program", beside_another_program},
    {"through_a_static_program", through_a_static_program},
    {"vfork_and_exec", vfork_and_exec},
    {"vfork_and_close", vfork_and_close},
    {"clone_and_close", clone_and_close},
    {"spawn_without_the_shim", spawn_without_the_shim},
    {"spawn_with_the_shim", spawn_with_the_shim},
    {"shell", shell},
    {"pipe_to_a_shell", pipe_to_a_shell},
    {"clone_with_our_memory", clone_with_our_memory},
    {"clone_with_a_copy", clone_with_a_copy},
    {"orphan_of_bare_fork", orphan_of_bare_fork},
};

int main(int argc, char **argv) {
    return RUN(argc, argv, scenarios);
}
