// Makes Go link a program with libc.
package main

// #include <unistd.h>
// static int process(void) { return getpid(); }
import "C"

var process = C.process()
