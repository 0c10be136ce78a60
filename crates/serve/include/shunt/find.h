// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Searches for a byte and reads decimal numbers, for the framings of text protocols.

#ifndef SHUNT_FIND_H
#define SHUNT_FIND_H

#include "service.h"

#define SHUNT_WINDOW 64
#define SHUNT_ONES 0x0101010101010101ull

struct shunt_search {
	struct shunt_socket socket;
	__u32 offset; // the next offset to search, relative to the position
	__u32 end; // the end of the search
	__u32 byte;
	int found;
	__u64 window[SHUNT_WINDOW / 8];
};

// Returns one bit for each byte of a word: 1 if the byte is 0. This code and the whole search have
// no branches, because the verifier follows both ways of each branch.
SHUNT_INLINE __u64 shunt_zeroes(__u64 word)
{
	__u64 zeroes = ~(((word & ~(SHUNT_ONES << 7)) + ~(SHUNT_ONES << 7)) | word | ~(SHUNT_ONES << 7));

	// Gather the highest bit of each byte into one byte.
	return (zeroes >> 7) * 0x0102040810204080ull >> 56;
}

// Returns the index of the lowest set bit. clang 14 cannot compile the builtin for BPF.
SHUNT_INLINE __u32 shunt_lowest(__u64 bits)
{
	__u64 below = (bits & -bits) - 1;

	SHUNT_OPAQUE(below);
	below -= below >> 1 & 0x55 * SHUNT_ONES;
	below = (below & 0x33 * SHUNT_ONES) + (below >> 2 & 0x33 * SHUNT_ONES);
	below = (below + (below >> 4)) & 0x0f * SHUNT_ONES;
	return below * SHUNT_ONES >> 56;
}

static long shunt_search_window(__u64 index, void *context)
{
	struct shunt_search *search = context;
	__u32 there = shunt_peek_some(&search->socket, search->offset, search->window, SHUNT_WINDOW), at;
	__u64 found = 0;

	if (!there || search->offset >= search->end)
		return 1;
#pragma GCC unroll 8
	for (int word = 0; word < SHUNT_WINDOW / 8; word++)
		found |= shunt_zeroes(search->window[word] ^ (SHUNT_ONES * (search->byte & 0xff))) << (8 * word);
	if (!found) {
		search->offset = SHUNT_ANY(&search->socket, search->offset + SHUNT_WINDOW);
		return 0;
	}
	at = shunt_lowest(found);
	if (at < there && search->offset + at < search->end)
		search->found = SHUNT_ANY(&search->socket, search->offset + at);
	return 1;
}

// Returns the first offset of `byte` in [`offset`, `end`), or -1 if there is none. Offsets are
// relative to the socket's position. `end` is at most 64 KiB after `offset`.
SHUNT_FUNCTION int shunt_find(struct shunt_socket *socket, __u32 offset, __u32 end, __u32 byte)
{
	struct shunt_search search = {
		.socket = *socket, .offset = offset, .end = end, .byte = byte, .found = -1
	};

	shunt_loop(SHUNT_MAX_MESSAGE / SHUNT_WINDOW + 1, shunt_search_window, &search);
	return search.found;
}

// Digits, and the two bytes after them.
struct shunt_digits {
	__u64 value;
	__u32 count; // number of digits; SHUNT_MAX_DIGITS + 1 if there are more
	__u32 there; // number of bytes that were available, digits or not, up to 16
	__u8 next; // the byte after the digits
	__u8 after; // the byte after `next`
};

#define SHUNT_MAX_DIGITS 12

// Reads a decimal number at `offset`.
SHUNT_FUNCTION void shunt_digits(struct shunt_socket *socket, __u32 offset, struct shunt_digits *digits)
{
	__u8 bytes[16];
	__u64 value = 0;
	__u32 at;

	digits->there = shunt_peek_some(socket, offset, bytes, sizeof(bytes));
	for (at = 0; at <= SHUNT_MAX_DIGITS; at++) {
		__u8 digit = bytes[at] - '0';

		if (digit > 9)
			break;
		value = value * 10 + digit;
	}
	digits->value = value;
	digits->count = SHUNT_ANY(socket, at);
	digits->next = bytes[at & 15];
	digits->after = bytes[(at + 1) & 15];
}

// Reads a line of digits, CR and LF. Returns the line's length, 0 if it is incomplete, or -1 if it
// has another form.
SHUNT_INLINE int shunt_number_line(struct shunt_socket *socket, __u32 offset, __u64 *value)
{
	struct shunt_digits digits;

	shunt_digits(socket, offset, &digits);
	*value = digits.value;
	if (digits.count > SHUNT_MAX_DIGITS)
		return -1;
	if (digits.there <= digits.count)
		return 0;
	if (!digits.count || digits.next != '\r')
		return -1;
	if (digits.there == digits.count + 1)
		return 0;
	return digits.after == '\n' ? (int)digits.count + 2 : -1;
}

#endif
