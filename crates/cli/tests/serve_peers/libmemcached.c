// A client with libmemcached. It writes or reads values, one by one and many in one call.
// Arguments: write or read; modulo or ketama; text or binary; a prefix of the keys; the number of
// values; HOST:PORT of each server.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <libmemcached/memcached.h>

#define SIZE 20000

// Fills in the value of a key. Some values need several segments.
static size_t value_of(int number, char *value)
{
	size_t length = (size_t)number * 137 % SIZE;

	for (size_t at = 0; at < length; at++)
		value[at] = (char)(number * 31 + at);
	return length;
}

static void check(memcached_return_t result, const char *what, memcached_st *memcached)
{
	if (result == MEMCACHED_SUCCESS || result == MEMCACHED_BUFFERED)
		return;
	fprintf(stderr, "%s: %s: %s\n", what, memcached_strerror(memcached, result),
		memcached_last_error_message(memcached));
	exit(1);
}

static void wrong(const char *what, const char *key)
{
	fprintf(stderr, "%s: %s\n", what, key);
	exit(1);
}

static void name(char *key, const char *prefix, int number)
{
	sprintf(key, "%s-%d", prefix, number);
}

static void write_all(memcached_st *memcached, const char *prefix, int count)
{
	char key[64], value[SIZE];

	for (int number = 0; number < count; number++) {
		size_t length = value_of(number, value);

		name(key, prefix, number);
		check(memcached_set(memcached, key, strlen(key), value, length, 0, 7), key, memcached);
	}
}

static void compare(const char *key, int number, const char *got, size_t length)
{
	char value[SIZE];

	if (length != value_of(number, value) || (length && memcmp(got, value, length)))
		wrong("another value", key);
}

static void read_all(memcached_st *memcached, const char *prefix, int count)
{
	char(*keys)[64] = calloc(count + 1, sizeof(*keys));
	const char **names = calloc(count + 1, sizeof(*names));
	size_t *lengths = calloc(count + 1, sizeof(*lengths));
	memcached_result_st *result;
	memcached_return_t status;
	int found = 0;

	for (int number = 0; number < count; number++) {
		uint32_t flags;
		size_t length;
		char *got;

		name(keys[number], prefix, number);
		names[number] = keys[number];
		lengths[number] = strlen(keys[number]);
		got = memcached_get(memcached, names[number], lengths[number], &length, &flags, &status);
		check(status, names[number], memcached);
		compare(names[number], number, got, length);
		free(got);
	}
	// The request includes a key that does not exist.
	name(keys[count], prefix, -1);
	names[count] = keys[count];
	lengths[count] = strlen(keys[count]);
	check(memcached_mget(memcached, names, lengths, count + 1), "mget", memcached);
	while ((result = memcached_fetch_result(memcached, NULL, &status))) {
		char key[64] = "";
		int number;

		memcpy(key, memcached_result_key_value(result), memcached_result_key_length(result));
		number = atoi(key + strlen(prefix) + 1);
		compare(key, number, memcached_result_value(result), memcached_result_length(result));
		found++;
		memcached_result_free(result);
	}
	if (found != count)
		wrong("not all values were found", prefix);
	free(keys);
	free(names);
	free(lengths);
}

int main(int argc, char **argv)
{
	memcached_st *memcached = memcached_create(NULL);

	// Setting this to 0 would also select another continuum.
	if (!strcmp(argv[2], "ketama"))
		memcached_behavior_set(memcached, MEMCACHED_BEHAVIOR_KETAMA_WEIGHTED, 1);
	memcached_behavior_set(memcached, MEMCACHED_BEHAVIOR_BINARY_PROTOCOL, !strcmp(argv[3], "binary"));
	for (int at = 6; at < argc; at++) {
		char host[64];
		int port;

		if (sscanf(argv[at], "%63[^:]:%d", host, &port) != 2)
			return 2;
		memcached_server_add(memcached, host, port);
	}
	if (!strcmp(argv[1], "write"))
		write_all(memcached, argv[4], atoi(argv[5]));
	else
		read_all(memcached, argv[4], atoi(argv[5]));
	memcached_free(memcached);
	return 0;
}
