/* Uses both ends of some connections in one thread. The measured calls have separate functions,
 * which a profiler finds by name. Each is called as often as the first argument says, after all
 * connections are in use. All other work happens outside of them.
 *
 * The second argument is the events for which the connections are registered in the epoll
 * instance. The third is the number of microseconds between a send and the wait for it. A call
 * of getppid(2) marks the beginning of the measured part. */

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CONNECTIONS = 50, LENGTH = 64, ROUNDS = 60, PAUSE = 10000 };

static char message[LENGTH], buffer[4096];

static void check(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        exit(1);
    }
}

__attribute__((noinline)) void measured_send(int fd)
{
    check(send(fd, message, LENGTH, 0) == LENGTH, "send");
}

__attribute__((noinline)) void measured_receive(int fd)
{
    check(recv(fd, buffer, sizeof buffer, MSG_DONTWAIT) == LENGTH, "recv");
}

static int wait_now(int set)
{
    /* Within one page: the library checks each page that the array touches, and where the stack
     * begins depends on the environment. */
    static struct epoll_event events[CONNECTIONS] __attribute__((aligned(1024)));
    return epoll_wait(set, events, CONNECTIONS, 0);
}

__attribute__((noinline)) void measured_wait(int set)
{
    check(wait_now(set) == 1, "epoll_wait");
}

static void exchange(int from, int to)
{
    check(write(from, message, LENGTH) == LENGTH, "write");
    check(read(to, buffer, LENGTH) == LENGTH, "read");
}

int main(int count, char **arguments)
{
    check(count == 4, "how often, for what, and after which pause?");
    int listener = socket(AF_INET, SOCK_STREAM, 0), set = epoll_create1(0);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t length = sizeof address;
    check(!bind(listener, (struct sockaddr *)&address, length), "bind");
    check(!listen(listener, CONNECTIONS), "listen");
    check(!getsockname(listener, (struct sockaddr *)&address, &length), "getsockname");
    int clients[CONNECTIONS], servers[CONNECTIONS];
    for (int one = 0; one < CONNECTIONS; one++) {
        clients[one] = socket(AF_INET, SOCK_STREAM, 0);
        check(!connect(clients[one], (struct sockaddr *)&address, length), "connect");
        servers[one] = accept(listener, NULL, NULL);
        check(servers[one] >= 0, "accept");
        struct epoll_event event = { .events = strtoul(arguments[2], NULL, 0), .data.u32 = one };
        check(!epoll_ctl(set, EPOLL_CTL_ADD, servers[one], &event), "epoll_ctl");
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int one = 0; one < CONNECTIONS; one++) {
            exchange(clients[one], servers[one]);
            exchange(servers[one], clients[one]);
        }
        usleep(PAUSE);
    }
    while (wait_now(set) > 0)
        ;
    int often = atoi(arguments[1]), pause = atoi(arguments[3]);
    getppid();
    for (int turn = 0; turn < often; turn++) {
        measured_send(clients[turn % CONNECTIONS]);
        if (pause > 0)
            usleep(pause);
        measured_wait(set);
        measured_receive(servers[turn % CONNECTIONS]);
    }
    return 0;
}
