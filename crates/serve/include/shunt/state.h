// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The state of a service. service.h includes this file.
//
// Per connection: a struct of at most SHUNT_MAX_SESSION bytes, zeroed when the client connects. Only
// one half uses it at a time, so its members are ordinary variables.
//
//	struct session { __u64 sequence; };
//
//	struct session *session = shunt_session(verdict, struct session);
//
// Per service: the members of `struct shunt_state`, which both halves and all threads share.
//
//	struct name { __u8 bytes[32]; };
//	struct client { __u64 messages; };
//
//	struct shunt_state {
//		SHUNT_COUNTER(messages);
//		SHUNT_HISTOGRAM(lengths);
//		SHUNT_ARRAY(kinds, __u64, 16);
//		SHUNT_LRU_HASH(clients, struct name, struct client, 4096);
//	};
//
// Content stores (SHUNT_CONTENTS) are members too: see contents.h.
//
//	shunt_count(verdict, messages, 1);
//	client = shunt_entry(verdict, clients, &name);
//	if (client)
//		shunt_add(&client->messages, 1);
//
//	SHUNT_SERVICE(..., .state = sizeof(struct shunt_state));
//
// All functions take the verdict, because only callbacks with a verdict run exactly once for each
// message. `parse` has none: it is repeated while a message is incomplete.
//
// The state is one block of memory: the value of a BPF map, which user space maps. Each word of 64
// bits in it is read and changed atomically.

#ifndef SHUNT_STATE_H
#define SHUNT_STATE_H

// The most bytes of a connection's state.
#define SHUNT_MAX_SESSION 256
// The most bytes of an element of an array, or of a key and its value with 16 bytes more.
#define SHUNT_MAX_ELEMENT 512

#define SHUNT_WAYS 16
#define SHUNT_BUCKETS 64

// ---- declarations. src/service/layout.rs recognizes their types.

struct shunt_counter {
	__u64 value;
};

// Bucket `n` counts the values below 2^n that no lower bucket counts. The last has all the others.
struct shunt_histogram {
	__u64 sum;
	__u64 buckets[SHUNT_BUCKETS];
};

struct shunt_hash_head {
	__u64 entries;
	__u64 refused; // insertions for which there was no room
	__u64 evicted;
} __attribute__((aligned(32)));

struct shunt_lru_head {
	struct shunt_hash_head hash;
};

// The least power of two that is not below `size`, and from 8 on.
#define SHUNT_POWER(size) ((size) <= 8 ? 8ul : 1ul << (64 - __builtin_clzl((size) - 1ul)))
#define SHUNT_SETS(count) ((count) <= SHUNT_WAYS ? 1ul : SHUNT_POWER(count) / SHUNT_WAYS)

#define SHUNT_COUNTER(NAME) struct shunt_counter NAME
#define SHUNT_HISTOGRAM(NAME) struct shunt_histogram NAME

// An array of `COUNT` elements. Elements are structs of __u64, or one __u64.
#define SHUNT_ARRAY(NAME, TYPE, COUNT)                                                               \
	struct {                                                                                     \
		struct {                                                                             \
			TYPE value;                                                                  \
		} __attribute__((aligned(SHUNT_POWER(sizeof(TYPE))))) elements[COUNT];               \
	} NAME

#define SHUNT_HASH_OF(HEAD, NAME, KEY, VALUE, COUNT)                                                 \
	struct {                                                                                     \
		struct HEAD head;                                                                    \
		__u64 sets[SHUNT_SETS(COUNT)];                                                       \
		struct {                                                                             \
			__u64 use;                                                                   \
			__u64 used; /* the time of the last use, as the set counts it */             \
			KEY key;                                                                     \
			VALUE value;                                                                 \
		} __attribute__((aligned(SHUNT_POWER(16 + sizeof(KEY) + sizeof(VALUE)))))            \
		slots[SHUNT_SETS(COUNT) * SHUNT_WAYS];                                               \
		__u64 clocks[SHUNT_SETS(COUNT)];                                                     \
	} NAME

// A hash table with room for `COUNT` entries, rounded up to a power of two. Keys are structs of a
// multiple of 8 bytes without padding; values are structs of __u64. Entries whose set is full are
// refused, which begins before the table is full.
#define SHUNT_HASH(NAME, KEY, VALUE, COUNT) SHUNT_HASH_OF(shunt_hash_head, NAME, KEY, VALUE, COUNT)

// An LRU hash table: a new entry replaces the one of its set that was not used for the longest time.
#define SHUNT_LRU_HASH(NAME, KEY, VALUE, COUNT) SHUNT_HASH_OF(shunt_lru_head, NAME, KEY, VALUE, COUNT)

// ---- words

// Adds to a word, and returns the sum.
SHUNT_INLINE __u64 shunt_add(__u64 *word, __u64 more)
{
	return __sync_fetch_and_add(word, more) + more;
}

SHUNT_INLINE __u64 shunt_load(const __u64 *word)
{
	return *(const volatile __u64 *)word;
}

// Sets a word and returns its former value.
SHUNT_INLINE __u64 shunt_exchange(__u64 *word, __u64 value)
{
	return __sync_lock_test_and_set(word, value);
}

