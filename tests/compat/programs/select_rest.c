/* Asks select for bytes that are there and for bytes that are not, on a connection with itself, and
 * prints what is left of the timeout: a C library may keep that from the program. Turns FIOASYNC off,
 * which changes nothing. */

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <unistd.h>

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void ask(int fd, long micros) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    struct timeval left = {0, micros};
    int count = select(fd + 1, &set, NULL, NULL, &left);
    printf("%d, and the timeout is %s\n", count, left.tv_usec == micros ? "as before" : "less");
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0), off = 0;
    if (bind(listener, (void *)&address, len) || listen(listener, 1) ||
        getsockname(listener, (void *)&address, &len) || connect(client, (void *)&address, len))
        fail("set-up");
    int server = accept(listener, NULL, NULL);
    if (ioctl(client, FIOASYNC, &off))
        fail("FIOASYNC");
    char byte = 'x';
    /* The connection is offered after a few operations. */
    for (int round = 0; round < 2000; round++) {
        if (write(client, &byte, 1) != 1 || read(server, &byte, 1) != 1 || write(server, &byte, 1) != 1 ||
            read(client, &byte, 1) != 1)
            fail("an exchange");
    }
    ask(client, 50000);
    if (write(server, &byte, 1) != 1)
        fail("write");
    usleep(1000);
    ask(client, 900000);
    return 0;
}
