// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Forwards memcached requests, binary or text, to the backend of their key.
//
// A get of several keys is split into one get for each, and the answers are joined. A quiet binary
// command is forwarded as its counterpart that always answers. The answer is then reduced to the
// one that the quiet command has. Commands without a key are answered here. Commands that concern
// every server, such as flush_all, are refused.

#include <shunt/memcached.h>

#define SAY(verdict, text) shunt_write_all(verdict, text, sizeof(text) - 1)

enum opcode { GET = 0x00, QUIT = 0x07, NOOP = 0x0a, VERSION = 0x0b, GETK = 0x0c, QUITQ = 0x17, GAT = 0x1d, GATK = 0x23 };

enum status { FOUND = 0, NOT_FOUND = 1 };

// A bit for each opcode with a key that always answers: GET, SET, ADD, REPLACE, DELETE, INCREMENT,
// DECREMENT; GETK, APPEND, PREPEND; TOUCH, GAT; GATK.
#define WITH_A_KEY (0x0000007full | 1ull << 0x0c | 1ull << 0x0e | 1ull << 0x0f | 1ull << 0x1c | 1ull << 0x1d | 1ull << 0x23)

// A bit for each quiet opcode, which answers only a hit (gets) or an error (changes).
#define QUIET (1ull << 0x09 | 1ull << 0x0d | 0x007e0000ull | 1ull << 0x19 | 1ull << 0x1a | 1ull << 0x1e | 1ull << 0x24)
#define IS(opcodes, opcode) ((opcode) < 64 && (opcodes) >> ((opcode) & 63) & 1)

// Returns the always-answering counterpart of a quiet opcode.
static __u8 loud(__u8 opcode)
{
	if (opcode == 0x09)
		return GET;
	if (opcode == 0x0d)
		return GETK;
	if (opcode == 0x19 || opcode == 0x1a)
		return opcode - 0x0b;
	if (opcode == 0x1e || opcode == 0x24)
		return opcode - 1;
	return opcode - 0x10;
}

static __u8 quiet(__u8 opcode)
{
	if (opcode == GET)
		return 0x09;
	if (opcode == GETK)
		return 0x0d;
	if (opcode == 0x0e || opcode == 0x0f)
		return opcode + 0x0b;
	if (opcode == GAT || opcode == GATK)
		return opcode + 1;
	return opcode + 0x10;
}

static int parse(struct shunt_socket *socket)
{
	return memcached_message(socket);
}

static int parse_reply(struct shunt_socket *socket)
{
	return memcached_reply(socket);
}

// Turns the header of a binary request into a response with this status and text.
SHUNT_INLINE void answer(struct shunt_verdict *verdict, struct memcached_header *header, __u8 status, const char *text,
			 __u32 length)
{
	header->magic = MEMCACHED_RESPONSE;
	header->key_length[0] = header->key_length[1] = header->extras_length = 0;
	header->status[0] = 0;
	header->status[1] = status;
	header->body_length[0] = header->body_length[1] = header->body_length[2] = 0;
	header->body_length[3] = length;
	__builtin_memset(header->cas, 0, sizeof(header->cas));
	shunt_write_all(verdict, header, sizeof(*header));
	shunt_write_all(verdict, text, length);
}

SHUNT_INLINE void decide_binary(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct memcached_header header;
	__u32 key;

	if (memcached_binary(socket, MEMCACHED_REQUEST, &header) <= 0) {
		verdict->action = SHUNT_MORE;
		return;
	}
	key = (__u32)header.key_length[0] << 8 | header.key_length[1];
	if (IS(WITH_A_KEY, header.opcode) && key) {
		if (MEMCACHED_HEADER + header.extras_length + key > shunt_available(socket))
			verdict->action = SHUNT_MORE;
		else
			shunt_forward_by_bytes(verdict, MEMCACHED_HEADER + header.extras_length, key);
	} else if (IS(QUIET, header.opcode) && key) {
		shunt_split(verdict);
	} else if (header.opcode == NOOP) {
		answer(verdict, &header, 0, "", 0);
	} else if (header.opcode == VERSION) {
		answer(verdict, &header, 0, "1.6 shunt", 9);
	} else if (header.opcode == QUITQ) {
		shunt_close(verdict);
	} else if (header.opcode == QUIT) {
		verdict->action = SHUNT_CLOSE;
		answer(verdict, &header, 0, "", 0);
	} else {
		shunt_refuse(verdict, SHUNT_UNKNOWN_COMMAND);
	}
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct memcached_request request;

	if (memcached_is_binary(socket)) {
		decide_binary(socket, verdict);
	} else if (memcached_request(socket, &request) <= 0) {
		verdict->action = SHUNT_MORE;
	} else if (request.key.length && !request.several) {
		shunt_forward_by_bytes(verdict, request.key.offset, request.key.length);
		verdict->one_way = request.quiet;
	} else if (request.key.length && request.key.offset <= SHUNT_MAX_HEAD) {
		shunt_split(verdict);
	} else if (request.command == MEMCACHED_LETTERS("version")) {
		SAY(verdict, "VERSION 1.6 shunt\r\n");
	} else if (request.command == MEMCACHED_LETTERS("quit")) {
		shunt_close(verdict);
	} else {
		shunt_refuse(verdict, SHUNT_UNKNOWN_COMMAND);
	}
}

