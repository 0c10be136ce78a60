/* The result of a call that waits in one thread, and the view of its peer, when another thread
 * closes the call's descriptor or replaces it by another connection. Prints one line for each
 * question, which must be the same without shunt. usage: closes PORT GATE */
#include "lane.h"
#include <sys/sendfile.h>

#define MUCH (6 << 20)

enum call { RECV, READ, READV, RECVMSG, ALL, PEEK, SPLICE, SEND, SENDMSG, SENDFILE, POLL, SELECT, CALLS };
static const char *const calls[CALLS] = {"recv", "read",    "readv",    "recvmsg", "recv all", "peek",
                                         "splice", "send", "sendmsg", "sendfile", "poll",    "select"};

enum way { CLOSE, RANGE, ONTO, WAYS };
static const char *const ways[WAYS] = {"closed", "closed in a range", "another's"};

/* One peer for each question, and the one that gets the descriptor. */
#define PEERS (CALLS * WAYS + 11)
static struct peer peers[PEERS];
static int next, pipes[2], file;
static char much[MUCH];

struct waiting {
    enum call call;
    int fd;
    volatile pid_t tid;
    pthread_t thread;
    long result, more;
};

static void *wait_in(void *argument)
{
    struct waiting *me = argument;
    static __thread char bytes[1000];
    int fd = me->fd;
    struct iovec piece = {bytes, sizeof bytes}, all = {much, MUCH};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1}, long_one = {.msg_iov = &all, .msg_iovlen = 1};
    struct pollfd polled = {fd, POLLIN, 0};
    struct timeval time = {1, 500000};
    off_t from = 0;
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    errno = 0;
    me->tid = syscall(SYS_gettid);
    switch (me->call) {
    case RECV:
        me->result = recv(fd, bytes, sizeof bytes, 0);
        break;
    case READ:
        me->result = read(fd, bytes, sizeof bytes);
        break;
    case READV:
        me->result = readv(fd, &piece, 1);
        break;
    case RECVMSG:
        me->result = recvmsg(fd, &message, 0);
        break;
    case ALL:
        me->result = recv(fd, bytes, 150, MSG_WAITALL);
        break;
    case PEEK:
        me->result = recv(fd, bytes, sizeof bytes, MSG_PEEK);
        break;
    case SPLICE:
        me->result = splice(fd, NULL, pipes[1], NULL, 1000, 0);
        break;
    case SEND:
        me->result = send(fd, much, MUCH, MSG_NOSIGNAL);
        break;
    case SENDMSG:
        me->result = sendmsg(fd, &long_one, MSG_NOSIGNAL);
        break;
    case SENDFILE:
        me->result = sendfile(fd, file, &from, MUCH);
        break;
    case POLL:
        me->result = poll(&polled, 1, 1500);
        me->more = polled.revents;
        break;
    default:
        me->result = select(fd + 1, &set, NULL, NULL, &time);
        me->more = FD_ISSET(fd, &set) != 0;
    }
    if (me->result < 0)
        me->more = errno;
    return NULL;
}

static void begin(struct waiting *waiting, enum call call, int fd)
{
    *waiting = (struct waiting){.call = call, .fd = fd};
    if (pthread_create(&waiting->thread, NULL, wait_in, waiting))
        die("thread");
    while (!waiting->tid)
        pause_ms(1);
    wait_asleep(waiting->tid);
}

static char ask(struct peer *peer, char what, int len)
{
    tell(peer, what, len, 0);
    return wait_done(peer);
}

/* Closes the descriptor of a connection in one of the ways. If another connection replaces it,
 * that has seven bytes. */
