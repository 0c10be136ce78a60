// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Messages that are lines, which end with a line feed.

#ifndef SHUNT_LINE_H
#define SHUNT_LINE_H

#include "find.h"

// Returns the result of `parse` for a line, including its end. Lines have at most 64 KiB.
SHUNT_INLINE int line_message(struct shunt_socket *socket)
{
	int end = shunt_find(socket, 0, SHUNT_MAX_MESSAGE, '\n');

	if (end < 0)
		return shunt_available(socket) >= SHUNT_MAX_MESSAGE ? -SHUNT_TOO_LONG : 0;
	return end + 1;
}

// A word of a line. One space separates two words.
struct line_word {
	__u32 offset;
	__u32 length; // 0: there is no such word
};

// Finds the word at `offset` in a line whose text ends before `end`.
SHUNT_INLINE void line_word(struct shunt_socket *socket, __u32 offset, __u32 end, struct line_word *word)
{
	int space = shunt_find(socket, offset, end, ' ');
	__u32 to = space < 0 ? end : (__u32)space;

	word->offset = offset;
	word->length = to > offset ? to - offset : 0;
}

#endif