// Sets a word to `value` if it is `expected`. Returns true if it was.
SHUNT_INLINE int shunt_replace(__u64 *word, __u64 expected, __u64 value)
{
	return __sync_val_compare_and_swap(word, expected, value) == expected;
}

// ---- memory

#ifdef __bpf__
// The state, in pieces of SHUNT_MAX_ELEMENT bytes. All engines of a service share the inner map.
struct shunt_memory {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, SHUNT_MAX_ELEMENT);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct shunt_memory);
} shunt_memories SEC(".maps");

SHUNT_INLINE void *shunt_memory(const struct shunt_verdict *verdict)
{
	__u32 only = 0;

	return bpf_map_lookup_elem(&shunt_memories, &only);
}

// Returns the address of `size` bytes, a power of two, at a multiple of that.
SHUNT_INLINE void *shunt_piece(void *memory, __u64 offset, __u32 size)
{
	__u32 piece = offset / SHUNT_MAX_ELEMENT;
	__u8 *found = bpf_map_lookup_elem(memory, &piece);

	if (!found)
		return 0;
	// The compiler would add first and compare later, which the verifier does not accept.
	SHUNT_OPAQUE(found);
	return found + (offset & (SHUNT_MAX_ELEMENT - size));
}

#define shunt_session(VERDICT, TYPE)                                                                 \
	({                                                                                           \
		_Static_assert(sizeof(TYPE) <= SHUNT_MAX_SESSION, "the state of a connection");      \
		(TYPE *)((VERDICT) + 1);                                                             \
	})
#else
SHUNT_INLINE void *shunt_memory(const struct shunt_verdict *verdict)
{
	return verdict->memory;
}

SHUNT_INLINE void *shunt_piece(void *memory, __u64 offset, __u32 size)
{
	return (__u8 *)memory + offset;
}

// Returns the state of the connection.
#define shunt_session(VERDICT, TYPE)                                                                 \
	({                                                                                           \
		_Static_assert(sizeof(TYPE) <= SHUNT_MAX_SESSION, "the state of a connection");      \
		(TYPE *)(VERDICT)->session;                                                          \
	})
#endif

SHUNT_INLINE void *shunt_at(const struct shunt_verdict *verdict, __u64 offset, __u32 size)
{
	void *memory = shunt_memory(verdict);

	return memory ? shunt_piece(memory, offset, size) : 0;
}

SHUNT_FUNCTION __u64 shunt_add_at(const struct shunt_verdict *verdict, __u64 offset, __u64 more)
{
	__u64 *word = shunt_at(verdict, offset, sizeof(*word));

	return word ? shunt_add(word, more) : 0;
}

#define SHUNT_OFFSET(MEMBER) __builtin_offsetof(struct shunt_state, MEMBER)
#define SHUNT_MEMBER(MEMBER) ((struct shunt_state *)0)->MEMBER

// ---- counters, histograms and arrays

// Adds to a counter and returns the sum.
#define shunt_count(VERDICT, COUNTER, MORE) shunt_add_at(VERDICT, SHUNT_OFFSET(COUNTER.value), MORE)

// Adds a value to a histogram.
#define shunt_observe(VERDICT, HISTOGRAM, VALUE) shunt_observe_at(VERDICT, SHUNT_OFFSET(HISTOGRAM), VALUE)

// Returns the number of bits of a value without its leading zeros. BPF has no instruction for it.
SHUNT_INLINE __u32 shunt_bits(__u64 value)
{
	__u32 bits = 0;

#pragma GCC unroll 6
	for (__u32 step = 32; step; step /= 2) {
		if (value >> step) {
			value >>= step;
			bits += step;
		}
	}
	return bits + (value != 0);
}

SHUNT_FUNCTION void shunt_observe_at(const struct shunt_verdict *verdict, __u64 histogram, __u64 value)
{
	__u32 bucket = shunt_bits(value);

	if (bucket >= SHUNT_BUCKETS)
		bucket = SHUNT_BUCKETS - 1;
	shunt_add_at(verdict, histogram + __builtin_offsetof(struct shunt_histogram, sum), value);
	shunt_add_at(verdict, histogram + __builtin_offsetof(struct shunt_histogram, buckets) + 8 * bucket, 1);
}

// Returns the element of this index, or null if there is none.
#define shunt_element(VERDICT, ARRAY, INDEX)                                                         \
	((__typeof__(SHUNT_MEMBER(ARRAY).elements[0].value) *)shunt_element_at(                      \
		VERDICT, SHUNT_OFFSET(ARRAY), sizeof(SHUNT_MEMBER(ARRAY).elements[0]),               \
		sizeof(SHUNT_MEMBER(ARRAY).elements) / sizeof(SHUNT_MEMBER(ARRAY).elements[0]), INDEX))

SHUNT_INLINE void *shunt_element_at(const struct shunt_verdict *verdict, __u64 array, __u32 size, __u64 count,
				    __u64 index)
{
	return index < count ? shunt_at(verdict, array + index * size, size) : 0;
}

#include "table.h"
#include "contents.h"

#endif
