// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The hash tables in the state of a service. state.h declares them, and includes this file.
//
// A table has sets of 16 slots, and a key belongs to one set. The word `set` of a set has a bit for
// each slot that lookups see, and counts the insertions. The word `use` of a slot has its state and,
// in the lower bits, its pins.
//
//	         claim              publish             delete
//	 free ---------> claimed -------------> live ------------> dying
//	  ^                 ^                    |                   |
//	  |                 +--------------------+                   |
//	  |                   evict, if unpinned                     |
//	  +----------------------------------------------------------+
//	                          last unpin
//
// A slot is used only while it is pinned, until the callback returns. The pin comes first, and then
// the check that the set still has the slot's bit. So an entry is never replaced under its user.
//
// An insertion claims a slot, searches the set for the key, writes the key, and sets the bit only if
// the word `set` has not changed since before the search. So a key is never inserted twice. No step
// waits for another thread: after SHUNT_ATTEMPTS the entry is refused, as if the set were full.

#ifndef SHUNT_TABLE_H
#define SHUNT_TABLE_H

struct shunt_content;

#define SHUNT_ATTEMPTS 4
#define SHUNT_KEY_WORDS (SHUNT_MAX_KEY / 8)

// The states of a slot.
#define SHUNT_CLAIMED (1ull << 63)
#define SHUNT_LIVE (1ull << 62)
#define SHUNT_DYING (1ull << 61)

// Where a table is in the state, and the sizes of its parts in words of 64 bits.
struct shunt_table {
	__u64 head;
	__u64 sets;
	__u64 clocks;
	__u64 slots;
	__u32 count; // of sets
	__u32 slot;
	__u32 key;
	__u32 value_at;
	__u32 value;
	__u32 is_lru;
	// Of a content store (contents.h): where the contents are, and the bytes of each.
	__u64 contents;
	__u64 room;
};

#define SHUNT_SLOT(TABLE) SHUNT_MEMBER(TABLE).slots[0]

#define SHUNT_TABLE_MEMBERS(TABLE)                                                                   \
	.head = SHUNT_OFFSET(TABLE.head), .sets = SHUNT_OFFSET(TABLE.sets),                          \
	.clocks = SHUNT_OFFSET(TABLE.clocks), .slots = SHUNT_OFFSET(TABLE.slots),                    \
	.count = sizeof(SHUNT_MEMBER(TABLE).sets) / 8, .slot = sizeof(SHUNT_SLOT(TABLE)) / 8,        \
	.key = sizeof(SHUNT_SLOT(TABLE).key) / 8, .value_at = SHUNT_VALUE_AT(TABLE) / 8,             \
	.value = sizeof(SHUNT_SLOT(TABLE).value) / 8,                                                \
	.is_lru = __builtin_types_compatible_p(__typeof__(SHUNT_MEMBER(TABLE).head), struct shunt_lru_head)

#define SHUNT_TABLE(TABLE) { SHUNT_TABLE_MEMBERS(TABLE) }

#define SHUNT_VALUE_AT(TABLE) (SHUNT_OFFSET(TABLE.slots[0].value) - SHUNT_OFFSET(TABLE.slots[0]))

// Copies a key into the verdict.
#define SHUNT_SET_KEY(VERDICT, TABLE, KEY)                                                           \
	({                                                                                           \
		const __typeof__(SHUNT_SLOT(TABLE).key) *shunt_key = (KEY);                          \
		_Static_assert(sizeof(*shunt_key) % 8 == 0 && sizeof(*shunt_key) <= SHUNT_MAX_KEY,   \
			       "a key has a multiple of 8 bytes, and at most SHUNT_MAX_KEY");        \
		_Static_assert(sizeof(SHUNT_SLOT(TABLE).value) % 8 == 0, "a value consists of __u64"); \
		_Static_assert(sizeof(SHUNT_SLOT(TABLE)) <= SHUNT_MAX_ELEMENT,                       \
			       "a key and its value have at most 496 bytes");                        \
		__builtin_memset((VERDICT)->key_words, 0, SHUNT_MAX_KEY);                            \
		__builtin_memcpy((VERDICT)->key_words, shunt_key, sizeof(*shunt_key));               \
	})

