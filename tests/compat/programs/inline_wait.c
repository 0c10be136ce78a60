/* An echo server that creates and fills its epoll instance through libc, and waits by an inline
 * epoll_pwait2. With BIG it has 9 MiB of additional code. It ends after CONNECTIONS connections.
 * usage: inline_wait PORT CONNECTIONS */
#include "bypass.h"

static long wait_inline(int set, void *events, int most) {
    register long timeout __asm__("r10") = 0, mask __asm__("r8") = 0, size __asm__("r9") = 8;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(SYS_epoll_pwait2), "D"(set), "S"(events), "d"(most), "r"(timeout), "r"(mask), "r"(size)
                     : "rcx", "r11", "memory");
    return result;
}

#ifdef BIG
__asm__(".section .text.pad,\"ax\"\n.globl pad\npad: .skip 9437184, 0x90\n ret\n.text\n");
extern void pad(void);
void (*volatile keep)(void) = pad;
#endif

int main(int count, char **arguments) {
    int listener = listen_at(atoi(arguments[1])), left = atoi(arguments[2]), set = epoll_create1(EPOLL_CLOEXEC);
    /* The events must return the program's own data. */
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &listener}, events[64];
    epoll_ctl(set, EPOLL_CTL_ADD, listener, &event);
    static int fds[1024];
    static char buffer[65536];
    while (left) {
        long ready = wait_inline(set, events, 64);
        for (long index = 0; index < ready; index++) {
            int *fd = events[index].data.ptr;
            if (fd == &listener) {
                int accepted = accept4(listener, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC);
                if (accepted < 0) continue;
                fds[accepted] = accepted;
                event.data.ptr = &fds[accepted];
                epoll_ctl(set, EPOLL_CTL_ADD, accepted, &event);
                continue;
            }
            ssize_t received = recv(*fd, buffer, sizeof buffer, 0);
            if (received == 0) {
                close(*fd);
                left--;
            } else if (received > 0) {
                send(*fd, buffer, received, MSG_NOSIGNAL);
            }
        }
    }
    return 0;
}
