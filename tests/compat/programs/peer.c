/* The client of a test in phases: peer PORT DIR PHASES
 *
 * Sends frames of growing and shrinking length, each after the answer to the previous one, and
 * checks every byte of the answers. A phase ends when DIR/gate.N exists, after 40 frames at least.
 * For each phase it prints who answered, in order of their first answer. At the end it prints how
 * the connection ended. */

#include "phases.h"

static int connect_to(int port) {
    int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    expect(connect(connection, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    return connection;
}

/* Sends a frame and checks the answer. Returns the answering process's letter, 0 at the end of
 * the stream, or -1 for an error. */
static int ask(int connection, uint32_t number, int last) {
    struct {
        struct frame head;
        char body[MOST];
    } question, answer;
    memset(&question.head, 0, sizeof question.head);
    question.head.number = number;
    question.head.length = number * 37 % MOST;
    question.head.last = last;
    for (size_t at = 0; at < question.head.length; at++)
        question.body[at] = pattern(number, at);
    if (write_all(connection, &question, sizeof question.head + question.head.length) < 0)
        return -1;
    int got = read_all(connection, &answer, sizeof answer.head);
    if (got <= 0)
        return got;
    expect(answer.head.number == number && answer.head.length == question.head.length, "the answer to the question");
    if (answer.head.length > 0)
        expect(read_all(connection, answer.body, answer.head.length) > 0, "the rest of an answer");
    expect(memcmp(question.body, answer.body, answer.head.length) == 0, "the bytes that were sent");
    return answer.head.who;
}

static int how_it_ended(ssize_t result) {
    printf("then %s\n", result == 0 ? "end of file" : result > 0 ? "bytes" : strerrorname_np(errno));
    return 0;
}

int main(int argc, char **argv) {
    expect(argc == 4, "usage: peer PORT DIR PHASES");
    signal(SIGPIPE, SIG_IGN);
    int connection = connect_to(atoi(argv[1]));
    uint32_t number = 0;
    for (int phase = 0; phase < atoi(argv[3]); phase++) {
        char gate[4096], names[64] = "";
        snprintf(gate, sizeof gate, "%s/gate.%d", argv[2], phase);
        for (int frames = 0, last = 0; !last; frames++) {
            last = frames >= 40 && frames % 8 == 0 && access(gate, F_OK) == 0;
            int who = ask(connection, number++, last);
            if (who <= 0) {
                printf("phase %d:%s ", phase, names);
                return how_it_ended(who);
            }
            char name[] = {' ', (char)who, 0};
            if (strstr(names, name) == NULL && strlen(names) + 3 < sizeof names)
                strcat(names, name);
        }
        printf("phase %d:%s\n", phase, names);
        fflush(stdout);
    }
    char none;
    return how_it_ended(read(connection, &none, 1));
}