#define SHUNT_LOOKUP(VERDICT, TABLE, KEY, INSERTS)                                                   \
	({                                                                                           \
		static const struct shunt_table shunt_table = SHUNT_TABLE(TABLE);                    \
		_Static_assert(!(INSERTS) || !__builtin_types_compatible_p(                          \
				       __typeof__(SHUNT_SLOT(TABLE).value), struct shunt_content),   \
			       "shunt_put_content makes the entries of a content store");            \
		SHUNT_SET_KEY(VERDICT, TABLE, KEY);                                                  \
		__u64 shunt_found = shunt_look_up(VERDICT, &shunt_table, INSERTS);                   \
		__u8 *shunt_at_slot = shunt_found ?                                                  \
			shunt_at(VERDICT, shunt_found, sizeof(SHUNT_SLOT(TABLE))) : 0;               \
		shunt_at_slot ?                                                                      \
			(__typeof__(SHUNT_SLOT(TABLE).value) *)(shunt_at_slot + SHUNT_VALUE_AT(TABLE)) : 0; \
	})

// Returns the value of a key, which is inserted as zeros if it is not there. Returns null, and
// counts that, if there is no room. The value may be used until the callback returns.
#define shunt_entry(VERDICT, TABLE, KEY) SHUNT_LOOKUP(VERDICT, TABLE, KEY, 1)

// Returns the value of a key, or null if it is not there.
#define shunt_find_entry(VERDICT, TABLE, KEY) SHUNT_LOOKUP(VERDICT, TABLE, KEY, 0)

// Deletes the entry of a key. Other users of its value keep it until their callbacks return.
#define shunt_delete(VERDICT, TABLE, KEY)                                                            \
	({                                                                                           \
		static const struct shunt_table shunt_table = SHUNT_TABLE(TABLE);                         \
		if (shunt_find_entry(VERDICT, TABLE, KEY))                                           \
			shunt_delete_last(VERDICT, &shunt_table);                                    \
	})

// A word of a slot. No slot is in two pieces of the memory, so the verifier need not know its size.
struct shunt_slot {
	__u64 *piece;
	__u64 first; // its first word in the piece
};

#define SHUNT_PIECE_WORDS (SHUNT_MAX_ELEMENT / 8)

SHUNT_INLINE __u64 *shunt_word(const struct shunt_slot *slot, __u64 word)
{
	return slot->piece + ((slot->first + word) & (SHUNT_PIECE_WORDS - 1));
}

// Finds the piece of a slot. Returns false if there is none.
SHUNT_INLINE int shunt_slot(void *memory, __u64 offset, struct shunt_slot *slot)
{
	slot->first = offset % SHUNT_MAX_ELEMENT / 8;
	slot->piece = shunt_piece(memory, offset - offset % SHUNT_MAX_ELEMENT, SHUNT_MAX_ELEMENT);
	return slot->piece != 0;
}

// The words of a slot in front of its key.
#define SHUNT_USE 0
#define SHUNT_USED 1
#define SHUNT_KEY_AT 2

SHUNT_INLINE __u64 shunt_hash_key(const __u64 *key)
{
	__u64 hash = 0;

	for (__u32 at = 0; at < SHUNT_KEY_WORDS; at++) {
		hash = (hash ^ key[at]) * 0x9e3779b97f4a7c15ull;
		hash ^= hash >> 32;
	}
	return hash;
}

// Gives a pin back. The last one frees a slot whose entry was deleted.
SHUNT_INLINE void shunt_unpin(__u64 *use)
{
	if (__sync_fetch_and_add(use, -1ull) == SHUNT_DYING + 1)
		shunt_replace(use, SHUNT_DYING, 0);
}

// Ends the use of all entries.
SHUNT_FUNCTION void shunt_unpin_all(struct shunt_verdict *verdict)
{
	void *memory = verdict->pinned ? shunt_memory(verdict) : 0;

	if (!memory)
		return;
	for (__u32 at = 0; at < SHUNT_PINS; at++) {
		__u64 *use = at < verdict->pinned ? shunt_piece(memory, verdict->pins[at], 8) : 0;

		if (use)
			shunt_unpin(use);
	}
	verdict->pinned = 0;
}

// A lookup in progress, for the steps of shunt_loop.
struct shunt_seek {
	void *memory;
	__u64 *set;
	__u64 words; // of the key
	__u64 slots; // the offset of the set's first slot
	__u64 size; // of a slot, in bytes
	__u64 seen; // the word of the set
	__u64 way; // the number of the found or claimed slot in the set, or SHUNT_WAYS
	__u64 oldest;
	const __u64 *key; // SHUNT_KEY_WORDS, zeros behind the key
};

