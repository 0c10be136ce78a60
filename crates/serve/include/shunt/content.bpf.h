// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// The content store: answers by keys, in memory that user space changes while the kernel reads.
// src/cache/memory.rs describes the memory, and has the same layout. answer.bpf.h includes this file
// for a service that defines SHUNT_WITH_CONTENTS.
//
// A reader here never waits and never writes, except for the second of the last use. The order of
// its steps is what makes it safe:
//
//	1. read the bucket's count: even, or else try again
//	2. follow the chain, check the entry, copy the content
//	3. read the count again: unchanged, or else try again. The copy is whole
//
// After SHUNT_TRIES the message goes to user space, as it does for an item that has expired, that is
// too long, or whose hash is another key's. What step 2 reads may be anything: an entry in use for
// another key, bytes of another value. So it checks every length, and reads the content with a
// function of the kernel that cannot fault.

#ifndef SHUNT_CONTENT_BPF_H
#define SHUNT_CONTENT_BPF_H

#define SHUNT_SEGMENT (2 << 20)
#define SHUNT_EPOCH 64
#define SHUNT_TRIES 3
#define SHUNT_CHAIN 12
#define SHUNT_MAX_CONTENT_KEY 250

#define SHUNT_FETCHED (1ull << 32)
#define SHUNT_REFERENCED (1ull << 33)

struct shunt_content_head {
	__u64 mask;
	__u64 seed;
	__u64 oldest_live;
	__u64 oldest_cas;
	__u64 hits;
	__u64 misses;
	__u64 left;
	__u64 unused;
};

struct shunt_content_entry {
	__u64 chain;
	__u64 content;
	__u64 lengths;
	__u64 cas;
	__u64 used;
	__u64 times;
	__u64 value;
	__u64 order;
};

struct shunt_content_bucket {
	__u64 count;
	__u64 first;
};

struct shunt_segment {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, SHUNT_SEGMENT);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct shunt_segment);
} shunt_contents SEC(".maps");

// Returns the address of `size` bytes, a power of two, at a multiple of that.
SHUNT_INLINE void *shunt_content_at(void *memory, __u64 offset, __u32 size)
{
	__u32 segment = offset / SHUNT_SEGMENT;
	__u8 *found = bpf_map_lookup_elem(memory, &segment);

	if (!found)
		return 0;
	SHUNT_OPAQUE(found);
	return found + (offset & (SHUNT_SEGMENT - size));
}

SHUNT_INLINE __u64 shunt_is_byte(__u64 word, __u8 byte)
{
	__u64 ones = 0x0101010101010101ull, other = word ^ ones * byte;

	return (other - ones) & ~other & ones << 7;
}

// Answers with the content that the content store has for a key: `length` bytes of the message at
// `offset`, relative to its first byte. If there is none, the answer is the verdict's reply. Where the
// kernel cannot do that, user space decides about the bytes itself: those with a space, a line end or a
// zero byte in the key, for example, may be several messages there.
SHUNT_INLINE void shunt_answer_from_contents(struct shunt_verdict *verdict, __u32 offset, __u32 length)
{
	verdict->action = SHUNT_CONTENT;
	verdict->key = SHUNT_BYTES;
	verdict->key_offset = offset;
	verdict->key_length = length;
}

struct shunt_content_key {
	__u64 *words; // padded with zero bytes
	__u32 length;
	__u32 hash;
};

// Hashes a key. Returns false if it has bytes that end a word or a line.
SHUNT_INLINE int shunt_hash_content_key(struct shunt_content_key *key, __u64 seed)
{
	__u64 state = seed ^ key->length, strange = 0;

	for (__u32 word = 0; word < 32; word++) {
		__u64 value, rest;

		if (word * 8 >= key->length)
			break;
		value = key->words[word];
		state = (state ^ value) * 0x9e3779b97f4a7c15ull;
		state ^= state >> 32;
		rest = key->length - word * 8;
		if (rest < 8)
			value |= ~0ull << 8 * rest;
		strange |= shunt_is_byte(value, ' ') | shunt_is_byte(value, '\n') | shunt_is_byte(value, 0);
	}
	key->hash = (state * 0x9e3779b97f4a7c15ull) >> 32;
	return !strange;
}

// Compares the key with the one in a content, behind "VALUE ".
SHUNT_INLINE int shunt_has_content_key(const struct shunt_content_key *key, const __u8 *content)
{
	__u64 different = 0;

	for (__u32 word = 0; word < 32; word++) {
		__u64 value, rest;

		if (word * 8 >= key->length)
			break;
		value = *(const __u64 *)(content + 6 + word * 8) ^ key->words[word];
		rest = key->length - word * 8;
		different |= rest < 8 ? value & ~(~0ull << 8 * rest) : value;
	}
	return !different;
}

#define SHUNT_CONTENT_MISSING 0
#define SHUNT_CONTENT_LEFT (-1)
#define SHUNT_CONTENT_AGAIN (-2)

