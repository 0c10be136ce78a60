/* A static program that receives a connection as descriptor 3. It executes another program,
 * which serves. Its child serves after that has ended. */

#include "phases.h"

int main(void) {
    int over[2];
    char none;
    expect(pipe2(over, 0) == 0, "pipe");
    if (fork() == 0) {
        close(over[1]);
        expect(read(over[0], &none, 1) == 0, "the end of the program");
        serve(3, 'S');
        return 7;
    }
    close(over[0]);
    char *const arguments[] = {"serve_on", "3", NULL};
    execv("./serve_on", arguments);
    return 127;
}