SHUNT_INLINE int shunt_slot_of(const struct shunt_seek *seek, __u64 way, struct shunt_slot *slot)
{
	return shunt_slot(seek->memory, seek->slots + way * seek->size, slot);
}

SHUNT_INLINE int shunt_is_key(const struct shunt_seek *seek, const struct shunt_slot *slot)
{
	__u64 different = 0;

	for (__u32 at = 0; at < SHUNT_KEY_WORDS; at++)
		if (at < seek->words)
			different |= shunt_load(shunt_word(slot, SHUNT_KEY_AT + at)) ^ seek->key[at];
	return !different;
}

// Pins the live slot of the key.
static long shunt_find_step(__u64 way, void *state)
{
	struct shunt_seek *seek = state;
	struct shunt_slot slot;
	__u64 *use;

	if (!(seek->seen >> (way & 63) & 1) || !shunt_slot_of(seek, way, &slot) || !shunt_is_key(seek, &slot))
		return 0;
	use = shunt_word(&slot, SHUNT_USE);
	if (__sync_fetch_and_add(use, 1) & SHUNT_LIVE && shunt_load(seek->set) >> (way & 63) & 1 &&
	    shunt_is_key(seek, &slot)) {
		seek->way = way;
		return 1;
	}
	shunt_unpin(use);
	return 0;
}

// Claims a free slot.
static long shunt_claim_step(__u64 way, void *state)
{
	struct shunt_seek *seek = state;
	struct shunt_slot slot;

	if (!shunt_slot_of(seek, way, &slot) || !shunt_replace(shunt_word(&slot, SHUNT_USE), 0, SHUNT_CLAIMED))
		return 0;
	seek->way = way;
	return 1;
}

// Finds the slot that was not used for the longest time. Slots in use stay.
static long shunt_oldest_step(__u64 way, void *state)
{
	struct shunt_seek *seek = state;
	struct shunt_slot slot;
	__u64 used;

	if (!shunt_slot_of(seek, way, &slot) || shunt_load(shunt_word(&slot, SHUNT_USE)) != SHUNT_LIVE)
		return 0;
	used = shunt_load(shunt_word(&slot, SHUNT_USED));
	if (used < seek->oldest) {
		seek->oldest = used;
		seek->way = way;
	}
	return 0;
}

SHUNT_INLINE int shunt_find_slot(struct shunt_seek *seek)
{
	seek->seen = shunt_load(seek->set);
	seek->way = SHUNT_WAYS;
	shunt_loop(SHUNT_WAYS, shunt_find_step, seek);
	return seek->way < SHUNT_WAYS;
}

// Claims a slot: a free one, or that of an evicted entry. Returns false if there is none.
SHUNT_INLINE int shunt_claim(struct shunt_seek *seek, struct shunt_hash_head *head, int evicts)
{
	struct shunt_slot slot;

	seek->way = SHUNT_WAYS;
	shunt_loop(SHUNT_WAYS, shunt_claim_step, seek);
	if (seek->way < SHUNT_WAYS)
		return 1;
	if (!evicts)
		return 0;
	seek->oldest = ~0ull;
	shunt_loop(SHUNT_WAYS, shunt_oldest_step, seek);
	if (seek->way >= SHUNT_WAYS || !shunt_slot_of(seek, seek->way, &slot) ||
	    !shunt_replace(shunt_word(&slot, SHUNT_USE), SHUNT_LIVE, SHUNT_CLAIMED))
		return 0;
	__sync_fetch_and_and(seek->set, ~(1ull << (seek->way & 63)));
	shunt_add(&head->entries, -1ull);
	shunt_add(&head->evicted, 1);
	return 1;
}

// Makes the claimed slot a live one, pinned, unless another insertion has changed the set.
SHUNT_INLINE int shunt_publish_slot(const struct shunt_seek *seek, __u64 *use, __u64 way)
{
	__u64 bit = 1ull << (way & 63);

	shunt_add(use, SHUNT_LIVE + 1 - SHUNT_CLAIMED);
	if (shunt_replace(seek->set, seek->seen, (seek->seen | bit) + (1ull << SHUNT_WAYS)))
		return 1;
	shunt_add(use, SHUNT_CLAIMED - SHUNT_LIVE - 1);
	return 0;
}

