/* Signal handlers run thousands of times a second and use sockets, while the interrupted code
 * does the same and allocates. Every byte is checked. Prints what must be the same without
 * shunt. usage: storm PORT GATE [HANDLERS] */
#include "lane.h"
#include <sys/time.h>

#define MAIN 0   /* the connection of the main thread */
#define ALARM 1  /* the connection of the handlers */
#define SENDER 2 /* the connection of the threads that send and receive */
#define PEERS 3

static struct peer peers[PEERS];
static volatile long handled, mistakes;
static unsigned char sequence;
static volatile int over;

static void mistake(const char *what, long got)
{
    char line[100];
    mistakes++;
    if (write(2, line, snprintf(line, sizeof line, "%s: %ld %d\n", what, got, errno)) < 0)
        _exit(3);
}

/* Sends a few bytes, polls for them and reads them back, with calls that are async-signal-safe. */
static void handler(int signal)
{
    unsigned char bytes[3] = {sequence, sequence + 1, sequence + 2}, back[3] = {0};
    int before = errno;
    struct pollfd entry = {peers[ALARM].fd, POLLIN, 0};
    (void)signal;
    if (send(peers[ALARM].fd, bytes, 3, 0) != 3)
        mistake("send in a handler", 0);
    for (int done = 0; done < 3;) {
        int ready = poll(&entry, 1, -1);
        if (ready != 1 && errno != EINTR)
            mistake("poll in a handler", ready);
        ssize_t n = recv(peers[ALARM].fd, back + done, 3 - done, MSG_DONTWAIT);
        if (n < 0 && errno != EAGAIN)
            mistake("recv in a handler", n);
        done += n > 0 ? n : 0;
    }
    if (memcmp(bytes, back, 3))
        mistake("bytes in a handler", back[0]);
    sequence += 3;
    /* Descriptors are created and closed too. */
    int copy = dup(peers[ALARM].fd);
    if (copy < 0 || close(copy))
        mistake("dup in a handler", copy);
    handled++;
    errno = before;
}

/* A handler on a receiving thread: it checks the connection that the thread is using. */
static void onlooker(int signal)
{
    int before = errno, left;
    char byte;
    struct pollfd entry = {peers[SENDER].fd, POLLOUT, 0};
    (void)signal;
    recv(peers[SENDER].fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    poll(&entry, 1, 0);
    socklen_t len = sizeof left;
    getsockopt(peers[SENDER].fd, SOL_SOCKET, SO_ERROR, &left, &len);
    errno = before;
}

static unsigned char at(long place)
{
    return place * 7 + place / 251;
}

static void *send_all(void *argument)
{
    long total = *(long *)argument;
    unsigned char bytes[5000];
    for (long done = 0; done < total;) {
        long part = total - done < (long)sizeof bytes ? total - done : (long)sizeof bytes;
        for (long i = 0; i < part; i++)
            bytes[i] = at(done + i);
        for (long sent = 0; sent < part;) {
            ssize_t n = send(peers[SENDER].fd, bytes + sent, part - sent, 0);
            if (n < 0 && errno != EINTR)
                mistake("send", n);
            sent += n > 0 ? n : 0;
        }
        done += part;
    }
    return NULL;
}

static void *receive_all(void *argument)
{
    long total = *(long *)argument;
    unsigned char bytes[7000];
    for (long done = 0; done < total;) {
        ssize_t n = recv(peers[SENDER].fd, bytes, sizeof bytes, 0);
        if (n <= 0 && !(n < 0 && errno == EINTR))
            mistake("recv", n);
        for (ssize_t i = 0; i < n; i++)
            if (bytes[i] != at(done + i)) {
                mistake("a byte", done + i);
                break;
            }
        done += n > 0 ? n : 0;
    }
    return NULL;
}

static void *molest(void *argument)
{
    pthread_t *threads = argument;
    while (!over) {
        pthread_kill(threads[0], SIGUSR1);
        pthread_kill(threads[1], SIGUSR1);
        pause_ms(1);
    }
    return NULL;
}

/* The main thread: small messages are echoed, with heap allocations, while the timer runs. */
static void echo(long handlers)
{
    for (long done = 0; handled < handlers && !mistakes;) {
        unsigned len = 1 + done % 3000;
        unsigned char *out = malloc(len), *back = malloc(len);
        for (unsigned i = 0; i < len; i++)
            out[i] = at(done + i);
        for (unsigned sent = 0; sent < len;) {
            ssize_t n = send(peers[MAIN].fd, out + sent, len - sent, 0);
            if (n < 0 && errno != EINTR)
                mistake("echo: send", n);
            sent += n > 0 ? n : 0;
        }
        for (unsigned got = 0; got < len;) {
            struct pollfd entry = {peers[MAIN].fd, POLLIN, 0};
            if (done % 2 && poll(&entry, 1, -1) < 0 && errno != EINTR)
                mistake("echo: poll", 0);
            ssize_t n = recv(peers[MAIN].fd, back + got, len - got, 0);
            if (n <= 0 && !(n < 0 && errno == EINTR))
                mistake("echo: recv", n);
            got += n > 0 ? n : 0;
        }
        if (memcmp(out, back, len))
            mistake("echo: bytes", done);
        free(out);
        free(back);
        done += len;
    }
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    long handlers = argc > 3 ? atol(argv[3]) : 1500, total = handlers << 15;
    connect_peers(peers, PEERS, atoi(argv[1]));
    warm_up(peers, PEERS, argv[2]);
    for (int i = 0; i < PEERS; i++)
        tell(&peers[i], 'e', 0, 0);

    /* One of the two handlers restarts calls. */
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    action.sa_flags = 0;
    sigaction(SIGVTALRM, &action, NULL);
    action.sa_handler = onlooker;
    sigaction(SIGUSR1, &action, NULL);

    sigset_t timers;
    sigemptyset(&timers);
    sigaddset(&timers, SIGALRM);
    sigaddset(&timers, SIGVTALRM);
    pthread_sigmask(SIG_BLOCK, &timers, NULL);
    pthread_t threads[2], third;
    pthread_create(&threads[0], NULL, send_all, &total);
    pthread_create(&threads[1], NULL, receive_all, &total);
    pthread_create(&third, NULL, molest, threads);
    /* One handler runs at a time, because each makes a round trip. */
    action.sa_handler = handler;
    action.sa_mask = timers;
    sigaction(SIGVTALRM, &action, NULL);
    action.sa_flags = SA_RESTART;
    sigaction(SIGALRM, &action, NULL);
    pthread_sigmask(SIG_UNBLOCK, &timers, NULL);
    struct itimerval often = {{0, 700}, {0, 700}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, NULL);
    setitimer(ITIMER_VIRTUAL, &often, NULL);
    echo(handlers);
    setitimer(ITIMER_REAL, &never, NULL);
    setitimer(ITIMER_VIRTUAL, &never, NULL);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    over = 1;
    pthread_join(third, NULL);
    printf("%ld mistakes\n", mistakes);
    end_peers(peers, PEERS);
    return 0;
}
