/* Ends of threads: cancellation in every call that may block, during a sleep or before it, of
 * both types, or disabled; and pthread_exit in a handler. The connection must work afterwards.
 * Prints one line for each question. usage: cancels PORT GATE */
#include "lane.h"

static struct peer peer;
static char bytes[1 << 26];
static volatile int cleaned;
static volatile pid_t tid;

enum call { RECV, READ, READV, RECVMSG, RECVFROM, POLL, PPOLL, SELECT, PSELECT, EPOLL, EPOLL_PWAIT, SEND, CALLS };
static const char *const names[CALLS] = {"recv",   "read",   "readv",   "recvmsg", "recvfrom",    "poll",
                                         "ppoll", "select", "pselect", "epoll",   "epoll_pwait", "send"};

static long make(enum call call)
{
    char small[100];
    struct iovec piece = {small, sizeof small};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    struct pollfd entry = {peer.fd, POLLIN, 0};
    struct epoll_event event = {.events = EPOLLIN};
    static int epoll = -1;
    fd_set set;
    FD_ZERO(&set);
    FD_SET(peer.fd, &set);
    if (epoll < 0) {
        epoll = epoll_create1(0);
        epoll_ctl(epoll, EPOLL_CTL_ADD, peer.fd, &event);
    }
    switch (call) {
    case RECV:
        return recv(peer.fd, small, sizeof small, 0);
    case READ:
        return read(peer.fd, small, sizeof small);
    case READV:
        return readv(peer.fd, &piece, 1);
    case RECVMSG:
        return recvmsg(peer.fd, &message, 0);
    case RECVFROM:
        return recvfrom(peer.fd, small, sizeof small, 0, NULL, NULL);
    case POLL:
        return poll(&entry, 1, -1);
    case PPOLL:
        return ppoll(&entry, 1, NULL, NULL);
    case SELECT:
        return select(peer.fd + 1, &set, NULL, NULL, NULL);
    case PSELECT:
        return pselect(peer.fd + 1, &set, NULL, NULL, NULL, NULL);
    case EPOLL:
        return epoll_wait(epoll, &event, 1, -1);
    case EPOLL_PWAIT:
        return epoll_pwait(epoll, &event, 1, -1, NULL);
    default:
        return send(peer.fd, bytes, sizeof bytes, 0);
    }
}

static void clean(void *unused)
{
    (void)unused;
    cleaned++;
}

struct job {
    enum call call;
    int state, type, pending, times;
};

static void *work(void *argument)
{
    struct job *const job = argument;
    volatile long result = 0;
    tid = syscall(SYS_gettid);
    pthread_setcancelstate(job->state, NULL);
    pthread_setcanceltype(job->type, NULL);
    pthread_cleanup_push(clean, NULL);
    if (job->pending)
        pthread_cancel(pthread_self());
    for (int i = 0; i < job->times; i++)
        result = make(job->call);
    pthread_cleanup_pop(0);
    return (void *)result;
}

/* Checks that the connection still works, with this call. */
static const char *still_works(enum call call)
{
    tell(&peer, 's', 100, 10);
    long result = make(call);
    wait_done(&peer);
    if (call >= POLL) {
        char small[100];
        get(peer.fd, small, sizeof small);
        return result == 1 ? "works" : "is broken";
    }
    return result == 100 ? "works" : "is broken";
}

static void ask(const char *title, struct job job, int cancel, int reply)
{
    pthread_t thread;
    void *result;
    cleaned = 0, tid = 0;
    if (reply < 0) {
        tell(&peer, 's', -reply, 0);
        wait_done(&peer);
        poll(&(struct pollfd){peer.fd, POLLIN, 0}, 1, -1);
    }
    pthread_create(&thread, NULL, work, &job);
    while (!tid)
        pause_ms(1);
    if (cancel) {
        wait_asleep(tid);
        pthread_cancel(thread);
    }
    if (reply > 0) {
        wait_asleep(tid);
        tell(&peer, 's', reply, 0);
        wait_done(&peer);
    }
    pthread_join(thread, &result);
    printf("%s, %s: ", title, names[job.call]);
    if (result == PTHREAD_CANCELED)
        printf("cancelled");
    else
        printf("%ld", (long)result);
    printf(", cleaned %d", cleaned);
    if (reply) {
        int left = 0;
        char small[1000];
        for (int part; (part = recv(peer.fd, small, sizeof small, MSG_DONTWAIT)) > 0;)
            left += part;
        printf(", %d left", left);
    }
    if (job.call != SEND)
        printf(", %s", still_works(job.call));
    printf("\n");
}

