/* Signal handlers: their arguments and order, the results of sigaction and similar calls,
 * SIGPIPE and SIGIO. Prints one line for each question, which must be the same without shunt.
 * usage: handlers PORT GATE */
#include "lane.h"
#include <sys/ioctl.h>
#include <ucontext.h>

static struct peer peer;
static volatile int ran, depth, deepest, value, code, on_stack;
static volatile unsigned long mask_within, order;
static char stack[1 << 16];

static unsigned long mask_now(void)
{
    sigset_t set;
    unsigned long word;
    pthread_sigmask(SIG_BLOCK, NULL, &set);
    memcpy(&word, &set, sizeof word);
    return word;
}

static void plain(int signal)
{
    (void)signal;
    ran++;
    mask_within = mask_now();
    char here;
    on_stack = &here >= stack && &here < stack + sizeof stack;
}

static void nested(int signal)
{
    ran++;
    if (++depth > deepest)
        deepest = depth;
    if (deepest < 3)
        raise(signal);
    depth--;
}

static void informed(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    ran++;
    value = info->si_value.sival_int, code = info->si_code;
    order = order * 10 + value;
    /* SIGUSR2 stays blocked after the handler. */
    sigaddset(&((ucontext_t *)context)->uc_sigmask, SIGUSR2);
}

static void show(const char *title, int signal)
{
    struct sigaction action;
    unsigned long word;
    memset(&action, 0x55, sizeof action);
    int result = sigaction(signal, NULL, &action);
    memcpy(&word, &action.sa_mask, sizeof word);
    const char *name = action.sa_handler == SIG_DFL                  ? "default"
                       : action.sa_handler == SIG_IGN                ? "ignored"
                       : action.sa_handler == plain                  ? "plain"
                       : action.sa_handler == nested                 ? "nested"
                       : action.sa_sigaction == informed             ? "informed"
                                                                     : "something else";
    printf("%s: %d %s, flags %x, mask %lx\n", title, result, name, action.sa_flags, word);
}

static void install(int signal, void (*handler)(int), int flags, int also)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    if (also)
        sigaddset(&action.sa_mask, also);
    sigaction(signal, &action, NULL);
    ran = 0;
}

static const char *named(void (*handler)(int))
{
    return handler == SIG_ERR   ? "an error"
           : handler == SIG_DFL ? "default"
           : handler == SIG_IGN ? "ignored"
           : handler == plain   ? "plain"
           : handler == nested  ? "nested"
                                : "something else";
}

static void registrations(void)
{
    show("untouched", SIGUSR1);
    install(SIGUSR1, plain, SA_RESTART, SIGTERM);
    show("sigaction", SIGUSR1);
    raise(SIGUSR1);
    printf("ran %d, mask within %lx, afterwards %lx\n", ran, mask_within, mask_now());
    install(SIGUSR1, plain, SA_RESETHAND, 0);
    show("once", SIGUSR1);
    raise(SIGUSR1);
    show("once, afterwards", SIGUSR1);
    printf("ran %d\n", ran);
    install(SIGUSR1, nested, SA_NODEFER, 0);
    raise(SIGUSR1);
    printf("nested: ran %d, %d deep\n", ran, deepest);
    struct sigaction action = {.sa_sigaction = informed, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR1, &action, NULL);
    show("informed", SIGUSR1);
    ran = 0;
    sigqueue(getpid(), SIGUSR1, (union sigval){.sival_int = 42});
    printf("ran %d, value %d, code %d, mask afterwards %lx\n", ran, value, code, mask_now());
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    printf("signal: replaces %s", named(signal(SIGUSR2, plain)));
    printf(", then %s\n", named(signal(SIGUSR2, nested)));
    show("signal", SIGUSR2);
    siginterrupt(SIGUSR2, 1);
    show("siginterrupt", SIGUSR2);
    signal(SIGUSR2, plain);
    show("signal after it", SIGUSR2);
    siginterrupt(SIGUSR2, 0);
    show("siginterrupt off", SIGUSR2);
    printf("sysv_signal: replaces %s\n", named(sysv_signal(SIGUSR2, plain)));
    show("sysv_signal", SIGUSR2);
    printf("sigset: replaces %s", named(sigset(SIGUSR2, plain)));
    printf(", held %s", named(sigset(SIGUSR2, SIG_HOLD) == plain ? plain : SIG_ERR));
    printf(", mask %lx, then %s", mask_now(), sigset(SIGUSR2, nested) == SIG_HOLD ? "held" : "not held");
    printf(", mask %lx\n", mask_now());
    show("sigset", SIGUSR2);
    signal(SIGUSR2, SIG_IGN);
    show("ignored", SIGUSR2);
    errno = 0;
    printf("KILL: %s", named(signal(SIGKILL, plain)));
    printf(" %d, 0: %s %d, ", errno, named(signal(0, plain)), errno);
    struct sigaction any = {.sa_handler = plain};
    printf("64: %d, 65: %d, 32: %d\n", sigaction(64, &any, NULL), sigaction(65, &any, NULL), sigaction(32, &any, NULL));
    struct {
        void *handler;
        unsigned long flags;
        void *restorer;
        unsigned long mask;
    } kernel = {0};
    printf("by number: %ld", syscall(SYS_rt_sigaction, 64, NULL, &kernel, 8));
    printf(" %s, mask %lx\n", named((void (*)(int))kernel.handler), kernel.mask);
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    sigaltstack(&alternate, NULL);
    install(SIGUSR1, plain, SA_ONSTACK, 0);
    raise(SIGUSR1);
    printf("on the alternate stack: %d\n", on_stack);
}