static void take(int fd, enum way way, struct peer *other)
{
    if (way == CLOSE && close(fd))
        die("close");
    if (way == RANGE) {
        /* A call that the kernel refuses closes nothing. */
        char bytes[100];
        if (close_range(fd, fd, 1 << 10) != -1 || errno != EINVAL)
            die("close_range with an unknown flag");
        pause_ms(20);
        if (recv(fd, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT) != -1 || (errno != EAGAIN && errno != ENOTSOCK))
            die("recv after it");
        if (close_range(fd, fd, 0))
            die("close_range");
    }
    if (way == ONTO) {
        if (dup2(other->fd, fd) != fd)
            die("dup2");
    }
}

static int is_send(enum call call)
{
    return call == SEND || call == SENDMSG || call == SENDFILE;
}

static void question(enum call call, enum way way, struct peer *other)
{
    struct peer *peer = &peers[next++];
    struct waiting waiting;
    int fd = peer->fd, waits = call == POLL || call == SELECT;
    begin(&waiting, call, fd);
    take(fd, way, other);
    if (way == ONTO && !waits)
        ask(other, 's', 7);
    pause_ms(20);
    /* While a send waits, the peer has bytes. */
    char meanwhile = ask(peer, 'l', 0);
    if (is_send(call))
        ask(peer, 'r', MUCH);
    else
        ask(peer, 's', 100);
    if (call == ALL)
        ask(peer, 's', 50);
    pthread_join(waiting.thread, NULL);
    printf("%s, %s: peer %c, returns %ld %ld, peer %c", calls[call], ways[way], meanwhile, waiting.result, waiting.more,
           ask(peer, 'w', 0));
    char bytes[100];
    if (way == ONTO && !waits)
        printf(", number gives %zd", recv(fd, bytes, sizeof bytes, MSG_DONTWAIT));
    if (call == SPLICE && waiting.result > 0 && read(pipes[0], bytes, waiting.result) != waiting.result)
        die("pipe");
    printf("\n");
    fflush(stdout);
    if (way == ONTO)
        close(fd);
    peer->fd = -1;
}

static void both_directions(void)
{
    struct peer *peer = &peers[next++];
    struct waiting reader, writer;
    begin(&writer, SEND, peer->fd);
    begin(&reader, RECV, peer->fd);
    close(peer->fd);
    pause_ms(20);
    printf("two calls: peer %c", ask(peer, 'l', 0));
    ask(peer, 's', 100);
    pthread_join(reader.thread, NULL);
    ask(peer, 'r', MUCH);
    pthread_join(writer.thread, NULL);
    printf(", reader %ld, writer %ld, peer %c\n", reader.result, writer.result, ask(peer, 'w', 0));
    peer->fd = -1;
}

/* An epoll instance is closed, or its descriptor replaced, during a wait, which must continue. */
static void *wait_on_set(void *argument)
{
    struct waiting *me = argument;
    struct epoll_event event = {0};
    me->tid = syscall(SYS_gettid);
    me->result = epoll_wait(me->fd, &event, 1, 20000);
    me->more = me->result < 0 ? errno : (long)event.data.u64;
    return NULL;
}

static void set_goes(enum way way, struct peer *other)
{
    struct peer *peer = &peers[next++];
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 77};
    struct waiting waiting = {.fd = epoll_create1(0)};
    if (epoll_ctl(waiting.fd, EPOLL_CTL_ADD, peer->fd, &event))
        die("epoll_ctl");
    /* Repeat until the peer can wake the epoll instance. */
    for (int i = 0; i < 20; i++, pause_ms(5)) {
        char byte;
        ask(peer, 's', 1);
        if (epoll_wait(waiting.fd, &event, 1, 20000) != 1)
            die("epoll_wait");
        get(peer->fd, &byte, 1);
        put(peer->fd, &byte, 1);
        ask(peer, 'r', 1);
    }
    if (pthread_create(&waiting.thread, NULL, wait_on_set, &waiting))
        die("thread");
    while (!waiting.tid)
        pause_ms(1);
    wait_asleep(waiting.tid);
    take(waiting.fd, way, other);
    ask(peer, 's', 100);
    pthread_join(waiting.thread, NULL);
    printf("a set, %s: returns %ld %ld\n", ways[way], waiting.result, waiting.more);
    if (way == ONTO)
        close(waiting.fd);
}