static void *accept_or_connect(void *argument)
{
    int fd = *(int *)argument;
    tid = syscall(SYS_gettid);
    pthread_cleanup_push(clean, NULL);
    if (fd >= 0)
        accept(fd, NULL, NULL);
    else
        for (;;)
            send(peer.fd, "", 1, MSG_NOSIGNAL);
    pthread_cleanup_pop(0);
    return NULL;
}

static void ask_accept(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    pthread_t thread;
    void *result;
    bind(listener, (void *)&address, sizeof address);
    listen(listener, 1);
    cleaned = 0, tid = 0;
    pthread_create(&thread, NULL, accept_or_connect, &listener);
    while (!tid)
        pause_ms(1);
    wait_asleep(tid);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("accept: %s, cleaned %d\n", result == PTHREAD_CANCELED ? "cancelled" : "returned", cleaned);
}

static void leave(int signal)
{
    (void)signal;
    pthread_exit((void *)7);
}

/* A thread that never blocks, because there is always room, must be cancelled too. */
static void ask_busy(void)
{
    pthread_t thread;
    void *result;
    int none = -1;
    cleaned = 0;
    tell(&peer, 'e', 0, 0);
    pthread_create(&thread, NULL, accept_or_connect, &none);
    for (int i = 0; i < 100000; i++)
        recv(peer.fd, bytes, 1000, 0);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("a busy sender: %s, cleaned %d\n", result == PTHREAD_CANCELED ? "cancelled" : "returned", cleaned);
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    connect_peers(&peer, 1, atoi(argv[1]));
    warm_up(&peer, 1, argv[2]);
    for (enum call call = RECV; call < SEND; call++) {
        struct job job = {call, PTHREAD_CANCEL_ENABLE, PTHREAD_CANCEL_DEFERRED, 0, 1};
        ask("asleep", job, 1, 0);
        job.pending = 1;
        ask("pending, with nothing there", job, 0, 0);
        ask("pending, with something there", job, 0, -100);
        job.pending = 0, job.type = PTHREAD_CANCEL_ASYNCHRONOUS;
        ask("asynchronously", job, 1, 0);
        job.type = PTHREAD_CANCEL_DEFERRED, job.state = PTHREAD_CANCEL_DISABLE;
        ask("disabled", job, 1, 100);
    }
    ask_accept();

    /* Threads start and end, and must leave nothing locked or lost. */
    int ended = 0;
    for (int i = 0; i < 300; i++) {
        struct job job = {i % SEND, PTHREAD_CANCEL_ENABLE, PTHREAD_CANCEL_DEFERRED, 0, 1};
        pthread_t thread;
        void *result;
        pthread_create(&thread, NULL, work, &job);
        if (i % 3 == 0)
            sched_yield();
        pthread_cancel(thread);
        pthread_join(thread, &result);
        ended += result == PTHREAD_CANCELED;
    }
    printf("%d came and went\n", ended);
    for (enum call call = RECV; call < SEND; call++)
        printf("afterwards %s %s\n", names[call], still_works(call));

    struct sigaction action = {.sa_handler = leave};
    sigaction(SIGUSR1, &action, NULL);
    for (enum call call = RECV; call < SEND; call++) {
        struct job job = {call, PTHREAD_CANCEL_ENABLE, PTHREAD_CANCEL_DEFERRED, 0, 1};
        pthread_t thread;
        void *result;
        cleaned = 0, tid = 0;
        pthread_create(&thread, NULL, work, &job);
        while (!tid)
            pause_ms(1);
        wait_asleep(tid);
        pthread_kill(thread, SIGUSR1);
        pthread_join(thread, &result);
        printf("pthread_exit from a handler, %s: %ld, cleaned %d, %s\n", names[call], (long)result, cleaned,
               still_works(call));
    }
    struct job job = {SEND, PTHREAD_CANCEL_ENABLE, PTHREAD_CANCEL_DEFERRED, 0, 1};
    ask("asleep", job, 1, 0);
    end_peers(&peer, 1);

    connect_peers(&peer, 1, atoi(argv[1]));
    warm_up(&peer, 1, argv[2]);
    ask_busy();
    end_peers(&peer, 1);
    return 0;
}
