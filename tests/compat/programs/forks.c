/* Processes that share a connection, or hand it on: forks PORT SCENARIO. */

#include "phases.h"

#include <sched.h>
#include <spawn.h>
#include <sys/syscall.h>

extern char **environ;

/* Fork without libc: nobody is told. */
static pid_t bare_fork(void) {
    long pid;
    __asm__ volatile("syscall" : "=a"(pid) : "a"(SYS_fork) : "rcx", "r11", "memory");
    return pid;
}

static pid_t raw_fork(void) {
    return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
}

/* The parent closes its copy, and waits while the child serves: a server that forks for each connection. */
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

/* The child serves a phase while the parent still holds the connection, then ends; the parent goes on. */
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

/* The child ends at once; nobody asks how before the connection has been used again. */
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

/* A program that knows nothing of shunt serves on descriptor 3, and then the parent goes on. */
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

static void fork_and_exec(int connection) {
    serve(connection, 'P');
    pid_t child = fork();
    if (child == 0)
        exec_a_server(connection, no_environment);
    wait_for(child);
    serve(connection, 'P');
}

static void vfork_and_exec(int connection) {
    serve(connection, 'P');
    pid_t child = vfork();
    if (child == 0)
        exec_a_server(connection, no_environment);
    wait_for(child);
    serve(connection, 'P');
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

/* A process that shares our memory, but is another one. */
static int connection_of_clone;

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

/* A child that nobody was told of outlives its killed parent, with a copy of everything but the connection. The parent
 * dies with a question half read, which TCP answers by a reset. */
static void orphan_of_bare_fork(int connection) {
    serve(connection, 'P');
    if (bare_fork() == 0) {
        long closed;
        __asm__ volatile("syscall" : "=a"(closed) : "a"(SYS_close), "D"(connection) : "rcx", "r11", "memory");
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
    {"vfork_and_exec", vfork_and_exec},
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
