/* A library that writes and reads by libc's functions or, with INLINE, by system calls of its own. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

#ifdef INLINE
static long call(long number, long a, long b, long c) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
}
#define write(fd, from, len) call(SYS_write, fd, (long)(from), len)
#define read(fd, to, len) call(SYS_read, fd, (long)(to), len)
#endif

ssize_t plugin_write(int fd, const void *from, size_t len) {
    return write(fd, from, len);
}

ssize_t plugin_read(int fd, void *to, size_t len) {
    return read(fd, to, len);
}