static void peer_ends(int signal)
{
    struct peer *peer = &peers[next++];
    struct waiting waiting;
    begin(&waiting, RECV, peer->fd);
    close(peer->fd);
    pause_ms(20);
    if (signal)
        kill(peer->pid, signal);
    else
        ask(peer, 'c', 0);
    pthread_join(waiting.thread, NULL);
    printf("peer %s: returns %ld %ld\n", signal ? "is killed" : "closes", waiting.result, waiting.more);
    peer->fd = -1;
}

/* A child that is forked in the meantime does not have the descriptor either, and has no waiting
 * thread. */
static void forks(void)
{
    struct peer *peer = &peers[next++];
    struct waiting waiting;
    int hold[2];
    char byte;
    if (pipe(hold))
        die("pipe");
    begin(&waiting, RECV, peer->fd);
    close(peer->fd);
    pid_t child = fork();
    if (child == 0) {
        close(hold[1]);
        _exit(read(hold[0], &byte, 1) != 0);
    }
    close(hold[0]);
    pause_ms(20);
    printf("a fork: peer %c", ask(peer, 'l', 0));
    ask(peer, 's', 100);
    pthread_join(waiting.thread, NULL);
    printf(", returns %ld, peer %c\n", waiting.result, ask(peer, 'w', 0));
    close(hold[1]);
    waitpid(child, NULL, 0);
    peer->fd = -1;
}

/* The waiting thread is cancelled, so that no call uses the socket any more. */
static void cancelled(void)
{
    struct peer *peer = &peers[next++];
    struct waiting waiting;
    begin(&waiting, RECV, peer->fd);
    close(peer->fd);
    pause_ms(20);
    printf("cancelled: peer %c", ask(peer, 'l', 0));
    pthread_cancel(waiting.thread);
    pthread_join(waiting.thread, NULL);
    printf(", peer %c\n", ask(peer, 'w', 0));
    peer->fd = -1;
}

static int wake_fd;

static void close_it(int signal)
{
    (void)signal;
    close(wake_fd);
}

/* A handler closes the descriptor for which the interrupted call waits. No process holds the
 * socket then. */
static void by_handler(void)
{
    struct peer *peer = &peers[next++];
    struct waiting waiting;
    struct sigaction action = {.sa_handler = close_it, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, NULL);
    wake_fd = peer->fd;
    begin(&waiting, RECV, peer->fd);
    pthread_kill(waiting.thread, SIGUSR1);
    pthread_join(waiting.thread, NULL);
    printf("by its own handler: returns %ld %ld, peer %c\n", waiting.result, waiting.more, ask(peer, 'w', 0));
    peer->fd = -1;
}

int main(int argc, char **argv)
{
    (void)argc;
    connect_peers(peers, PEERS, atoi(argv[1]));
    char name[] = "closes-XXXXXX";
    if ((file = mkstemp(name)) < 0 || unlink(name) || ftruncate(file, MUCH) || pipe(pipes))
        die("files");
    warm_up(peers, PEERS, argv[2]);
    struct peer *other = &peers[PEERS - 1];
    for (enum way way = 0; way < WAYS; way++)
        for (enum call call = 0; call < CALLS; call++)
            question(call, way, other);
    both_directions();
    for (enum way way = 0; way < WAYS; way++)
        set_goes(way, other);
    peer_ends(0);
    peer_ends(SIGKILL);
    forks();
    cancelled();
    by_handler();
    /* Leave nothing of this program open. */
    for (int i = 0; i < PEERS; i++) {
        close(peers[i].orders);
        if (peers[i].fd >= 0)
            close(peers[i].fd);
        waitpid(peers[i].pid, NULL, 0);
    }
    return 0;
}
