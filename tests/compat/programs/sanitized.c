/* A program that is built with sanitizers. It has a child that is not sanitized, and executes
 * itself too. With "overflow", a receive gets a length that exceeds its buffer, which a
 * sanitizer must report. usage: sanitized PORT GATE [overflow] */
#include "questions.h"

static void *echo(void *arg)
{
    char bytes[64];
    ssize_t count;
    (void)arg;
    while ((count = read(theirs, bytes, sizeof bytes)) > 0)
        put(theirs, bytes, count);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    char bytes[64] = "sixty-four bytes, or fewer";
    if (argc < 3)
        return puts("a child of its own kind") < 0;
    listen_on(atoi(argv[1]));
    first_connection(argv[2]);
    pthread_create(&thread, NULL, echo, NULL);
    for (int i = 0; i < 100; i++) {
        ASK("write", write(ours, bytes, 20 + i % 20));
        get(ours, bytes, 20 + i % 20);
    }
    char command[4200];
    snprintf(command, sizeof command, "echo a child of another kind; %s", argv[0]);
    fflush(stdout);
    ASK("children", system(command));
    if (argc > 3) {
        volatile size_t room = 32;
        char *small = malloc(16);
        put(ours, bytes, 32);
        get(ours, small, room);
        printf("not reported: %c\n", *small);
        free(small);
    }
    shutdown(ours, SHUT_WR);
    pthread_join(thread, NULL);
    return 0;
}
