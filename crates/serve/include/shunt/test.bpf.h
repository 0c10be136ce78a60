// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Test programs, one for each function of a service. They are never attached: BPF_PROG_RUN gives
// them bytes, which they treat as a message. This tests a service without sockets. service.h
// includes this file.

#ifndef SHUNT_TEST_BPF_H
#define SHUNT_TEST_BPF_H

// The caller's input, and below, its result. src/service/trial.rs has the same layouts.
struct shunt_test_call {
	__u32 begin; // offset of the message in the given bytes
	__u32 why; // for refuse and hash; for replied, the length of the message before the reply
	__u64 context; // for timers
};

struct shunt_test_result {
	__s32 parsed;
	__u32 padding;
	struct shunt_verdict verdict;
	__u8 session[SHUNT_MAX_SESSION]; // right behind the verdict
	struct shunt_connection connection;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct shunt_test_call);
} shunt_call SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct shunt_test_result);
} shunt_result SEC(".maps");

#define SHUNT_TEST(NAME)                                                                             \
	SHUNT_INLINE int shunt_do_##NAME(struct shunt_socket *, struct shunt_test_call *,            \
					 struct shunt_test_result *);                                \
	SEC("classifier")                                                                                    \
	int shunt_test_##NAME(struct __sk_buff *skb)                                                 \
	{                                                                                            \
		__u32 only = 0;                                                                      \
		struct shunt_test_call *call = bpf_map_lookup_elem(&shunt_call, &only);              \
		struct shunt_test_result *result = bpf_map_lookup_elem(&shunt_result, &only);        \
		if (!call || !result || call->begin > skb->len)                                      \
			return -1;                                                                   \
		struct shunt_socket socket = {                                                       \
			.skb = skb, .begin = call->begin, .length = skb->len - call->begin           \
		};                                                                                   \
		return shunt_do_##NAME(&socket, call, result);                                       \
	}                                                                                            \
	SHUNT_INLINE int shunt_do_##NAME(struct shunt_socket *socket, struct shunt_test_call *call,  \
					 struct shunt_test_result *result)

SHUNT_TEST(parse)
{
	result->parsed = shunt_parse(socket);
	return 0;
}

SHUNT_TEST(parse_reply)
{
	result->parsed = shunt_parse_reply(socket);
	return 0;
}

SHUNT_TEST(decide)
{
	shunt_decide(socket, &result->verdict);
	return 0;
}

SHUNT_TEST(refuse)
{
	shunt_answer_refusal(socket, call->why, &result->verdict);
	return 0;
}

SHUNT_TEST(timer)
{
	SHUNT_CALL(&result->verdict, timer, &result->verdict, call->context);
	return 0;
}

SHUNT_TEST(service_timer)
{
	SHUNT_CALL(&result->verdict, service_timer, &result->verdict, call->context);
	return 0;
}

SHUNT_TEST(accepted)
{
	SHUNT_CALL(&result->verdict, accepted, &result->verdict);
	return 0;
}

SHUNT_TEST(closed)
{
	SHUNT_CALL(&result->verdict, closed, &result->verdict);
	return 0;
}

SHUNT_TEST(started)
{
	SHUNT_CALL(&result->verdict, started, &result->verdict);
	return 0;
}

SHUNT_TEST(replied)
{
	struct shunt_socket reply = *socket;

	if (call->why > socket->length)
		return -1;
	reply.begin += call->why;
	reply.length -= call->why;
	socket->length = call->why;
	SHUNT_CALL(&result->verdict, replied, socket, &reply, &result->verdict);
	return 0;
}

// Hashes the bytes as a key. `why` is the enum shunt_hash.
SHUNT_TEST(hash)
{
	result->parsed = shunt_hash_bytes(socket, 0, socket->length, call->why == SHUNT_KETAMA ? SHUNT_KETAMA : SHUNT_MODULO);
	return 0;
}

#endif
