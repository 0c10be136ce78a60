/* A server of several processes that accept from one socket: accept PORT PROCESSES.
 *
 * Each process serves one connection at a time until its end. For a line "NAME COUNT", the answer is
 * "NAME LOCAL REMOTE" with the addresses that the server sees, followed by the COUNT bytes after the
 * line. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void address(char *text, size_t size, int (*ask)(int, struct sockaddr *, socklen_t *), int fd) {
    struct sockaddr_in name;
    socklen_t length = sizeof name;
    char host[INET_ADDRSTRLEN];
    if (ask(fd, (struct sockaddr *)&name, &length) != 0) exit(3);
    inet_ntop(AF_INET, &name.sin_addr, host, sizeof host);
    snprintf(text, size, "%s:%d", host, ntohs(name.sin_port));
}

static void serve(int fd) {
    FILE *in = fdopen(fd, "r"), *out = fdopen(dup(fd), "w");
    char name[100], local[40], remote[40], bytes[4096];
    size_t count;
    while (fscanf(in, "%99s %zu", name, &count) == 2 && fgetc(in) == '\n') {
        address(local, sizeof local, getsockname, fd);
        address(remote, sizeof remote, getpeername, fd);
        fprintf(out, "%s %s %s\n", name, local, remote);
        while (count > 0) {
            size_t part = fread(bytes, 1, count < sizeof bytes ? count : sizeof bytes, in);
            if (part == 0 || fwrite(bytes, 1, part, out) != part) goto end;
            count -= part;
        }
        if (fflush(out) != 0) goto end;
    }
end:
    fclose(in);
    fclose(out);
}

int main(int argc, char **argv) {
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(argc > 2 ? atoi(argv[1]) : 0)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    signal(SIGPIPE, SIG_IGN);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (argc < 3 || bind(listener, (struct sockaddr *)&any, sizeof any) != 0 || listen(listener, 1024) != 0) return 2;
    for (int process = 1; process < atoi(argv[2]); process++)
        if (fork() == 0) break;
    puts("listening");
    fflush(stdout);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd >= 0) serve(fd);
    }
}
