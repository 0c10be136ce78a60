/* Prints its environment and the mount points, and with an argument waits afterwards. The rest
 * of a line of mountinfo differs between containers. */

#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

int main(int count, char **arguments) {
    (void)arguments;
    for (char **variable = environ; *variable; variable++)
        /* Each container has another host name. */
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
