/* Prints its environment and where what is mounted, and with an argument waits after that. The places only: the rest of a line of
 * mountinfo differs from one container to the next. */

#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

int main(int count, char **arguments) {
    (void)arguments;
    for (char **variable = environ; *variable; variable++)
        /* Each container has a name of its own. */
        if (strncmp(*variable, "HOSTNAME=", 9) != 0)
            puts(*variable);
    FILE *mounts = fopen("/proc/self/mountinfo", "r");
    char line[4096], place[1024];
    while (mounts && fgets(line, sizeof line, mounts))
        if (sscanf(line, "%*s %*s %*s %*s %1023s", place) == 1)
            puts(place);
    fflush(stdout);
    while (count > 1)
        pause();
    return 0;
}