// Makes one try. Returns the length of the copied content, or one of the results above.
SHUNT_FUNCTION int shunt_try_content(void *memory, struct shunt_content_head *head,
				     struct shunt_content_key *key, struct shunt_answer *answer)
{
	struct shunt_content_bucket *bucket =
		shunt_content_at(memory, SHUNT_SEGMENT + (key->hash & head->mask) * sizeof(*bucket), sizeof(*bucket));
	struct shunt_content_entry *entry = 0;
	__u64 count, at, chain, lengths, content, used, live, now;
	__u32 segment, length, tries;
	__u8 *found;

	if (!bucket)
		return SHUNT_CONTENT_LEFT;
	// An addition, because it orders the reads before and after it on every processor.
	count = __sync_fetch_and_add(&bucket->count, 0);
	if (count & 1)
		return SHUNT_CONTENT_AGAIN;
	at = *(volatile __u64 *)&bucket->first;
	for (tries = 0; tries < SHUNT_CHAIN && at; tries++) {
		entry = shunt_content_at(memory, at * sizeof(*entry), sizeof(*entry));
		if (!entry)
			return SHUNT_CONTENT_AGAIN;
		chain = *(volatile __u64 *)&entry->chain;
		if (chain >> 32 == key->hash)
			break;
		at = (__u32)chain;
	}
	if (!at)
		return __sync_fetch_and_add(&bucket->count, 0) == count ? SHUNT_CONTENT_MISSING : SHUNT_CONTENT_AGAIN;
	if (tries == SHUNT_CHAIN || !entry)
		return SHUNT_CONTENT_LEFT;
	lengths = *(volatile __u64 *)&entry->lengths;
	content = *(volatile __u64 *)&entry->content;
	used = *(volatile __u64 *)&entry->used;
	now = bpf_ktime_get_ns() / 1000000000 + SHUNT_EPOCH;
	live = *(volatile __u64 *)&head->oldest_live;
	if (live && live <= now && (*(volatile __u64 *)&entry->times >> 32 <= live || entry->cas < head->oldest_cas))
		return SHUNT_CONTENT_LEFT;
	if ((__u32)entry->times && (__u32)entry->times <= now)
		return SHUNT_CONTENT_LEFT;
	length = lengths;
	if ((lengths >> 32 & 0xffff) != key->length)
		return SHUNT_CONTENT_LEFT;
	SHUNT_OPAQUE(length);
	if (length < 1 || length > SHUNT_ANSWER)
		return SHUNT_CONTENT_LEFT;
	segment = content / SHUNT_SEGMENT;
	found = bpf_map_lookup_elem(memory, &segment);
	if (!found || bpf_probe_read_kernel(answer->bytes, length, found + content % SHUNT_SEGMENT))
		return SHUNT_CONTENT_AGAIN;
	if (__sync_fetch_and_add(&bucket->count, 0) != count)
		return SHUNT_CONTENT_AGAIN;
	if (!shunt_has_content_key(key, answer->bytes))
		return SHUNT_CONTENT_LEFT;
	chain = (used >> 32 << 32) | SHUNT_FETCHED | SHUNT_REFERENCED | (__u32)now;
	if (chain != used)
		__sync_val_compare_and_swap(&entry->used, used, chain);
	return length;
}

// Answers from the content store, or with the verdict's reply if there is no content.
SHUNT_FUNCTION int shunt_answer_cached(struct shunt_arrival *arrival, struct shunt_verdict *verdict)
{
	struct shunt_content_key key = { .words = (__u64 *)arrival->conversation->kept };
	struct shunt_content_head *head;
	struct shunt_answer *answer;
	struct tcp_sock *tcp;
	__u64 length = verdict->key_length;
	__u32 only = 0;
	void *memory;
	int why, found = SHUNT_CONTENT_AGAIN, sent;

	answer = shunt_take_answer(arrival, &tcp, &why);
	if (!answer)
		return why;
	memory = bpf_map_lookup_elem(&shunt_contents, &only);
	if (!memory)
		return SHUNT_LEAVE_CONTENT;
	head = shunt_content_at(memory, 0, sizeof(*head));
	SHUNT_OPAQUE(length);
	if (!head)
		return SHUNT_LEAVE_CONTENT;
	if (length < 1 || length > SHUNT_MAX_CONTENT_KEY)
		return SHUNT_LEAVE_CONTENT;
	__builtin_memset(key.words, 0, 256);
	if (bpf_skb_load_bytes(arrival->skb, verdict->key_offset, key.words, length))
		return SHUNT_LEAVE_CONTENT;
	key.length = length;
	if (!shunt_hash_content_key(&key, head->seed))
		return SHUNT_LEAVE_CONTENT;
	for (int tries = 0; tries < SHUNT_TRIES && found == SHUNT_CONTENT_AGAIN; tries++)
		found = shunt_try_content(memory, head, &key, answer);
	if (found < 0) {
		__sync_fetch_and_add(&head->left, 1);
		return SHUNT_LEAVE_CONTENT;
	}
	sent = found ? shunt_send_answer(arrival, answer, tcp, found) : shunt_send_reply(arrival, answer, tcp, verdict);
	if (sent == SHUNT_SEND)
		__sync_fetch_and_add(found ? &head->hits : &head->misses, 1);
	return sent;
}

#endif
