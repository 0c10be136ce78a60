// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Hashes of keys, computed in the same way as clients of memcached do. src/hash.rs maps a hash to a
// backend. The kernel engine uses this file; services do not need it.

#ifndef SHUNT_HASH_H
#define SHUNT_HASH_H

// service.h includes this file at its end.

enum shunt_hash {
	SHUNT_MODULO, // libmemcached's default: Jenkins' one-at-a-time, modulo the backends
	SHUNT_KETAMA, // the first four bytes of MD5, little-endian: a point on the continuum
};

#define SHUNT_BLOCK 64

struct shunt_hashing {
	struct shunt_socket socket;
	__u32 offset;
	__u32 left; // bytes of the key that are not hashed yet
	__u32 total;
	__u32 ended; // the key's last byte and MD5's end mark are in a block
	__u32 state[4];
	union {
		__u8 bytes[SHUNT_BLOCK];
		__u32 words[SHUNT_BLOCK / 4];
	} block;
};

SHUNT_INLINE __u32 shunt_next_block(struct shunt_hashing *hashing)
{
	__u32 length = hashing->left < SHUNT_BLOCK ? hashing->left : SHUNT_BLOCK;

	shunt_peek_most(&hashing->socket, hashing->offset, hashing->block.bytes, SHUNT_BLOCK, length);
	hashing->offset = SHUNT_ANY(&hashing->socket, hashing->offset + length);
	hashing->left = SHUNT_ANY(&hashing->socket, hashing->left - length);
	return length;
}

static long shunt_one_at_a_time(__u64 index, void *context)
{
	struct shunt_hashing *hashing = context;
	__u32 length = shunt_next_block(hashing), value = hashing->state[0];

	for (__u32 at = 0; at < SHUNT_BLOCK; at++) {
		if (at >= length)
			break;
		// Signed, because libmemcached uses char.
		value += (__u32)(__s32)(signed char)hashing->block.bytes[at];
		value += value << 10;
		value ^= value >> 6;
	}
	hashing->state[0] = value;
	return !hashing->left;
}

#define SHUNT_ROTATE(value, by) ((value) << (by) | (value) >> (32 - (by)))
#define SHUNT_MD5(mix, a, b, c, d, word, by, constant)                                \
	do {                                                                          \
		a += (mix) + hashing->block.words[word] + constant;                   \
		a = b + SHUNT_ROTATE(a, by);                                          \
	} while (0)
#define SHUNT_MD5_F(b, c, d) (d ^ (b & (c ^ d)))
#define SHUNT_MD5_G(b, c, d) (c ^ (d & (b ^ c)))
#define SHUNT_MD5_H(b, c, d) (b ^ c ^ d)
#define SHUNT_MD5_I(b, c, d) (c ^ (b | ~d))
#define SHUNT_MD5_FOUR(MIX, w0, w1, w2, w3, s0, s1, s2, s3, k0, k1, k2, k3)           \
	SHUNT_MD5(MIX(b, c, d), a, b, c, d, w0, s0, k0);                              \
	SHUNT_MD5(MIX(a, b, c), d, a, b, c, w1, s1, k1);                              \
	SHUNT_MD5(MIX(d, a, b), c, d, a, b, w2, s2, k2);                              \
	SHUNT_MD5(MIX(c, d, a), b, c, d, a, w3, s3, k3)

