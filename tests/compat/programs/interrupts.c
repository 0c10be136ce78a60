/* Signals during blocking calls: which calls continue, which return EINTR, how many bytes were
 * moved, and the effect of a siglongjmp out of a handler. Prints one line for each question,
 * which must be the same without shunt. usage: interrupts PORT GATE */
#include "lane.h"

static struct peer peer;
static volatile int ran[65];
static sigjmp_buf outside;
static pid_t target;
static char bytes[1 << 26];

static void handler(int signal)
{
    ran[signal]++;
    errno = 99; /* must not be seen */
}

static void leaving(int signal)
{
    ran[signal]++;
    siglongjmp(outside, 1);
}

static void catch(int signal, void (*function)(int), int flags)
{
    struct sigaction action = {.sa_handler = function, .sa_flags = flags};
    sigaction(signal, &action, NULL);
}

/* The signals of one question. Each is sent when the main thread sleeps. Afterwards the peer
 * sends `reply` bytes, if any. */
struct plan {
    int signals[4];
    int reply;
};

static void *send_signals(void *argument)
{
    struct plan *plan = argument;
    for (int i = 0; i < 4 && plan->signals[i]; i++) {
        wait_asleep(target);
        syscall(SYS_tgkill, getpid(), target, plan->signals[i]);
        pause_ms(20);
    }
    if (plan->reply) {
        wait_asleep(target);
        tell(&peer, 's', plan->reply, 0);
    }
    return NULL;
}

enum call { RECV, READ, RECVMSG, WAITALL, POLL, PPOLL, SELECT, PSELECT, EPOLL, EPOLL_PWAIT, SEND, CALLS };
static const char *const names[CALLS] = {"recv",   "read",    "recvmsg", "recv all",    "poll", "ppoll",
                                         "select", "pselect", "epoll",   "epoll_pwait", "send"};

static int epoll_set(void)
{
    static int set = -1;
    if (set < 0) {
        struct epoll_event event = {.events = EPOLLIN};
        set = epoll_create1(0);
        epoll_ctl(set, EPOLL_CTL_ADD, peer.fd, &event);
    }
    return set;
}

static long make(enum call call, const sigset_t *mask, int ms)
{
    struct iovec piece = {bytes, 100};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    struct pollfd entry = {peer.fd, POLLIN, 0};
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    struct epoll_event event;
    fd_set set;
    FD_ZERO(&set);
    FD_SET(peer.fd, &set);
    switch (call) {
    case RECV:
        return recv(peer.fd, bytes, 100, 0);
    case READ:
        return read(peer.fd, bytes, 100);
    case RECVMSG:
        return recvmsg(peer.fd, &message, 0);
    case WAITALL:
        return recv(peer.fd, bytes, 100, MSG_WAITALL);
    case POLL:
        return poll(&entry, 1, ms);
    case PPOLL:
        return ppoll(&entry, 1, ms < 0 ? NULL : &time, mask);
    case SELECT:
        return select(peer.fd + 1, &set, NULL, NULL, NULL);
    case PSELECT:
        return pselect(peer.fd + 1, &set, NULL, NULL, ms < 0 ? NULL : &time, mask);
    case EPOLL:
        return epoll_wait(epoll_set(), &event, 1, ms);
    case EPOLL_PWAIT:
        return epoll_pwait(epoll_set(), &event, 1, ms, mask);
    default:
        return send(peer.fd, bytes, sizeof bytes, 0);
    }
}

static int is_wait(enum call call)
{
    return call >= POLL && call <= EPOLL_PWAIT;
}

static void ask(const char *title, enum call call, struct plan plan)
{
    pthread_t sender;
    memset((void *)ran, 0, sizeof ran);
    pthread_create(&sender, NULL, send_signals, &plan);
    errno = 0;
    long result = make(call, NULL, -1);
    int failed = errno;
    pthread_join(sender, NULL);
    if (plan.reply) {
        wait_done(&peer);
        /* Read the bytes that the call has left. */
        long left = plan.reply - (is_wait(call) || result < 0 ? 0 : result);
        get(peer.fd, bytes, left);
    }
    printf("%s, %s: %ld", title, names[call], result);
    printf(result < 0 ? " %s" : "", strerror(failed));
    printf(", handlers %d %d\n", ran[SIGUSR1], ran[SIGUSR2]);
}

