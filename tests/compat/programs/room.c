/* Threads send on one connection each, to a child that reads as fast as it can, and wait when
 * there is no room. Another thread waits in epoll_wait for edges of all connections, and
 * notifies them of room. usage: room PORT GATE */
#include "lane.h"
#include <semaphore.h>

enum { PEERS = 4, EACH = 160 << 20, PIECE = 32 << 10, LONG = 10 };

static struct peer peers[PEERS];
static sem_t room[PEERS];

static void *tell_of_room(void *argument)
{
    int set = *(int *)argument;
    struct epoll_event events[PEERS];
    for (int count; (count = epoll_wait(set, events, PEERS, -1)) > 0;)
        for (int i = 0; i < count; i++)
            if (events[i].events & EPOLLOUT)
                sem_post(&room[events[i].data.u32]);
    die("epoll_wait");
    return NULL;
}

static void *send_all(void *argument)
{
    static char bytes[PIECE];
    int number = (struct peer *)argument - peers;
    for (int left = EACH; left > 0;) {
        size_t part = left < PIECE ? left : PIECE;
        ssize_t n = send(peers[number].fd, bytes, part, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN)
            die("send");
        left -= n > 0 ? n : 0;
        if (n == (ssize_t)part)
            continue;
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += LONG;
        if (sem_timedwait(&room[number], &until)) {
            printf("%d waits for room\n", number);
            exit(1);
        }
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    pthread_t waiter, senders[PEERS];
    connect_peers(peers, PEERS, atoi(argv[1]));
    int set = epoll_create1(0);
    for (int i = 0; i < PEERS; i++) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u32 = i};
        sem_init(&room[i], 0, 0);
        if (epoll_ctl(set, EPOLL_CTL_ADD, peers[i].fd, &event))
            die("epoll_ctl");
    }
    warm_up(peers, PEERS, argv[2]);
    pthread_create(&waiter, NULL, tell_of_room, &set);
    for (int i = 0; i < PEERS; i++) {
        tell(&peers[i], 'r', EACH, 0);
        pthread_create(&senders[i], NULL, send_all, &peers[i]);
    }
    for (int i = 0; i < PEERS; i++) {
        pthread_join(senders[i], NULL);
        wait_done(&peers[i]);
    }
    end_peers(peers, PEERS);
    puts("all was sent");
    return 0;
}
