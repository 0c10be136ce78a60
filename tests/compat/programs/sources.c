/* Uses sendfile with every kind of descriptor and offset. Prints the result, errno and the
 * offsets afterwards. The bytes must lie between those that were written before and after.
 * usage: sources PORT GATE */
#include "questions.h"
#include <sys/eventfd.h>

#define COUNT 100

static int regular(int flags)
{
    int fd = open("regular", O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (write(fd, "0123456789abcdef", 16) != 16)
        die("regular");
    close(fd);
    return open("regular", flags);
}

static int make_regular(void) { return regular(O_RDONLY); }
static int make_write_only(void) { return regular(O_WRONLY); }
static int make_path(void) { return regular(O_PATH); }
static int make_directory(void) { return open(".", O_RDONLY); }
static int make_nothing(void) { return 987; }
static int make_eventfd(void) { return eventfd(7, EFD_NONBLOCK); }
static int make_epoll(void) { return epoll_create1(0); }

static int make_empty(void)
{
    return open("empty", O_RDWR | O_CREAT | O_TRUNC, 0600);
}

static int make_memfd(void)
{
    int fd = memfd_create("memory", 0);
    if (write(fd, "in memory", 9) != 9 || lseek(fd, 0, SEEK_SET))
        die("memfd");
    return fd;
}

static int make_pipe(void)
{
    int ends[2];
    if (pipe(ends) || write(ends[1], "in a pipe", 9) != 9)
        die("pipe");
    close(ends[1]);
    return ends[0];
}

static int make_socket(void)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) || write(ends[1], "in a socket", 11) != 11)
        die("socketpair");
    close(ends[1]);
    return ends[0];
}

static int make_connection(void) { return dup(theirs); }

static struct source {
    const char *name;
    int (*make)(void);
} sources[] = {
    {"regular", make_regular},   {"empty", make_empty},         {"write only", make_write_only}, {"path", make_path},
    {"directory", make_directory}, {"nothing", make_nothing},   {"eventfd", make_eventfd},       {"epoll", make_epoll},
    {"memfd", make_memfd},       {"pipe", make_pipe},           {"socket", make_socket},         {"connection", make_connection},
    {"/dev/null", NULL},         {"/dev/zero", NULL},           {"/dev/full", NULL},             {"/proc/version", NULL},
    {"/proc/self/status", NULL}, {"/proc/self/mem", NULL},      {"/sys/kernel/mm/transparent_hugepage/enabled", NULL},
};

static off_t offsets[] = {0, 5, 16, 100, -1, 1LL << 62, INT64_MAX};

/* `from` is an index in `offsets`, -1 for the file's own offset, or -2 for a pointer that cannot
 * be read. */
static void try_source(struct source *source, int from)
{
    char text[200], bytes[COUNT + 4] = {0};
    next_connection();
    int file = source->make ? source->make() : open(source->name, O_RDONLY);
    off_t offset = from >= 0 ? offsets[from] : 0;
    put(ours, "<<", 2);
    snprintf(text, sizeof text, "%s, %s %lld", source->name, from == -1 ? "own" : from == -2 ? "bad" : "at", (long long)offset);
    errno = UNTOUCHED;
    long sent = sendfile(ours, file, from == -1 ? NULL : from == -2 ? (off_t *)8 : &offset, COUNT);
    answer(text, sent, errno);
    put(ours, ">>", 2);
    get(theirs, bytes, (sent > 0 ? sent : 0) + 4);
    for (int i = 0; i < COUNT + 4; i++)
        bytes[i] = bytes[i] >= ' ' ? bytes[i] : '.';
    printf("%s: offset %lld, position %lld, \"%.*s\"\n", text, (long long)offset, (long long)lseek(file, 0, SEEK_CUR),
           (int)(sent > 0 ? sent : 0) + 4, bytes);
    close(file);
}

int main(int argc, char **argv)
{
    listen_on(atoi(argv[1]));
    first_connection(argv[2]);
    for (size_t i = 0; i < LEN(sources); i++)
        for (int from = -2; from < (int)LEN(offsets); from++)
            try_source(&sources[i], from);
    next_connection();
    int file = make_regular();
    fcntl(ours, F_SETFL, O_APPEND);
    ASK("to one that appends", sendfile(ours, file, NULL, COUNT));
    fcntl(ours, F_SETFL, 0);
    ASK("to one that does no longer", sendfile(ours, file, NULL, COUNT));
    ASK("of nothing", sendfile(ours, file, NULL, 0));
    show_left("at the end");
    return argc != 3;
}