/* Interrupts a send that the peer does not receive yet. */
static void ask_send(const char *title, int signal)
{
    pthread_t sender;
    struct plan plan = {{signal}, 0};
    memset((void *)ran, 0, sizeof ran);
    pthread_create(&sender, NULL, send_signals, &plan);
    long sent = make(SEND, NULL, 0);
    pthread_join(sender, NULL);
    printf("%s, send: %s, handlers %d\n", title,
           sent < 0 ? strerror(errno) : sent < (long)sizeof bytes ? "a part" : "everything", ran[signal]);
    if (sent > 0) {
        tell(&peer, 'r', sent, 0);
        wait_done(&peer);
    }
}

/* Sends a signal that only the call's own signal mask unblocks. */
static void ask_masked(enum call call, int ready, int ms)
{
    sigset_t blocked, before;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    memset((void *)ran, 0, sizeof ran);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    if (ready) {
        tell(&peer, 's', 10, 0);
        wait_done(&peer);
        poll(&(struct pollfd){peer.fd, POLLIN, 0}, 1, -1);
    }
    raise(SIGUSR1);
    errno = 0;
    long result = make(call, &before, ms);
    int failed = errno, inside = ran[SIGUSR1];
    sigprocmask(SIG_SETMASK, &before, NULL);
    printf("%s, pending%s, %d ms: %ld %s, handler within %d, after %d\n", names[call], ready ? " and ready" : "", ms,
           result, strerror(failed), inside, ran[SIGUSR1]);
    if (ready)
        get(peer.fd, bytes, 10);
}

static void ask_leaving(enum call call)
{
    volatile int times = 0, interrupted = 0;
    memset((void *)ran, 0, sizeof ran);
    while (times++ < 20) {
        pthread_t sender;
        static struct plan plan = {{SIGUSR1}, 0};
        pthread_create(&sender, NULL, send_signals, &plan);
        if (sigsetjmp(outside, 1) == 0)
            make(call, NULL, -1);
        else
            interrupted++;
        pthread_join(sender, NULL);
        if (call == SEND)
            break;
    }
    if (call == SEND) {
        /* The number of bytes in flight is unknown. Only the next connection is tested. */
        printf("left send: %d\n", interrupted);
        return;
    }
    tell(&peer, 's', 100, 10);
    long result = make(call, NULL, -1);
    wait_done(&peer);
    if (is_wait(call))
        get(peer.fd, bytes, 100);
    printf("left %s: %d times, then %ld\n", names[call], interrupted, result);
}

int main(int argc, char **argv)
{
    struct timeval second = {5, 0}, none = {0, 0};
    if (argc < 3)
        return 2;
    target = getpid();
    setvbuf(stdout, NULL, _IOLBF, 0);
    connect_peers(&peer, 1, atoi(argv[1]));
    warm_up(&peer, 1, argv[2]);

    catch(SIGUSR1, handler, SA_RESTART);
    catch(SIGUSR2, handler, 0);
    for (enum call call = RECV; call <= EPOLL_PWAIT; call++) {
        ask("restarting", call, (struct plan){{SIGUSR1}, 100});
        ask("interrupting", call, (struct plan){{SIGUSR2}, 100});
        ask("one of each", call, (struct plan){{SIGUSR1, SIGUSR1, SIGUSR2}, 100});
    }
    tell(&peer, 's', 60, 0);
    wait_done(&peer);
    ask("restarting, after a part", WAITALL, (struct plan){{SIGUSR1}, 0});
    setsockopt(peer.fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof second);
    ask("restarting, with a time-out", RECV, (struct plan){{SIGUSR1}, 100});
    setsockopt(peer.fd, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
    ask_send("restarting", SIGUSR1);
    ask_send("interrupting", SIGUSR2);

    static const enum call masked[] = {PPOLL, PSELECT, EPOLL_PWAIT};
    for (unsigned i = 0; i < LEN(masked); i++) {
        ask_masked(masked[i], 0, -1);
        ask_masked(masked[i], 0, 0);
        ask_masked(masked[i], 1, -1);
        ask_masked(masked[i], 1, 0);
    }

    catch(SIGUSR1, leaving, 0);
    for (enum call call = RECV; call <= EPOLL_PWAIT; call++)
        if (call != WAITALL)
            ask_leaving(call);
    ask_leaving(SEND);
    end_peers(&peer, 1);
    return 0;
}