/* Real-time signals that arrive while the thread uses a lane. None may be lost or out of order. */
static void *queue_all(void *argument)
{
    for (int i = 1; i <= 9; i++) {
        sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = i});
        pause_ms(1);
    }
    *(volatile int *)argument = 1;
    return NULL;
}

static void real_time(void)
{
    struct sigaction action = {.sa_sigaction = informed, .sa_flags = SA_SIGINFO | SA_RESTART};
    volatile int over = 0;
    pthread_t thread;
    sigset_t mask, none;
    sigaction(SIGRTMIN, &action, NULL);
    sigemptyset(&mask), sigemptyset(&none);
    sigaddset(&mask, SIGRTMIN);
    pthread_sigmask(SIG_BLOCK, &mask, NULL);
    ran = 0, order = 0;
    pthread_create(&thread, NULL, queue_all, (void *)&over);
    pthread_sigmask(SIG_SETMASK, &none, NULL);
    char bytes[1000] = {0};
    while (!over) {
        tell(&peer, 'r', sizeof bytes, 0);
        put(peer.fd, bytes, sizeof bytes);
        wait_done(&peer);
    }
    pthread_join(thread, NULL);
    printf("real-time: %d, in order %lu\n", ran, order);
    pthread_sigmask(SIG_SETMASK, &none, NULL);
}

static void broken_pipes(void)
{
    char byte = 0;
    install(SIGPIPE, plain, 0, 0);
    tell(&peer, 'c', 0, 0);
    wait_done(&peer);
    poll(&(struct pollfd){peer.fd, POLLIN, 0}, 1, -1);
    while (send(peer.fd, &byte, 1, MSG_NOSIGNAL) > 0)
        pause_ms(1);
    for (int i = 0; i < 2; i++) {
        ran = 0;
        long sent = send(peer.fd, &byte, 1, i ? MSG_NOSIGNAL : 0);
        printf("send to nobody: %ld %s, SIGPIPE %d\n", sent, strerror(errno), ran);
    }
    ran = 0;
    long sent = write(peer.fd, &byte, 1);
    printf("write to nobody: %ld %s, SIGPIPE %d\n", sent, strerror(errno), ran);
    sigset_t pipes, pending, before;
    sigemptyset(&pipes);
    sigaddset(&pipes, SIGPIPE);
    sigprocmask(SIG_BLOCK, &pipes, &before);
    sent = send(peer.fd, &byte, 1, 0);
    sigpending(&pending);
    printf("blocked: %ld, pending %d, ", sent, sigismember(&pending, SIGPIPE));
    siginfo_t info;
    struct timespec at_once = {0, 0};
    printf("taken %d, ", sigtimedwait(&pipes, &info, &at_once) == SIGPIPE);
    sigprocmask(SIG_SETMASK, &before, NULL);
    printf("ran %d\n", ran - 1);
    signal(SIGPIPE, SIG_IGN);
    sent = send(peer.fd, &byte, 1, 0);
    printf("ignored: %ld %s\n", sent, strerror(errno));
    signal(SIGPIPE, SIG_DFL);
    pid_t child = fork();
    int status;
    if (child == 0) {
        send(peer.fd, &byte, 1, 0);
        _exit(0);
    }
    waitpid(child, &status, 0);
    printf("default: killed by %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

static void asynchronous(void)
{
    install(SIGIO, plain, SA_RESTART, 0);
    fcntl(peer.fd, F_SETOWN, getpid());
    fcntl(peer.fd, F_SETFL, fcntl(peer.fd, F_GETFL) | O_ASYNC);
    ran = 0;
    tell(&peer, 's', 10, 0);
    wait_done(&peer);
    char bytes[10];
    get(peer.fd, bytes, sizeof bytes);
    for (int i = 0; i < 1000 && !ran; i++)
        pause_ms(5);
    printf("SIGIO: %s\n", ran ? "comes" : "does not come");
    fcntl(peer.fd, F_SETFL, fcntl(peer.fd, F_GETFL) & ~O_ASYNC);
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    connect_peers(&peer, 1, atoi(argv[1]));
    warm_up(&peer, 1, argv[2]);
    registrations();
    real_time();
    broken_pipes();
    end_peers(&peer, 1);
    connect_peers(&peer, 1, atoi(argv[1]));
    warm_up(&peer, 1, argv[2]);
    asynchronous();
    end_peers(&peer, 1);
    return 0;
}
