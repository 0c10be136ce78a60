/* Becomes another user in one of the ways of programs that root starts, possibly in a chroot.
 * Then it talks to itself over one connection until the file GATE exists. With TURNS, it makes
 * that many turns, slowly, and then waits for the file.
 *
 *   usage: user PORT HOW GATE [TURNS] */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NOBODY 65534

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static int become(const char *how)
{
    if (!strcmp(how, "setuid"))
        return setuid(NOBODY);
    if (!strcmp(how, "seteuid"))
        return seteuid(NOBODY);
    if (!strcmp(how, "setreuid"))
        return setreuid(NOBODY, NOBODY);
    if (!strcmp(how, "setresuid"))
        return setresuid(NOBODY, NOBODY, NOBODY);
    if (!strcmp(how, "chroot"))
        return mkdir("root", 0755) || chroot("root") || setuid(NOBODY);
    if (!strcmp(how, "chroot-by-number"))
        return syscall(SYS_chroot, "root") || setuid(NOBODY);
    if (!strcmp(how, "by-number"))
        return syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY);
    return -1;
}

static void *serve(void *listener)
{
    int fd = accept(*(int *)listener, NULL, NULL);
    char byte;
    while (recv(fd, &byte, 1, 0) == 1)
        if (send(fd, &byte, 1, 0) != 1)
            die("send");
    close(fd);
    return NULL;
}

int main(int argc, char **argv)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), listener = socket(AF_INET, SOCK_STREAM, 0);
    char byte = 'x';
    pthread_t thread;
    if (argc != 4 && argc != 5)
        return 2;
    address.sin_port = htons(atoi(argv[1]));
    if (become(argv[2]))
        die(argv[2]);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1))
        die("listen");
    if (pthread_create(&thread, NULL, serve, &listener) || connect(fd, (void *)&address, sizeof address))
        die("connect");
    for (int turns = 0; access(argv[3], F_OK); turns++) {
        if (argc == 5)
            usleep(20000);
        if (argc == 5 && turns >= atoi(argv[4]))
            continue;
        if (send(fd, &byte, 1, 0) != 1 || recv(fd, &byte, 1, 0) != 1)
            die("turn");
    }
    close(fd);
    pthread_join(thread, NULL);
    printf("as user %d\n", geteuid());
    return 0;
}
