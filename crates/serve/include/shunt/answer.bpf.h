// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Answers of the kernel engine that no other socket sends: bytes of a verdict or of the content
// store. engine.bpf.h includes this file.
//
// A stream verdict cannot change the length of what it redirects, because TCP counts that length as
// received. So the program keeps the answer, and redirects the message to the client's own socket.
// When the kernel sends it there, shunt_sending replaces it with the answer:
//
//	client -> message of 20 bytes -> shunt_arrived: answer of 150 bytes kept
//	                                     | redirected to the client's socket
//	client <- answer of 150 bytes <- shunt_sending: replaces the 20 bytes
//
// The states of a kept answer, and what changes them:
//
//	none     `length` is 0. Data for the socket is sent as it is
//	kept     shunt_arrived has set `length`, and `until`: where TCP's sequence will end with the
//	         answer. The next data that the kernel sends to the socket is the message
//	sent     the sequence has reached `until`. shunt_sending makes it `none` when it sees that, and
//	         shunt_arrived replaces it
//
// The kernel sends a message in as many pieces as its buffer has: what the network driver copied, and
// parts of pages. shunt_sending has it collect them (bpf_msg_cork_bytes), and replaces all of them.
//
// An answer is kept only while TCP has all that was redirected to the socket before, and has room for
// the answer. Otherwise the message goes to user space with the conversation. Both programs run under
// the socket's lock.

#ifndef SHUNT_ANSWER_BPF_H
#define SHUNT_ANSWER_BPF_H

// The most bytes of an answer from the kernel.
#define SHUNT_ANSWER 2048
// The most bytes of a message that is replaced. More need memory that the kernel may not find.
#define SHUNT_REPLACED 4096
// At least the bytes that the head of a segment takes of a socket's send buffer.
#define SHUNT_SEGMENT_COST 2048

// src/engine/kernel.rs accesses the first word.
struct shunt_answer {
	__u64 length;
	__u32 until; // the end of the answer in TCP's sequence of sent bytes
	__u32 message; // bytes of the message
	__u8 bytes[SHUNT_ANSWER + SHUNT_MAX_REPLY]; // whole pieces of a content may be copied
};

// Indexed by the number of the conversation. Later numbers have no kept answers.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct shunt_answer);
} shunt_answers SEC(".maps");

SHUNT_INLINE struct shunt_answer *shunt_answer_of(__u32 place)
{
	__u32 number = place >> shunt_stride_bits;

	return bpf_map_lookup_elem(&shunt_answers, &number);
}

// Returns true if TCP has all bytes for the client, also those of an earlier answer.
SHUNT_INLINE int shunt_is_free(struct shunt_arrival *arrival, struct tcp_sock *tcp)
{
	return arrival->end->written + arrival->end->redirected ==
	       tcp->bytes_acked + (__u32)(tcp->write_seq - tcp->snd_una);
}

// Returns true if TCP takes any answer whole. A send that stops in the middle, because a limit is
// reached, is repeated with the message, and the kernel does not run shunt_sending for it.
SHUNT_INLINE int shunt_has_room(struct tcp_sock *tcp)
{
	struct sock *sk = &tcp->inet_conn.icsk_inet.sk;
	// Each segment also takes memory for its head.
	__u64 segments = SHUNT_ANSWER / tcp->mss_cache + 2, needed = SHUNT_ANSWER + segments * SHUNT_SEGMENT_COST;
	__u32 unsent = tcp->write_seq - tcp->snd_nxt, most = tcp->notsent_lowat;

	if (!most)
		most = sk->__sk_common.skc_net.net->ipv4.sysctl_tcp_notsent_lowat;
	return (__u64)sk->sk_wmem_queued + needed <= (__u64)sk->sk_sndbuf && (__u64)unsent + SHUNT_ANSWER <= most;
}

// Redirects the message to its own socket, where `length` kept bytes replace it.
SHUNT_INLINE int shunt_send_answer(struct shunt_arrival *arrival, struct shunt_answer *answer, struct tcp_sock *tcp,
				   __u64 length)
{
	int sent;

	answer->until = tcp->write_seq + length;
	answer->message = arrival->skb->len;
	answer->length = length;
	sent = shunt_send(arrival, arrival->place, length, SHUNT_LEAVE_CLIENT_FULL);
	if (sent != SHUNT_SEND)
		answer->length = 0;
	return sent;
}

// Returns the kept answer of the conversation if it can be used now. Otherwise sets `why`.
SHUNT_INLINE struct shunt_answer *shunt_take_answer(struct shunt_arrival *arrival, struct tcp_sock **tcp, int *why)
{
	struct shunt_answer *answer = shunt_answers_clients ? shunt_answer_of(arrival->place) : 0;
	struct bpf_sock *sk = arrival->skb->sk;

	*why = SHUNT_LEAVE_UNUSUAL;
	*tcp = sk ? bpf_skc_to_tcp_sock(sk) : 0;
	if (!answer || !*tcp || arrival->skb->len > SHUNT_REPLACED)
		return 0;
	*why = SHUNT_LEAVE_OUTSTANDING;
	if (arrival->conversation->outstanding || !shunt_is_free(arrival, *tcp) || shunt_is_several(arrival))
		return 0;
	*why = SHUNT_LEAVE_CLIENT_FULL;
	return shunt_has_room(*tcp) ? answer : 0;
}

