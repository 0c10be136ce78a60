/* A connection in two edge-triggered epoll instances. When its peer has read a full buffer, both
 * must report room: to one thread that asks them in turn, and to two threads that wait. poll
 * must report it too. usage: two_sets PORT GATE */
#include "lane.h"

enum { ROUNDS = 45, SETS = 2, LONG_MS = 3000 };

static struct peer peer;

static void *wait_for_room(void *argument)
{
    struct epoll_event event;
    int count = epoll_wait(*(int *)argument, &event, 1, LONG_MS);
    return (void *)(long)(count == 1 && event.events & EPOLLOUT);
}

static void *poll_for_room(void *argument)
{
    struct pollfd one = {*(int *)argument, POLLOUT, 0};
    return (void *)(long)(poll(&one, 1, LONG_MS) == 1 && one.revents & POLLOUT);
}

/* Sends until there is no room, then makes the peer read all bytes: before a lane spills, after
 * that, or while it does. */
static void fill(int round)
{
    static char bytes[32 << 10];
    int sent = 0;
    for (ssize_t n; (n = send(peer.fd, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL)) > 0;)
        sent += n;
    if (errno != EAGAIN)
        die("send");
    tell(&peer, 'r', sent, 2 + round % 5);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    int sets[SETS];
    connect_peers(&peer, 1, atoi(argv[1]));
    warm_up(&peer, 1, argv[2]);
    for (int i = 0; i < SETS; i++) {
        struct epoll_event event = {.events = EPOLLOUT | EPOLLET};
        sets[i] = epoll_create1(0);
        if (epoll_ctl(sets[i], EPOLL_CTL_ADD, peer.fd, &event))
            die("epoll_ctl");
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < SETS; i++)
            if (!wait_for_room(&sets[i]))
                printf("round %d: no room in set %d\n", round, i);
        pthread_t other;
        fill(round);
        if (round % 3 == 1)
            pthread_create(&other, NULL, wait_for_room, &sets[1]);
        if (round % 3 == 2)
            pthread_create(&other, NULL, poll_for_room, &peer.fd);
        if (!wait_for_room(&sets[0]))
            printf("round %d: the first is not told\n", round);
        void *found = NULL;
        if (round % 3)
            pthread_join(other, &found);
        else
            found = wait_for_room(&sets[1]);
        if (!found)
            printf("round %d: the second is not told\n", round);
        wait_done(&peer);
        /* Arm the registrations again, so that the next round starts like this one. */
        struct epoll_event event = {.events = EPOLLOUT | EPOLLET};
        for (int i = 0; i < SETS; i++)
            epoll_ctl(sets[i], EPOLL_CTL_MOD, peer.fd, &event);
    }
    end_peers(&peer, 1);
    puts("done");
    return 0;
}