SHUNT_INLINE void shunt_md5_mix(struct shunt_hashing *hashing)
{
	__u32 a = hashing->state[0], b = hashing->state[1], c = hashing->state[2], d = hashing->state[3];

	SHUNT_MD5_FOUR(SHUNT_MD5_F, 0, 1, 2, 3, 7, 12, 17, 22,
		       0xd76aa478, 0xe8c7b756, 0x242070db, 0xc1bdceee);
	SHUNT_MD5_FOUR(SHUNT_MD5_F, 4, 5, 6, 7, 7, 12, 17, 22,
		       0xf57c0faf, 0x4787c62a, 0xa8304613, 0xfd469501);
	SHUNT_MD5_FOUR(SHUNT_MD5_F, 8, 9, 10, 11, 7, 12, 17, 22,
		       0x698098d8, 0x8b44f7af, 0xffff5bb1, 0x895cd7be);
	SHUNT_MD5_FOUR(SHUNT_MD5_F, 12, 13, 14, 15, 7, 12, 17, 22,
		       0x6b901122, 0xfd987193, 0xa679438e, 0x49b40821);
	SHUNT_MD5_FOUR(SHUNT_MD5_G, 1, 6, 11, 0, 5, 9, 14, 20,
		       0xf61e2562, 0xc040b340, 0x265e5a51, 0xe9b6c7aa);
	SHUNT_MD5_FOUR(SHUNT_MD5_G, 5, 10, 15, 4, 5, 9, 14, 20,
		       0xd62f105d, 0x02441453, 0xd8a1e681, 0xe7d3fbc8);
	SHUNT_MD5_FOUR(SHUNT_MD5_G, 9, 14, 3, 8, 5, 9, 14, 20,
		       0x21e1cde6, 0xc33707d6, 0xf4d50d87, 0x455a14ed);
	SHUNT_MD5_FOUR(SHUNT_MD5_G, 13, 2, 7, 12, 5, 9, 14, 20,
		       0xa9e3e905, 0xfcefa3f8, 0x676f02d9, 0x8d2a4c8a);
	SHUNT_MD5_FOUR(SHUNT_MD5_H, 5, 8, 11, 14, 4, 11, 16, 23,
		       0xfffa3942, 0x8771f681, 0x6d9d6122, 0xfde5380c);
	SHUNT_MD5_FOUR(SHUNT_MD5_H, 1, 4, 7, 10, 4, 11, 16, 23,
		       0xa4beea44, 0x4bdecfa9, 0xf6bb4b60, 0xbebfbc70);
	SHUNT_MD5_FOUR(SHUNT_MD5_H, 13, 0, 3, 6, 4, 11, 16, 23,
		       0x289b7ec6, 0xeaa127fa, 0xd4ef3085, 0x04881d05);
	SHUNT_MD5_FOUR(SHUNT_MD5_H, 9, 12, 15, 2, 4, 11, 16, 23,
		       0xd9d4d039, 0xe6db99e5, 0x1fa27cf8, 0xc4ac5665);
	SHUNT_MD5_FOUR(SHUNT_MD5_I, 0, 7, 14, 5, 6, 10, 15, 21,
		       0xf4292244, 0x432aff97, 0xab9423a7, 0xfc93a039);
	SHUNT_MD5_FOUR(SHUNT_MD5_I, 12, 3, 10, 1, 6, 10, 15, 21,
		       0x655b59c3, 0x8f0ccc92, 0xffeff47d, 0x85845dd1);
	SHUNT_MD5_FOUR(SHUNT_MD5_I, 8, 15, 6, 13, 6, 10, 15, 21,
		       0x6fa87e4f, 0xfe2ce6e0, 0xa3014314, 0x4e0811a1);
	SHUNT_MD5_FOUR(SHUNT_MD5_I, 4, 11, 2, 9, 6, 10, 15, 21,
		       0xf7537e82, 0xbd3af235, 0x2ad7d2bb, 0xeb86d391);
	hashing->state[0] += a;
	hashing->state[1] += b;
	hashing->state[2] += c;
	hashing->state[3] += d;
}

static long shunt_md5_block(__u64 index, void *context)
{
	struct shunt_hashing *hashing = context;
	__u32 length = hashing->left ? shunt_next_block(hashing) : 0;

	if (!length)
		__builtin_memset(hashing->block.bytes, 0, SHUNT_BLOCK);
	if (!hashing->ended && length < SHUNT_BLOCK) {
		hashing->block.bytes[length & (SHUNT_BLOCK - 1)] = 0x80;
		hashing->ended = SHUNT_ANY(&hashing->socket, 1);
		length++;
	} else if (hashing->ended) {
		length = 0;
	}
	int last = hashing->ended && length <= SHUNT_BLOCK - 8;

	if (last)
		hashing->block.words[14] = hashing->total * 8;
	shunt_md5_mix(hashing);
	return last;
}

// Hashes `length` bytes at `offset`. Missing bytes count as zeros.
SHUNT_FUNCTION __u32 shunt_hash_bytes(struct shunt_socket *socket, __u32 offset, __u32 length, enum shunt_hash how)
{
	struct shunt_hashing hashing = {
		.socket = *socket, .offset = offset, .left = length, .total = length
	};
	__u32 blocks = SHUNT_MAX_MESSAGE / SHUNT_BLOCK;

	if (how == SHUNT_MODULO) {
		__u32 value;

		if (length)
			shunt_loop(blocks, shunt_one_at_a_time, &hashing);
		value = hashing.state[0];
		value += value << 3;
		value ^= value >> 11;
		value += value << 15;
		return value;
	}
	hashing.state[0] = 0x67452301;
	hashing.state[1] = 0xefcdab89;
	hashing.state[2] = 0x98badcfe;
	hashing.state[3] = 0x10325476;
	shunt_loop(blocks, shunt_md5_block, &hashing);
	return hashing.state[0];
}

#endif
