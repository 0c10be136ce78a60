/* A server that sends much on many connections before its client reads any of it, so that the
 * ring of each lane grows as far as it may. At first the server sends only as much as does not
 * block.
 *
 *   budget server PORT COUNT
 *   budget client PORT COUNT GATE LAST */
#include "lane.h"

#define MUCH 200000
#define MOST 600

static int fds[MOST];
static char bytes[MUCH];

static struct sockaddr_in address_of(const char *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static void expect(char value)
{
    for (int i = 0; i < MUCH; i++)
        if (bytes[i] != (char)(value + i % 7)) {
            fprintf(stderr, "byte %d of connection %d is wrong\n", i, value);
            exit(3);
        }
}

static void fill(char value)
{
    for (int i = 0; i < MUCH; i++)
        bytes[i] = value + i % 7;
}

static void serve(const char *port, int count)
{
    static int done[MOST];
    struct sockaddr_in address = address_of(port);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, count))
        die("listen");
    printf("listening\n");
    fflush(stdout);
    for (int i = 0; i < count; i++)
        fds[i] = accept(listener, NULL, NULL);
    /* Make round trips until the client asks to stop. */
    char byte;
    do
        for (int i = 0; i < count; i++) {
            get(fds[i], &byte, 1);
            put(fds[i], &byte, 1);
        }
    while (byte != '!');
    for (int i = 0; i < count; i++) {
        fill(i);
        ssize_t n;
        while (done[i] < MUCH && (n = send(fds[i], bytes + done[i], MUCH - done[i], MSG_DONTWAIT | MSG_NOSIGNAL)) > 0)
            done[i] += n;
    }
    printf("sent\n");
    fflush(stdout);
    for (int i = 0; i < count; i++) {
        fill(i);
        put(fds[i], bytes + done[i], MUCH - done[i]);
    }
    printf("done\n");
    fflush(stdout);
    /* Wait until the client has closed its connections. */
    while (recv(fds[0], &byte, 1, 0) > 0)
        ;
}

static void ask(const char *port, int count, const char *gate, const char *last)
{
    struct sockaddr_in address = address_of(port);
    for (int i = 0; i < count; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fds[i], (void *)&address, sizeof address))
            die("connect");
    }
    for (int over = 0; !over;) {
        over = access(gate, F_OK) == 0;
        for (int i = 0; i < count; i++) {
            char byte = over ? '!' : '?';
            put(fds[i], &byte, 1);
            get(fds[i], &byte, 1);
        }
    }
    while (access(last, F_OK) != 0)
        pause_ms(5);
    for (int i = 0; i < count; i++) {
        get(fds[i], bytes, MUCH);
        expect(i);
    }
    printf("all of %d\n", count);
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 1;
    if (strcmp(argv[1], "server") == 0)
        serve(argv[2], atoi(argv[3]));
    else
        ask(argv[2], atoi(argv[3]), argv[4], argv[5]);
    return 0;
}
