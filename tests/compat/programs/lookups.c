/* A program that looks up the functions with which it serves: lookups SCENARIO PORT */

#include "phases.h"

#include <dlfcn.h>

typedef ssize_t receiver(int, void *, size_t, int);
typedef ssize_t sender(int, const void *, size_t, int);

static receiver *receive;
static sender *send_by;

/* Serves as serve() does, with the functions that were found. */
static void serve_by(int connection, char who) {
    struct {
        struct frame head;
        char body[MOST];
    } message;
    do {
        expect(receive(connection, &message.head, sizeof message.head, MSG_WAITALL) == sizeof message.head, "a head");
        if (message.head.length > 0)
            expect(receive(connection, message.body, message.head.length, MSG_WAITALL) == message.head.length, "a body");
        message.head.who = who;
        size_t length = sizeof message.head + message.head.length;
        expect(send_by(connection, &message, length, 0) == (ssize_t)length, "an answer");
    } while (!message.head.last);
}

static void find_in(void *handle) {
    receive = (receiver *)dlsym(handle, "recv");
    send_by = (sender *)dlsym(handle, "send");
    expect(receive != NULL && send_by != NULL, "the functions");
}

static void looked_up(int connection) {
    find_in(RTLD_DEFAULT);
    serve_by(connection, 'D');
    find_in(RTLD_NEXT);
    serve_by(connection, 'N');
    find_in(dlopen(NULL, RTLD_LAZY));
    serve_by(connection, 'M');
}

static const struct scenario scenarios[] = {
    {"looked_up", looked_up},
};

int main(int argc, char **argv) {
    return RUN(argc, argv, scenarios);
}
