// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Content stores in the state of a service: bytes by keys, from which both halves answer. state.h
// includes this file.
//
//	struct name { __u8 bytes[32]; };
//
//	struct shunt_state {
//		SHUNT_CONTENTS(pages, struct name, 1024, 4096);
//	};
//
//	if (shunt_answer_content(verdict, pages, &name))
//		shunt_forward_to(verdict, 0); // there is none
//
//	shunt_put_content(verdict, pages, &name, reply, 0, shunt_available(reply));
//
// A store is an LRU hash table (table.h). Each slot has room for one content, so the memory of a store
// is fixed. A content never changes while it can be found:
//
//	put      claims a slot, copies the bytes, and then exchanges the slot of the old content, if
//	         there is one, for the new one: one exchange of the set's word
//	answer   pins the slot. The engine copies the content, and then unpins it. A slot whose content
//	         was replaced or deleted meanwhile becomes free with its last pin
//
// So an answer is one content, whole, whatever other threads do. A replacement needs a second slot for
// a moment. If all slots of its set are in use, it evicts another entry, or its own old one.

#ifndef SHUNT_CONTENTS_H
#define SHUNT_CONTENTS_H

// The most bytes of a content, and of all contents of a store.
#define SHUNT_MAX_CONTENT (1 << 20)
#define SHUNT_MAX_CONTENTS (256ul << 20)

// What a slot has in place of a value.
struct shunt_content {
	__u64 length;
};

#define SHUNT_ROOM(BYTES) (((BYTES) + SHUNT_MAX_ELEMENT - 1ul) / SHUNT_MAX_ELEMENT * SHUNT_MAX_ELEMENT)

// A content store for `COUNT` contents of at most `BYTES` bytes. `COUNT` is rounded up to a power of
// two, from 16 on, and `BYTES` to a multiple of 512.
#define SHUNT_CONTENTS(NAME, KEY, BYTES, COUNT)                                                      \
	struct {                                                                                     \
		_Static_assert((BYTES) > 0 && (BYTES) <= SHUNT_MAX_CONTENT,                          \
			       "a content has at most SHUNT_MAX_CONTENT bytes");                     \
		_Static_assert(SHUNT_ROOM(BYTES) * SHUNT_SETS(COUNT) * SHUNT_WAYS <= SHUNT_MAX_CONTENTS, \
			       "a content store has at most SHUNT_MAX_CONTENTS bytes");              \
		struct shunt_lru_head head;                                                          \
		__u64 sets[SHUNT_SETS(COUNT)];                                                       \
		struct {                                                                             \
			__u64 use;                                                                   \
			__u64 used;                                                                  \
			KEY key;                                                                     \
			struct shunt_content value;                                                  \
		} __attribute__((aligned(SHUNT_POWER(24 + sizeof(KEY)))))                            \
		slots[SHUNT_SETS(COUNT) * SHUNT_WAYS];                                               \
		__u64 clocks[SHUNT_SETS(COUNT)];                                                     \
		struct {                                                                             \
			__u8 bytes[SHUNT_ROOM(BYTES)];                                               \
		} __attribute__((aligned(SHUNT_MAX_ELEMENT)))                                        \
		contents[SHUNT_SETS(COUNT) * SHUNT_WAYS];                                            \
	} NAME

#define SHUNT_CONTENTS_TABLE(TABLE)                                                                  \
	{                                                                                            \
		SHUNT_TABLE_MEMBERS(TABLE), .contents = SHUNT_OFFSET(TABLE.contents),                \
		.room = sizeof(SHUNT_MEMBER(TABLE).contents[0]),                                     \
	}

// Answers with the bytes written so far, and then the content of a key. Returns -1 if there is none.
// Only `decide` can call it. The kernel sends up to 2048 bytes, and leaves longer answers to user space.
#define shunt_answer_content(VERDICT, TABLE, KEY)                                                    \
	({                                                                                           \
		static const struct shunt_table shunt_contents_table = SHUNT_CONTENTS_TABLE(TABLE);  \
		const struct shunt_content *shunt_found_content = SHUNT_LOOKUP(VERDICT, TABLE, KEY, 0); \
		shunt_found_content ?                                                                \
			shunt_answer_found(VERDICT, &shunt_contents_table, shunt_found_content) : -1; \
	})

// Stores `length` bytes of a message or a reply, from `offset` on, as the content of a key. Returns -1,
// and counts that as refused, if they are longer than the store allows or if there is no room.
#define shunt_put_content(VERDICT, TABLE, KEY, SOCKET, OFFSET, LENGTH)                               \
	({                                                                                           \
		static const struct shunt_table shunt_contents_table = SHUNT_CONTENTS_TABLE(TABLE);  \
		SHUNT_SET_KEY(VERDICT, TABLE, KEY);                                                  \
		shunt_put_bytes(VERDICT, &shunt_contents_table, SOCKET, OFFSET, LENGTH);             \
	})