// Inserts the key, which was not there a moment ago, and pins its slot `seek->way`. Returns false if
// there is no room.
SHUNT_INLINE int shunt_insert(struct shunt_seek *seek, const struct shunt_table *table, struct shunt_hash_head *head)
{
	struct shunt_slot slot;
	__u64 *use, way;

	if (!shunt_claim(seek, head, table->is_lru))
		return 0;
	way = seek->way;
	if (!shunt_slot_of(seek, way, &slot))
		return 0;
	use = shunt_word(&slot, SHUNT_USE);
	for (__u32 at = 0; at < SHUNT_KEY_WORDS; at++)
		if (at < table->key)
			*(volatile __u64 *)shunt_word(&slot, SHUNT_KEY_AT + at) = seek->key[at];
	for (__u32 at = 0; at < SHUNT_PIECE_WORDS && at < table->value; at++)
		*(volatile __u64 *)shunt_word(&slot, table->value_at + at) = 0;
	for (__u32 attempt = 0; attempt < SHUNT_ATTEMPTS; attempt++) {
		// Others may have inserted the key before the slot was claimed.
		if (shunt_find_slot(seek))
			break;
		if (shunt_publish_slot(seek, use, way)) {
			seek->way = way;
			shunt_add(&head->entries, 1);
			return 1;
		}
	}
	shunt_add(use, -SHUNT_CLAIMED);
	return seek->way < SHUNT_WAYS;
}

// Returns the offset of the slot of the key in the verdict, which is pinned, or 0.
SHUNT_FUNCTION __u64 shunt_look_up(struct shunt_verdict *verdict, const struct shunt_table *table, int inserts)
{
	__u64 number = shunt_hash_key(verdict->key_words) & (table->count - 1);
	void *memory = shunt_memory(verdict);
	struct shunt_hash_head *head;
	__u32 pin = verdict->pinned;
	struct shunt_seek seek;
	struct shunt_slot slot;
	__u64 *clock;

	if (!memory || pin >= SHUNT_PINS)
		return 0;
	head = shunt_piece(memory, table->head, sizeof(*head));
	clock = shunt_piece(memory, table->clocks + 8 * number, 8);
	seek.memory = memory;
	seek.set = shunt_piece(memory, table->sets + 8 * number, 8);
	seek.words = table->key;
	seek.size = 8ull * table->slot;
	seek.slots = table->slots + number * SHUNT_WAYS * seek.size;
	seek.key = verdict->key_words;
	if (!head || !clock || !seek.set)
		return 0;
	if (!shunt_find_slot(&seek)) {
		if (!inserts)
			return 0;
		if (!shunt_insert(&seek, table, head)) {
			shunt_add(&head->refused, 1);
			return 0;
		}
	}
	if (table->is_lru && shunt_slot_of(&seek, seek.way, &slot))
		*(volatile __u64 *)shunt_word(&slot, SHUNT_USED) = shunt_add(clock, 1);
	verdict->pins[pin & (SHUNT_PINS - 1)] = seek.slots + seek.way * seek.size;
	verdict->pinned = pin + 1;
	return seek.slots + seek.way * seek.size;
}

// Deletes the entry that was looked up last.
SHUNT_FUNCTION void shunt_delete_last(struct shunt_verdict *verdict, const struct shunt_table *table)
{
	__u64 offset = verdict->pins[(verdict->pinned - 1) & (SHUNT_PINS - 1)];
	__u64 number = (offset - table->slots) / (8ull * table->slot), bit = 1ull << (number % SHUNT_WAYS);
	void *memory = shunt_memory(verdict);
	struct shunt_hash_head *head;
	__u64 *use, *set;

	if (!memory)
		return;
	head = shunt_piece(memory, table->head, sizeof(*head));
	set = shunt_piece(memory, table->sets + 8 * (number / SHUNT_WAYS), 8);
	use = shunt_piece(memory, offset, 8);
	// Only one of several deletions at the same time clears the bit.
	if (!head || !set || !use || !(__sync_fetch_and_and(set, ~bit) & bit))
		return;
	shunt_add(use, SHUNT_DYING - SHUNT_LIVE);
	shunt_add(&head->entries, -1ull);
}

#endif
