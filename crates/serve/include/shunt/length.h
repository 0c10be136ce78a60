// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Messages that begin with their length, big-endian, which does not count itself.

#ifndef SHUNT_LENGTH_H
#define SHUNT_LENGTH_H

#include "service.h"

// Returns the result of `parse` for a length of `size` bytes. `size` is a constant 1, 2 or 4.
SHUNT_INLINE int length_message(struct shunt_socket *socket, __u32 size)
{
	__u8 bytes[4] = {};
	__u64 length = 0;

	if (shunt_peek(socket, 0, bytes, size))
		return 0;
	for (__u32 at = 0; at < size && at < 4; at++)
		length = length << 8 | bytes[at];
	return length + size > SHUNT_MAX_LENGTH ? -SHUNT_TOO_LONG : (int)(length + size);
}

#endif