SHUNT_INLINE void refuse_binary(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict)
{
	struct memcached_header header;

	if (shunt_peek(socket, 0, &header, sizeof(header)))
		return;
	switch (why) {
	case SHUNT_UNKNOWN_COMMAND:
		answer(verdict, &header, 0x81, "shunt forwards commands with keys", 33);
		break;
	case SHUNT_TOO_LONG:
		answer(verdict, &header, 0x03, "too large", 9);
		break;
	case SHUNT_NO_BACKEND:
	case SHUNT_BACKEND_GONE:
	case SHUNT_NO_REPLY:
		answer(verdict, &header, 0x86, "no backend", 10); // temporary failure
		break;
	default:
		answer(verdict, &header, 0x04, "malformed", 9);
	}
}

static void refuse(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict)
{
	if (memcached_is_binary(socket)) {
		refuse_binary(socket, why, verdict);
		return;
	}
	switch (why) {
	case SHUNT_UNKNOWN_COMMAND:
		SAY(verdict, "SERVER_ERROR shunt forwards commands with keys\r\n");
		break;
	case SHUNT_TOO_LONG:
		SAY(verdict, "SERVER_ERROR object too large for cache\r\n");
		break;
	case SHUNT_NO_BACKEND:
		SAY(verdict, "SERVER_ERROR there is no backend\r\n");
		break;
	case SHUNT_BACKEND_GONE:
		SAY(verdict, "SERVER_ERROR the backend is gone\r\n");
		break;
	case SHUNT_NO_REPLY:
		SAY(verdict, "SERVER_ERROR the backend does not answer\r\n");
		break;
	default:
		SAY(verdict, "CLIENT_ERROR bad command line format\r\n");
	}
}

// Builds a request for the next key: the command up to the first key, that key, and the line's end.
static int part_of_text(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece)
{
	__u8 command[SHUNT_MAX_HEAD], byte;
	struct memcached_request request;
	__u32 text, begin, end;

	if (memcached_request(socket, &request) <= 0 || request.key.offset > sizeof(command))
		return 0;
	text = request.end - 1;
	if (!shunt_peek(socket, text - 1, &byte, 1) && byte == '\r')
		text--;
	begin = share->state ? share->state : request.key.offset;
	while (begin < text && !shunt_peek(socket, begin, &byte, 1) && byte == ' ')
		begin++;
	end = begin;
	while (end < text && !shunt_peek(socket, end, &byte, 1) && byte != ' ')
		end++;
	share->state = end;
	shunt_peek(socket, 0, command, request.key.offset);
	shunt_put(piece, command, request.key.offset);
	shunt_take(piece, begin, end - begin);
	shunt_put_behind(piece, "\r\n", 2);
	return end > begin;
}

static int part_of_binary(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece)
{
	struct memcached_header header;

	if (share->index || shunt_peek(socket, 0, &header, sizeof(header)))
		return 0;
	header.opcode = loud(header.opcode);
	shunt_put(piece, &header, sizeof(header));
	shunt_take(piece, sizeof(header), shunt_available(socket) - sizeof(header));
	return 1;
}

static int part(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece)
{
	return memcached_is_binary(socket) ? part_of_binary(socket, share, piece) : part_of_text(socket, share, piece);
}

#define END "END\r\n"

static int join(struct shunt_socket *socket, struct shunt_share *share, struct shunt_piece *piece)
{
	__u32 length = shunt_available(socket), without = length - (sizeof(END) - 1);
	struct memcached_header header;

	shunt_take(piece, 0, length);
	if (!memcached_is_binary(socket)) {
		if (length < sizeof(END) - 1 || !shunt_is(socket, without, sizeof(END) - 1, END))
			return 0;
		if (share->index + 1 < share->count)
			shunt_take(piece, 0, without);
		return 1;
	}
	if (shunt_peek(socket, 0, &header, sizeof(header)))
		return 0;
	// A quiet get answers hits only, and a quiet change errors only.
	if (header.opcode == GET || header.opcode == GETK || header.opcode == GAT || header.opcode == GATK) {
		if (!header.status[0] && header.status[1] == NOT_FOUND) {
			shunt_take(piece, 0, 0);
			return 1;
		}
	} else if (!header.status[0] && header.status[1] == FOUND) {
		shunt_take(piece, 0, 0);
		return 1;
	}
	header.opcode = quiet(header.opcode);
	shunt_put(piece, &header, sizeof(header));
	shunt_take(piece, sizeof(header), length - sizeof(header));
	return 1;
}

SHUNT_SERVICE(.name = "memcached-router", .parse = parse, .parse_reply = parse_reply, .decide = decide,
	      .refuse = refuse, .part = part, .join = join, .max_message = 1024 * 1024 + 4096);
