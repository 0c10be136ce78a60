// Prints the server that libmemcached chooses for each key. Standard input has one key a line, in
// hexadecimal digits. Arguments: ketama or modulo, and HOST:PORT:WEIGHT of each server.

#include <stdio.h>
#include <string.h>

#include <libmemcached/memcached.h>

int main(int argc, char **argv)
{
	memcached_st *memcached = memcached_create(NULL);
	char line[1024];

	if (!strcmp(argv[1], "ketama"))
		memcached_behavior_set(memcached, MEMCACHED_BEHAVIOR_KETAMA_WEIGHTED, 1);
	for (int at = 2; at < argc; at++) {
		char host[64];
		int port, weight;

		if (sscanf(argv[at], "%63[^:]:%d:%d", host, &port, &weight) != 3)
			return 2;
		memcached_server_add_with_weight(memcached, host, port, weight);
	}
	while (fgets(line, sizeof(line), stdin)) {
		char key[512];
		size_t length = 0;

		for (char *digits = line; sscanf(digits, "%2hhx", &key[length]) == 1; digits += 2)
			length++;
		printf("%u\n", memcached_generate_hash(memcached, key, length));
	}
	memcached_free(memcached);
	return 0;
}
