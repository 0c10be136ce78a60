/* C++. A program that loads a library whose constructor throws an exception, and catches it. Built as library with LIBRARY.
 * throws LIBRARY */
#include <dlfcn.h>
#include <stdexcept>
#include <stdio.h>

#ifdef LIBRARY
static struct thrower {
    thrower() {
        throw std::runtime_error("a constructor");
    }
} thrower;
#else
int main(int, char **arguments) {
    /* dlfcn.h says that dlopen throws nothing. */
    void *(*volatile load)(const char *, int) = (void *(*)(const char *, int))(void *)dlopen;
    try {
        load(arguments[1], RTLD_NOW);
    } catch (const std::exception &thrown) {
        printf("caught what %s threw\n", thrown.what());
    }
    printf("%d\n", load("libm.so.6", RTLD_NOW) != 0);
}
#endif