SHUNT_INLINE int shunt_send_reply(struct shunt_arrival *arrival, struct shunt_answer *answer, struct tcp_sock *tcp,
				  const struct shunt_verdict *verdict)
{
	if (!verdict->reply_length || verdict->reply_length > SHUNT_MAX_REPLY)
		return SHUNT_LEAVE_UNUSUAL;
	__builtin_memcpy(answer->bytes, verdict->reply, SHUNT_MAX_REPLY);
	return shunt_send_answer(arrival, answer, tcp, verdict->reply_length);
}

SHUNT_INLINE int shunt_answer_reply(struct shunt_arrival *arrival, const struct shunt_verdict *verdict)
{
	struct tcp_sock *tcp;
	int why;
	struct shunt_answer *answer = shunt_take_answer(arrival, &tcp, &why);

	return answer ? shunt_send_reply(arrival, answer, tcp, verdict) : why;
}

// Answers with the verdict's reply and a content of the state. If it fails, the content stays pinned:
// user space then answers with it.
SHUNT_FUNCTION int shunt_answer_stored(struct shunt_arrival *arrival, struct shunt_verdict *verdict)
{
	__u64 head = verdict->reply_length, length = verdict->key_length;
	struct shunt_answer *answer;
	struct tcp_sock *tcp;
	void *memory;
	int why, sent;

	answer = shunt_take_answer(arrival, &tcp, &why);
	if (!answer)
		return why;
	memory = shunt_memory(verdict);
	SHUNT_OPAQUE(head);
	if (!memory || head > SHUNT_MAX_REPLY || head + length > SHUNT_ANSWER || !(head + length))
		return SHUNT_LEAVE_CONTENT;
	__builtin_memcpy(answer->bytes, verdict->reply, SHUNT_MAX_REPLY);
	for (__u32 at = 0; at < SHUNT_ANSWER; at += SHUNT_MAX_ELEMENT) {
		void *from;

		if (at >= length)
			break;
		from = shunt_piece(memory, verdict->number + at, SHUNT_MAX_ELEMENT);
		if (!from || bpf_probe_read_kernel(answer->bytes + head + at, SHUNT_MAX_ELEMENT, from))
			return SHUNT_LEAVE_CONTENT;
	}
	sent = shunt_send_answer(arrival, answer, tcp, head + length);
	if (sent == SHUNT_SEND)
		shunt_unpin_all(verdict);
	return sent;
}

#ifdef SHUNT_WITH_CONTENTS
#include "content.bpf.h"
#endif

struct shunt_fill {
	struct sk_msg_md *message;
	struct shunt_answer *answer;
};

// Copies eight bytes of the answer.
static long shunt_fill_step(__u64 index, void *state)
{
	struct shunt_fill *fill = state;
	__u8 *data = (__u8 *)(long)fill->message->data, *end = (__u8 *)(long)fill->message->data_end;
	__u32 at = index * 8;

	if (at > SHUNT_ANSWER - 8)
		return 1;
	data += at;
	if (data + 8 > end)
		return 1;
	*(__u64 *)data = *(__u64 *)(fill->answer->bytes + at);
	return 0;
}

// Runs when the kernel, or user space, sends to a socket in the map. Replaces a message that
// shunt_arrived has redirected with the kept answer.
SEC("sk_msg")
int shunt_sending(struct sk_msg_md *message)
{
	struct bpf_sock *sk = message->sk;
	struct tcp_sock *tcp = sk ? bpf_skc_to_tcp_sock(sk) : 0;
	struct shunt_fill fill = { .message = message };
	__u32 length, former = message->size, *place, number;
	__u8 *data, *end;
	__u64 cookie;

	if (!tcp)
		return SK_PASS;
	cookie = tcp->inet_conn.icsk_inet.sk.__sk_common.skc_cookie.counter;
	place = bpf_map_lookup_elem(&shunt_cookies, &cookie);
	if (!place)
		return SK_PASS;
	number = *place >> shunt_stride_bits;
	if (*place != number << shunt_stride_bits)
		return SK_PASS;
	fill.answer = bpf_map_lookup_elem(&shunt_answers, &number);
	if (!fill.answer || !fill.answer->length)
		return SK_PASS;
	length = fill.answer->length;
	if (fill.answer->until - tcp->write_seq != length) {
		fill.answer->length = 0;
		return SK_PASS;
	}
	if (former < fill.answer->message)
		return bpf_msg_cork_bytes(message, fill.answer->message) ? SK_DROP : SK_PASS;
	if (length > SHUNT_ANSWER || former > fill.answer->message)
		return SK_DROP;
	// After a failure the kernel resets the connection. The message cannot be taken back.
	if (bpf_msg_pull_data(message, 0, former, 0) || bpf_msg_push_data(message, 0, length, 0) ||
	    bpf_msg_pop_data(message, length, former, 0) || bpf_msg_pull_data(message, 0, length, 0))
		return SK_DROP;
	// Otherwise the kernel would wait for more pieces, if the answer is shorter than the message.
	bpf_msg_cork_bytes(message, 0);
	bpf_loop(length / 8, shunt_fill_step, &fill, 0);
	data = (__u8 *)(long)message->data;
	end = (__u8 *)(long)message->data_end;
#pragma GCC unroll 8
	for (__u32 at = 0; at < 8; at++) {
		__u32 from = (length & ~7u) + at;

		if (from >= length || from >= SHUNT_ANSWER)
			break;
		if (data + from + 1 > end)
			return SK_DROP;
		data[from] = fill.answer->bytes[from];
	}
	return SK_PASS;
}

#endif
