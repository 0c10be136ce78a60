/* Reports how much of the shim's shared memory is locked in a program that has locked its
 * memory, and how much a core dump would contain. Each connection leads to another process, so
 * each has a separate link. usage: memory PORT GATE no|before|after */
#include "lane.h"
#include <sys/mman.h>

#define PEERS 6

static void lock_all(void)
{
    if (mlockall(MCL_CURRENT | MCL_FUTURE))
        die("mlockall");
}

/* Reports the mappings of memfds that shunt has created. */
static void report(void)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[512];
    int is_ours = 0, count = 0, rss = 0, locked = 0, dumped = 0, kib;
    while (file && fgets(line, sizeof line, file)) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2 && strchr(line, ' ') - line > 8) {
            is_ours = strstr(line, "memfd:shunt") != NULL;
            count += is_ours;
        } else if (is_ours && sscanf(line, "Rss: %d", &kib) == 1) {
            rss += kib;
        } else if (is_ours && strncmp(line, "VmFlags:", 8) == 0) {
            locked += strstr(line, " lo") != NULL;
            dumped += strstr(line, " dd") == NULL;
        }
    }
    printf("mappings %d, kib %d, locked %d, dumped %d\n", count, rss, locked, dumped);
}

int main(int argc, char **argv)
{
    static struct peer peers[PEERS];
    connect_peers(peers, PEERS, atoi(argv[1]));
    if (strcmp(argv[3], "before") == 0)
        lock_all();
    warm_up(peers, PEERS, argv[2]);
    if (strcmp(argv[3], "after") == 0)
        lock_all();
    report();
    end_peers(peers, PEERS);
    return argc != 4;
}
