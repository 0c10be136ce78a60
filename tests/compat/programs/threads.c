/* More threads than waiters, each sleeping on a separate connection. All must be woken and get
 * their own bytes, and sleeping must cost next to nothing. usage: threads PORT GATE [THREADS] */
#include "lane.h"
#include <sys/resource.h>

static int count;
static int (*pairs)[2];
static volatile int got, wrong;

static void *receive(void *argument)
{
    long index = (long)argument;
    for (int round = 0; round < 3; round++) {
        int value = -1;
        get(pairs[index][1], &value, sizeof value);
        if (value != index * 3 + round)
            __sync_fetch_and_add(&wrong, 1);
        __sync_fetch_and_add(&got, 1);
    }
    return NULL;
}

static double used(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

int main(int argc, char **argv)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    struct rlimit limit = {8192, 8192};
    count = argc > 3 ? atoi(argv[3]) : 300;
    setrlimit(RLIMIT_NOFILE, &limit);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 128))
        die("listen");
    pairs = calloc(count, sizeof *pairs);
    pthread_t *threads = calloc(count, sizeof *threads);
    for (int i = 0; i < count; i++) {
        pairs[i][0] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(pairs[i][0], (void *)&address, sizeof address))
            die("connect");
        pairs[i][1] = accept(listener, NULL, NULL);
    }
    do
        for (int i = 0; i < count; i++)
            for (int turn = 0; turn < 2; turn++) {
                char bytes[8] = {0};
                put(pairs[i][turn], bytes, 8);
                get(pairs[i][!turn], bytes, 8);
            }
    while (access(argv[2], F_OK) != 0);

    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 1 << 16);
    for (long i = 0; i < count; i++)
        if (pthread_create(&threads[i], &small, receive, (void *)i))
            die("pthread_create");
    for (int round = 0; round < 3; round++) {
        /* If a few hundred threads polled with short sleeps, they would use more than half of a
         * processor. */
        double cost = 1;
        for (int seconds = 0; cost > 0.2 && seconds < 15; seconds++) {
            double before = used();
            pause_ms(1000);
            cost = used() - before;
        }
        if (cost > 0.2)
            printf("asleep, they used %.2f s in a second\n", cost);
        for (int i = count - 1; i >= 0; i--) {
            int value = i * 3 + round;
            put(pairs[i][0], &value, sizeof value);
        }
    }
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    printf("%d received, %d wrong\n", got, wrong);
    return 0;
}
