/* A library that writes and reads by libc's functions or, with INLINE, by inline system calls.
 * With ASKS it looks the functions up by dlsym with that handle. CONSTANTS adds data that looks like
 * code with a system call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
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
#elif defined ASKS
typedef ssize_t writer(int, const void *, size_t);
typedef ssize_t reader(int, void *, size_t);

static void *find(const char *name) {
    void *found = dlsym(ASKS, name);
    /* The result must be the same function as in the program. */
    if (found != dlsym(dlopen(NULL, RTLD_LAZY), name)) exit(10);
    return found;
}
#define write(fd, from, len) ((writer *)find("write"))(fd, from, len)
#define read(fd, to, len) ((reader *)find("read"))(fd, to, len)
#endif

#ifdef CONSTANTS
/* 80 times nop; mov eax, 1; syscall; ret. */
__attribute__((used)) const unsigned char constants[] = {
#define TEN 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90, 0x90
    TEN, TEN, TEN, TEN, TEN, TEN, TEN, TEN, 0xb8, 1, 0, 0, 0, 0x0f, 0x05, 0xc3,
};
#endif

ssize_t plugin_write(int fd, const void *from, size_t len) {
    return write(fd, from, len);
}

ssize_t plugin_read(int fd, void *to, size_t len) {
    return read(fd, to, len);
}