SHUNT_INLINE int shunt_answer_found(struct shunt_verdict *verdict, const struct shunt_table *table,
				    const struct shunt_content *content)
{
	__u64 offset = verdict->pins[(verdict->pinned - 1) & (SHUNT_PINS - 1)];

	verdict->action = SHUNT_STORED;
	verdict->number = table->contents + (offset - table->slots) / (8ull * table->slot) * table->room;
	verdict->key_length = content->length;
	return 0;
}

// Bytes on their way into a content, for the steps of shunt_loop.
struct shunt_storing {
	struct shunt_socket socket;
	void *memory;
	__u64 to; // the offset of the content
	__u32 from; // the offset of the bytes in the socket
	__u32 length;
};

static long shunt_store_step(__u64 index, void *state)
{
	struct shunt_storing *storing = state;
	__u64 done = index * SHUNT_MAX_ELEMENT;
	__u32 length = storing->length - done;
	void *to;

	if (done >= storing->length)
		return 1;
	to = shunt_piece(storing->memory, storing->to + done, SHUNT_MAX_ELEMENT);
	if (!to)
		return 1;
	if (length > SHUNT_MAX_ELEMENT)
		length = SHUNT_MAX_ELEMENT;
	SHUNT_OPAQUE(length);
	if (length < 1 || length > SHUNT_MAX_ELEMENT)
		return 1;
	shunt_copy(&storing->socket, storing->from + done, to, length);
	return 0;
}

// Makes the claimed slot the one of the key, instead of the one that the key has. Returns false if
// others have changed the set too often.
SHUNT_INLINE int shunt_exchange_slot(struct shunt_seek *seek, struct shunt_hash_head *head, __u64 *use, __u64 way)
{
	__u64 bit = 1ull << (way & 63);
	struct shunt_slot slot;

	for (__u32 attempt = 0; attempt < SHUNT_ATTEMPTS; attempt++) {
		__u64 *old = 0, gone = 0;

		if (shunt_find_slot(seek) && shunt_slot_of(seek, seek->way, &slot)) {
			old = shunt_word(&slot, SHUNT_USE);
			gone = 1ull << (seek->way & 63);
		}
		shunt_add(use, SHUNT_LIVE + 1 - SHUNT_CLAIMED);
		if (shunt_replace(seek->set, seek->seen, ((seek->seen & ~gone) | bit) + (1ull << SHUNT_WAYS))) {
			if (old) {
				shunt_add(old, SHUNT_DYING - SHUNT_LIVE);
				shunt_unpin(old);
			} else {
				shunt_add(&head->entries, 1);
			}
			shunt_unpin(use);
			return 1;
		}
		shunt_add(use, SHUNT_CLAIMED - SHUNT_LIVE - 1);
		if (old)
			shunt_unpin(old);
	}
	return 0;
}

// Stores bytes for the key in the verdict.
SHUNT_FUNCTION int shunt_put_bytes(struct shunt_verdict *verdict, const struct shunt_table *table,
				   const struct shunt_socket *socket, __u32 offset, __u64 length)
{
	__u64 number = shunt_hash_key(verdict->key_words) & (table->count - 1), way, *use, *clock;
	struct shunt_storing storing = { .socket = *socket, .from = socket->begin + socket->position + offset };
	struct shunt_hash_head *head;
	struct shunt_seek seek;
	struct shunt_slot slot;

	if (socket->position + (__u64)offset + length > socket->length)
		return -1;
	storing.memory = shunt_memory(verdict);
	if (!storing.memory)
		return -1;
	head = shunt_piece(storing.memory, table->head, sizeof(*head));
	clock = shunt_piece(storing.memory, table->clocks + 8 * number, 8);
	seek.memory = storing.memory;
	seek.set = shunt_piece(storing.memory, table->sets + 8 * number, 8);
	seek.words = table->key;
	seek.size = 8ull * table->slot;
	seek.slots = table->slots + number * SHUNT_WAYS * seek.size;
	seek.key = verdict->key_words;
	if (!head || !clock || !seek.set)
		return -1;
	if (length > table->room || !shunt_claim(&seek, head, 1)) {
		shunt_add(&head->refused, 1);
		return -1;
	}
	way = seek.way;
	if (!shunt_slot_of(&seek, way, &slot))
		return -1;
	use = shunt_word(&slot, SHUNT_USE);
	for (__u32 at = 0; at < SHUNT_KEY_WORDS; at++)
		if (at < table->key)
			*(volatile __u64 *)shunt_word(&slot, SHUNT_KEY_AT + at) = seek.key[at];
	*(volatile __u64 *)shunt_word(&slot, table->value_at) = length;
	*(volatile __u64 *)shunt_word(&slot, SHUNT_USED) = shunt_add(clock, 1);
	storing.to = table->contents + (number * SHUNT_WAYS + way) * table->room;
	storing.length = length;
	shunt_loop(SHUNT_MAX_CONTENT / SHUNT_MAX_ELEMENT, shunt_store_step, &storing);
	if (shunt_exchange_slot(&seek, head, use, way))
		return 0;
	shunt_add(use, -SHUNT_CLAIMED);
	shunt_add(&head->refused, 1);
	return -1;
}

#endif
