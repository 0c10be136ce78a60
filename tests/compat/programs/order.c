/* A client sends on many connections, one after the other. Some are old, and some are new in
 * each round. A server sleeps in epoll_wait and reports the order of events: whether the old
 * connections come in the order of the sends, and whether any comes before bytes that were sent
 * on a new one earlier.
 *
 *   usage: order PORT level|edge */
#include "lane.h"
#include <netinet/tcp.h>

enum { OLD = 6, YOUNG = 2, ALL = OLD + YOUNG, WARM = 100, ROUNDS = 400, NEW = 64 };

static int random_below(int bound)
{
    static unsigned long state = 1;
    state = state * 6364136223846793005UL + 1442695040888963407UL;
    return (state >> 33) % bound;
}

static int open_one(struct sockaddr_in *address)
{
    int on = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (void *)address, sizeof *address))
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

/* Sends, and waits on a separate connection until the server has seen all of a round. */
static void speak(struct sockaddr_in *address)
{
    int fds[ALL], control = open_one(address);
    char byte = 0;
    get(control, &byte, 1);
    for (int i = 0; i < OLD; i++) {
        fds[i] = open_one(address);
        for (int turn = 0; turn < WARM; turn++) {
            put(fds[i], "w", 1);
            get(fds[i], &byte, 1);
            if (turn % 25 == 0)
                pause_ms(2);
        }
    }
    for (int round = 0; round < ROUNDS; round++) {
        int order[ALL];
        for (int i = OLD; i < ALL; i++) {
            fds[i] = open_one(address);
            put(fds[i], "w", 1);
            get(fds[i], &byte, 1);
        }
        for (int i = 0; i < ALL; i++)
            order[i] = i;
        for (int i = ALL - 1; i > 0; i--) {
            int other = random_below(i + 1), kept = order[i];
            order[i] = order[other];
            order[other] = kept;
        }
        /* The server sleeps, or is about to. */
        usleep(random_below(400));
        for (int i = 0; i < ALL; i++) {
            char number = order[i] < OLD ? i : NEW | i;
            put(fds[order[i]], &number, 1);
        }
        get(control, &byte, 1);
        for (int i = OLD; i < ALL; i++)
            close(fds[i]);
    }
    exit(0);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    unsigned kind = strcmp(argv[2], "edge") ? 0 : EPOLLET;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int on = 1, listener = socket(AF_INET, SOCK_STREAM, 0), control = -1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 64))
        die("listen");
    pid_t client = fork();
    if (client == 0)
        speak(&address);
    int set = epoll_create1(0);
    struct epoll_event events[ALL + 1] = {{.events = EPOLLIN, .data.fd = listener}};
    epoll_ctl(set, EPOLL_CTL_ADD, listener, events);
    int wrong = 0, overtaken = 0, seen = 0, last = -1, rounds = 0;
    while (rounds < ROUNDS) {
        int count = epoll_wait(set, events, LEN(events), 20000);
        if (count <= 0)
            die("epoll_wait");
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            char byte;
            if (fd == listener) {
                fd = accept(listener, NULL, NULL);
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                if (control < 0) {
                    control = fd;
                    put(control, "c", 1);
                    continue;
                }
                struct epoll_event event = {.events = EPOLLIN | kind, .data.fd = fd};
                epoll_ctl(set, EPOLL_CTL_ADD, fd, &event);
                continue;
            }
            ssize_t got = recv(fd, &byte, 1, MSG_DONTWAIT);
            if (got < 0)
                continue;
            if (got == 0) {
                close(fd);
                continue;
            }
            if (byte == 'w') {
                put(fd, &byte, 1);
                continue;
            }
            /* After an old connection's number, no smaller number may follow. */
            if (byte & NEW) {
                overtaken += (byte & ~NEW) < last;
            } else {
                wrong += byte < last;
                last = byte;
            }
            if (++seen == ALL) {
                seen = 0;
                last = -1;
                rounds++;
                put(control, "r", 1);
            }
        }
    }
    waitpid(client, NULL, 0);
    /* A busy kernel may deliver bytes on TCP only after the send has returned. Another
     * connection's bytes may then come first. */
    printf("old ones %s, new ones %s\n", wrong ? "in the wrong order" : "in their order", overtaken > ROUNDS * YOUNG / 20 ? "overtaken" : "not overtaken");
    fprintf(stderr, "of %d, %d were told out of their turn, and %d overtaken\n", ROUNDS * ALL, wrong, overtaken);
    return 0;
}
