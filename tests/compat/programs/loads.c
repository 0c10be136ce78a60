/* A program that loads code while it has a connection, and then writes and reads alternately by
 * itself and by that code.
 *
 *   loads server PORT
 *   loads client PORT WAY LIBRARY GATE1 GATE2
 *
 * The server accepts two connections. It echoes "w", checks that digits arrive in their order,
 * and answers "e" with the result. The client makes exchanges until GATE1 exists, loads the
 * code, and writes alternately. It then does that on a second connection until GATE2 exists. WAY
 * is deep, lazy, apart, usual, mapped, writable, grown (an executable mapping of a file grows over
 * the code), handle (libc's functions, which dlsym finds in LIBRARY) or version (which dlvsym
 * finds). */
#include "bypass.h"

typedef long by_number(long number, const long *arguments);

static ssize_t (*theirs_write)(int, const void *, size_t);
static ssize_t (*theirs_read)(int, void *, size_t);
static by_number *code;

static ssize_t write_by_code(int fd, const void *from, size_t len) {
    long arguments[6] = {fd, (long)from, len};
    return code(SYS_write, arguments);
}

static ssize_t read_by_code(int fd, void *to, size_t len) {
    long arguments[6] = {fd, (long)to, len};
    return code(SYS_read, arguments);
}

/* mov rax, rdi; mov rdi, [rsi]; mov rdx, [rsi+16]; mov r10, [rsi+24]; mov r8, [rsi+32]; mov r9,
 * [rsi+40]; mov rsi, [rsi+8]; syscall; ret */
static const unsigned char CODE[] = {0x48, 0x89, 0xf8, 0x48, 0x8b, 0x3e, 0x48, 0x8b, 0x56, 0x10, 0x4c, 0x8b, 0x56, 0x18, 0x4c,
                                     0x8b, 0x46, 0x20, 0x4c, 0x8b, 0x4e, 0x28, 0x48, 0x8b, 0x76, 0x08, 0x0f, 0x05, 0xc3};

static void map(int stays_writable) {
    int first = PROT_READ | PROT_WRITE | (stays_writable ? PROT_EXEC : 0);
    void *page = mmap(0, 4096, first, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) exit(6);
    memcpy(page, CODE, sizeof CODE);
    if (!stays_writable && mprotect(page, 4096, PROT_READ | PROT_EXEC)) exit(6);
    code = (by_number *)page;
    theirs_write = write_by_code;
    theirs_read = read_by_code;
}

static void *first_page;

/* Maps the first page of a file that has the code in its second. */
static void map_first_page(void) {
    int file = memfd_create("code", MFD_CLOEXEC);
    if (ftruncate(file, 8192) || pwrite(file, CODE, sizeof CODE, 4096) != sizeof CODE) exit(6);
    first_page = mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
    if (first_page == MAP_FAILED) exit(6);
    close(file);
}

static void grow(void) {
    char *pages = mremap(first_page, 4096, 8192, MREMAP_MAYMOVE);
    if (pages == MAP_FAILED) exit(6);
    code = (by_number *)(pages + 4096);
    theirs_write = write_by_code;
    theirs_read = read_by_code;
}

/* Looks up libc's functions through the dynamic linker. */
static void look_up(const char *way, const char *library) {
#ifdef __x86_64__
    const char *version = "GLIBC_2.2.5";
#else
    const char *version = "GLIBC_2.17";
#endif
    void *handle = dlopen(library, RTLD_NOW);
    int by_version = !strcmp(way, "version");
    theirs_write = by_version ? dlvsym(RTLD_DEFAULT, "write", version) : dlsym(handle, "write");
    theirs_read = by_version ? dlvsym(RTLD_DEFAULT, "read", version) : dlsym(handle, "read");
    /* Each look-up must find the same function. */
    if (!handle || theirs_write != dlsym(RTLD_DEFAULT, "write") || theirs_read != dlsym(RTLD_NEXT, "read")) exit(10);
    dlerror();
    if (dlsym(handle, "no_such_function") || !dlerror() || dlerror()) exit(11);
}

static void load(const char *way, const char *library) {
    if (!strcmp(way, "handle") || !strcmp(way, "version")) return look_up(way, library);
    if (!strcmp(way, "grown")) return grow();
    if (!strcmp(way, "mapped") || !strcmp(way, "writable")) return map(!strcmp(way, "writable"));
    void *handle;
    if (!strcmp(way, "apart")) handle = dlmopen(LM_ID_NEWLM, library, RTLD_NOW);
    else if (!strcmp(way, "deep")) handle = dlopen(library, RTLD_NOW | RTLD_DEEPBIND);
    else if (!strcmp(way, "lazy")) handle = dlopen(library, RTLD_LAZY | RTLD_DEEPBIND);
    else handle = dlopen(library, RTLD_NOW);
    if (!handle) {
        fprintf(stderr, "%s\n", dlerror());
        exit(6);
    }
    theirs_write = dlsym(handle, "plugin_write");
    theirs_read = dlsym(handle, "plugin_read");
}

static void serve(int fd) {
    char got[256], in_order = 'y';
    int next = 0;
    for (ssize_t count; (count = read(fd, got, sizeof got)) > 0;)
        for (ssize_t index = 0; index < count; index++) {
            if (got[index] == 'w') put(fd, "w", 1);
            else if (got[index] == 'e') put(fd, &in_order, 1);
            else if (got[index] != '0' + next++ % 10) in_order = 'n';
        }
    close(fd);
}

static void write_by_turns(int fd, int turn, const char *one) {
    if ((turn / 3 % 2 ? write(fd, one, 1) : theirs_write(fd, one, 1)) != 1) exit(7);
}

static void converse(int fd, const char *gate) {
    char one = 0;
    for (int turn = 0; access(gate, F_OK); turn++) {
        if (!theirs_write) put(fd, "w", 1);
        else write_by_turns(fd, turn, "w");
        if (!theirs_read || turn / 5 % 2) get(fd, &one, 1);
        else if (theirs_read(fd, &one, 1) != 1) exit(8);
        if (one != 'w') exit(9);
    }
}

static char is_in_order(int fd) {
    char verdict = 0;
    for (int turn = 0; turn < 1000; turn++) {
        char digit = '0' + turn % 10;
        write_by_turns(fd, turn, &digit);
    }
    put(fd, "e", 1);
    get(fd, &verdict, 1);
    return verdict;
}

int main(int count, char **arguments) {
    int port = atoi(arguments[2]);
    if (!strcmp(arguments[1], "server")) {
        int listener = listen_at(port);
        for (int connection = 0; connection < 2; connection++) serve(accept(listener, 0, 0));
        return 0;
    }
    if (!strcmp(arguments[3], "grown")) map_first_page();
    for (int connection = 0; connection < 2; connection++) {
        int fd = connect_to(port);
        converse(fd, arguments[5 + connection]);
        if (!connection) load(arguments[3], arguments[4]);
        printf("%c\n", is_in_order(fd));
        close(fd);
    }
    return 0;
}
