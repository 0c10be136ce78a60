/* A library that calls libc's functions. Loaded with RTLD_DEEPBIND, or in its own namespace, it is
   bound past libraries that were loaded before it. Errors are negative numbers, as the kernel
   returns them. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

long past_call(long number, const unsigned long *a) {
    long result;
    switch (number) {
    case SYS_read: result = read((int)a[0], (void *)a[1], a[2]); break;
    case SYS_write: result = write((int)a[0], (void *)a[1], a[2]); break;
    case SYS_recvfrom: result = recvfrom((int)a[0], (void *)a[1], a[2], (int)a[3], (void *)a[4], (void *)a[5]); break;
    case SYS_sendto: result = sendto((int)a[0], (void *)a[1], a[2], (int)a[3], (void *)a[4], (socklen_t)a[5]); break;
    case SYS_close: result = close((int)a[0]); break;
    case SYS_shutdown: result = shutdown((int)a[0], (int)a[1]); break;
    case SYS_setsockopt: result = setsockopt((int)a[0], (int)a[1], (int)a[2], (void *)a[3], (socklen_t)a[4]); break;
    case SYS_dup: result = dup((int)a[0]); break;
    case SYS_epoll_create1: result = epoll_create1((int)a[0]); break;
    case SYS_epoll_ctl: result = epoll_ctl((int)a[0], (int)a[1], (int)a[2], (void *)a[3]); break;
    case SYS_epoll_pwait: result = epoll_pwait((int)a[0], (void *)a[1], (int)a[2], (int)a[3], (void *)a[4]); break;
    case SYS_ppoll: result = ppoll((void *)a[0], a[1], (void *)a[2], (void *)a[3]); break;
    default: result = syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]); break;
    }
    return result == -1 ? -errno : result;
}
