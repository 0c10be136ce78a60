/* An echo server and its client, which make inline system calls for their connections, or,
 * depending on how it is compiled:
 *
 *   BY_LIBC  use libc's functions. The two bytes of a system call occur inside another
 *            instruction, and in data next to the code.
 *   STUCK    have the waiting call at a place where it cannot be redirected.
 *   WATCHED  take the address behind the waiting call, like a program that checks whether a
 *            thread is there.
 *
 *   own_calls serve PORT
 *   own_calls ask PORT CONNECTIONS ROUNDS GATE   at least ROUNDS rounds, until GATE exists */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST = 64, MESSAGE = 3000 };

static void must(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        exit(2);
    }
}

#ifdef BY_LIBC
#define raw syscall
/* As in libgcc, which recognises the return from a handler by these bytes. */
volatile uint64_t inside;
__asm__(".text\n.byte 0xb8, 1, 0, 0, 0, 0x0f, 0x05, 0xc3\n");
#else
static inline __attribute__((always_inline)) long raw(long number, long a, long b, long c, long d, long e, long f)
{
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    return number;
}
#endif

#if defined(STUCK)
#define WAITS "jmp 1f\n1: syscall\n2: xor %%ecx, %%ecx\ntest %%ecx, %%ecx\njnz 2b"
#elif defined(WATCHED)
#define WAITS "syscall\n1: lea 1b(%%rip), %%rcx"
#endif

static long wait_for(int set, struct epoll_event *events, int count)
{
#ifdef WAITS
    register long r10 __asm__("r10") = -1;
    long result = SYS_epoll_wait;
    __asm__ volatile(WAITS : "+a"(result) : "D"(set), "S"(events), "d"(count), "r"(r10) : "rcx", "r11", "cc", "memory");
    return result;
#else
    return raw(SYS_epoll_wait, set, (long)events, count, -1, 0, 0);
#endif
}

/* Returns the number of executable mappings without a file. Only redirected calls add some. */
static inline int nameless(void)
{
    char line[512];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        count += strstr(line, "r-xp 00000000 00:00 0") && !strchr(line, '[');
    fclose(maps);
    return count;
}

static void serve(int port)
{
    struct epoll_event event = {.events = EPOLLIN}, events[MOST];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1, set = raw(SYS_epoll_create1, EPOLL_CLOEXEC, 0, 0, 0, 0, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    must(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, MOST) == 0, "listen");
    event.data.fd = listener;
    must(raw(SYS_epoll_ctl, set, EPOLL_CTL_ADD, listener, (long)&event, 0, 0) == 0, "epoll_ctl");
    for (;;) {
        long count = wait_for(set, events, MOST);
        must(count > 0, "epoll_wait");
        for (long index = 0; index < count; index++) {
            char bytes[MESSAGE];
            int fd = events[index].data.fd;
            if (fd == listener) {
                event.data.fd = raw(SYS_accept4, listener, 0, 0, SOCK_CLOEXEC, 0, 0);
                must(raw(SYS_epoll_ctl, set, EPOLL_CTL_ADD, event.data.fd, (long)&event, 0, 0) == 0, "epoll_ctl");
                continue;
            }
            long len = raw(SYS_read, fd, (long)bytes, sizeof bytes, 0, 0, 0);
            if (len <= 0)
                raw(SYS_close, fd, 0, 0, 0, 0, 0);
            else
                must(raw(SYS_write, fd, (long)bytes, len, 0, 0, 0) == len, "write");
        }
    }
}

/* Sends a message and compares the answer. Each message has other bytes. */
static void ask(int fd, unsigned round)
{
    char sent[MESSAGE], heard[MESSAGE];
    for (int index = 0; index < MESSAGE; index++)
        sent[index] = round * 31 + index * 7;
    long len = 1 + round * 131 % MESSAGE, begun = 0;
    must(raw(SYS_sendto, fd, (long)sent, len, MSG_NOSIGNAL, 0, 0) == len, "sendto");
    while (begun < len) {
        long some = raw(SYS_recvfrom, fd, (long)heard + begun, len - begun, 0, 0, 0);
        must(some > 0, "recvfrom");
        begun += some;
    }
    must(memcmp(sent, heard, len) == 0, "what came back");
}

int main(int argc, char **argv)
{
#ifdef BY_LIBC
    inside = 0x050f0000000fc0c7;
#endif
    must(argc > 2, "arguments");
    if (!strcmp(argv[1], "serve"))
        serve(atoi(argv[2]));
    must(argc > 5 && atoi(argv[3]) <= MOST, "arguments");
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[2])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fds[MOST], count = atoi(argv[3]), rounds = atoi(argv[4]);
    for (int index = 0; index < count; index++) {
        fds[index] = socket(AF_INET, SOCK_STREAM, 0);
        must(connect(fds[index], (void *)&address, sizeof address) == 0, "connect");
    }
    for (int round = 0; round < rounds || access(argv[5], F_OK) != 0; round++)
        for (int index = 0; index < count; index++)
            ask(fds[index], round * count + index);
#if defined(BY_LIBC) || defined(WAITS)
    printf("%d stretches of code without a file\n", nameless());
#endif
    puts("every answer was right");
    return 0;
}
