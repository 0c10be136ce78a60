/* One call on more bytes than the kernel moves in one call: it cuts the sum of a list of buffers
 * at MAX_RW_COUNT. The list contains one small area many times. usage: large PORT GATE */
#include "questions.h"

#define AREA (4 << 20)
#define PIECES 768 /* 3 GiB */

static struct iovec *list_of(char *area)
{
    struct iovec *list = calloc(PIECES, sizeof *list);
    for (int i = 0; i < PIECES; i++)
        list[i] = (struct iovec){area, AREA};
    return list;
}

/* The first message is cut, but counts as complete, so the second follows. */
static void *send_them(void *list)
{
    struct iovec last = {"!", 1};
    struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = list, .msg_iovlen = PIECES}},
                                  {.msg_hdr = {.msg_iov = &last, .msg_iovlen = 1}}};
    static char told[200];
    int sent = sendmmsg(ours, messages, 2, 0);
    snprintf(told, sizeof told, "sendmmsg: %d messages of %u and %u", sent, messages[0].msg_len, messages[1].msg_len);
    return told;
}

int main(int argc, char **argv)
{
    listen_on(atoi(argv[1]));
    first_connection(argv[2]);
    char *area = malloc(AREA);
    struct iovec *list = list_of(calloc(1, AREA));
    pthread_t sender;
    void *told;
    long long all = 0;
    char last = 0;
    pthread_create(&sender, NULL, send_them, list);
    /* The byte of the second message ends the loop. */
    while (last != '!') {
        ssize_t count = recv(theirs, area, AREA, 0);
        if (count <= 0)
            die("recv");
        all += count;
        last = area[count - 1];
    }
    pthread_join(sender, &told);
    ASK("one more", recv(theirs, area, AREA, MSG_DONTWAIT));
    printf("%s, and %lld have come\n", (char *)told, all);
    return argc != 3;
}
