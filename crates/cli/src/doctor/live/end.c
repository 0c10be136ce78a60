// One end of a connection that `shunt doctor --live` makes.
//
//     end serve IP              prints "port N", accepts one connection, and answers until its end
//     end connect IP PORT       prints "from N", its own port; each line of its standard input is
//                               answered by MESSAGES messages there and back, and "moved"
//
// Both ends check every byte. "failed STEP" is the last line of an end that fails.
//
// build.rs compiles this file twice: with a dynamic linker, and, with ALONE, without any library.
// Both begin at `_start`, so that the dynamic program runs with every glibc that shunt supports:
// since 2.34, the usual beginning needs that version.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    MESSAGE = 4096,
    MESSAGES = 32,
    // Seconds after which an end is no longer needed, whatever has become of its parent.
    LIFE = 120,
};

#ifdef ALONE
#ifndef __x86_64__
#error "static programs are entered on x86-64 alone"
#endif

static __attribute__((noinline)) long call(long number, long a, long b, long c, long d, long e)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
    return result;
}

#define socket(family, type, protocol) call(SYS_socket, family, type, protocol, 0, 0)
#define bind(fd, address, size) call(SYS_bind, fd, (long)(address), size, 0, 0)
#define listen(fd, count) call(SYS_listen, fd, count, 0, 0, 0)
#define accept(fd, address, size) call(SYS_accept, fd, (long)(address), (long)(size), 0, 0)
#define connect(fd, address, size) call(SYS_connect, fd, (long)(address), size, 0, 0)
#define getsockname(fd, address, size) call(SYS_getsockname, fd, (long)(address), (long)(size), 0, 0)
#define setsockopt(fd, level, name, value, size) call(SYS_setsockopt, fd, level, name, (long)(value), size)
#define read(fd, bytes, size) call(SYS_read, fd, (long)(bytes), size, 0, 0)
#define write(fd, bytes, size) call(SYS_write, fd, (long)(bytes), size, 0, 0)
#define alarm(seconds) call(SYS_alarm, seconds, 0, 0, 0, 0)
#define _exit(code) for (;;) call(SYS_exit_group, code, 0, 0, 0, 0)
#endif

// Without the beginning of a C library there are no functions for strings either.
static size_t length(const char *text)
{
    size_t count = 0;
    while (text[count] != 0)
        count++;
    return count;
}

static void print(const char *text)
{
    (void)!write(1, text, length(text));
}

static void print_number(const char *name, unsigned number)
{
    char line[32];
    size_t at = sizeof line;
    line[--at] = 0;
    line[--at] = '\n';
    do
        line[--at] = (char)('0' + number % 10);
    while ((number /= 10) != 0);
    line[--at] = ' ';
    for (size_t left = length(name); left > 0; left--)
        line[--at] = name[left - 1];
    print(line + at);
}

static void fail(const char *step)
{
    print("failed ");
    print(step);
    print("\n");
    _exit(1);
}

static unsigned number(const char *text)
{
    unsigned value = 0;
    for (; *text >= '0' && *text <= '9'; text++)
        value = value * 10 + (unsigned)(*text - '0');
    return value;
}

// Returns an IPv4 address, in the byte order of the network.
static uint32_t parse(const char *text)
{
    uint32_t ip = 0;
    for (int part = 0; part < 4; part++) {
        ip = ip << 8 | (number(text) & 255);
        while (*text != 0 && *text++ != '.')
            ;
    }
    return htonl(ip);
}

// Returns a byte of message `count`. `back` is 1 for an answer.
static unsigned char content(unsigned count, unsigned at, unsigned back)
{
    unsigned mixed = (count * MESSAGE + at) * 2654435761u + back * 40503u;
    return (unsigned char)(mixed >> 24 ^ mixed >> 11);
}

static void send_message(int fd, unsigned count, unsigned back)
{
    unsigned char bytes[MESSAGE];
    for (unsigned at = 0; at < MESSAGE; at++)
        bytes[at] = content(count, at, back);
    for (long done = 0, now; done < MESSAGE; done += now)
        if ((now = write(fd, bytes + done, (size_t)(MESSAGE - done))) <= 0)
            fail("write");
}

// Returns 0 if the connection has ended before the message.
static int receive_message(int fd, unsigned count, unsigned back)
{
    unsigned char bytes[MESSAGE];
    for (long done = 0, now; done < MESSAGE; done += now) {
        now = read(fd, bytes + done, (size_t)(MESSAGE - done));
        if (now == 0 && done == 0)
            return 0;
        if (now <= 0)
            fail("read");
    }
    for (unsigned at = 0; at < MESSAGE; at++)
        if (bytes[at] != content(count, at, back))
            fail("contents");
    return 1;
}

static unsigned own_port(int fd)
{
    struct sockaddr_in own;
    socklen_t size = sizeof own;
    if (getsockname(fd, (struct sockaddr *)&own, &size) < 0)
        fail("getsockname");
    return ntohs(own.sin_port);
}

static void serve(int fd, struct sockaddr_in address)
{
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0)
        fail("bind");
    if (listen(fd, 1) < 0)
        fail("listen");
    print_number("port", own_port(fd));
    int client = (int)accept(fd, NULL, NULL);
    if (client < 0)
        fail("accept");
    for (unsigned count = 0; receive_message(client, count, 0); count++)
        send_message(client, count, 1);
}

static void ask(int fd, struct sockaddr_in address)
{
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        fail("connect");
    print_number("from", own_port(fd));
    char order;
    unsigned count = 0;
    while (read(0, &order, 1) == 1) {
        for (unsigned end = count + MESSAGES; count < end; count++) {
            send_message(fd, count, 0);
            if (!receive_message(fd, count, 1))
                fail("end");
        }
        print("moved\n");
    }
}

// `stack` is what the kernel gives a program: the number of its arguments, and they themselves.
__attribute__((used, noreturn)) void begin(const long *stack)
{
    const char *const *arguments = (const char *const *)(stack + 1);
    alarm(LIFE);
    if (stack[0] < 3)
        fail("arguments");
    int fd = (int)socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0)
        fail("socket");
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = parse(arguments[2]) };
    if (stack[0] > 3) {
        address.sin_port = htons((uint16_t)number(arguments[3]));
        ask(fd, address);
    } else {
        serve(fd, address);
    }
    _exit(0);
}

#ifdef __x86_64__
__asm__(".globl _start\n_start:\n  xor %ebp, %ebp\n  mov %rsp, %rdi\n  and $-16, %rsp\n  call begin\n  hlt\n");
#elif defined(__aarch64__)
__asm__(".globl _start\n_start:\n  mov x29, #0\n  mov x30, #0\n  mov x0, sp\n  bl begin\n  brk #0\n");
#else
#error "no beginning is written for this processor"
#endif
