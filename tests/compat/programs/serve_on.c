/* A program that receives a connection as a descriptor: serve_on DESCRIPTOR */

#include "phases.h"

int main(int argc, char **argv) {
    expect(argc == 2, "usage: serve_on DESCRIPTOR");
    serve(atoi(argv[1]), 'X');
    return 7;
}
