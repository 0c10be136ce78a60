// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
//
// Forwards messages of Apache Thrift's binary protocol, framed or not, by their first argument: an
// integer selects the backend by its value, a string by its bytes.
//
//	service Forwarder { oneway void msg(1: i32 key, 2: string payload) }
//
// With -D KEY_FIELD=2 the argument with that id is the key, and with -D BY_METHOD=1 the method's
// name.

#include <shunt/thrift.h>

// The id of the argument that is the key.
#ifndef KEY_FIELD
#define KEY_FIELD 1
#endif

static int parse(struct shunt_socket *socket)
{
	struct thrift_message message;

	return thrift_next(socket, &message);
}

static void decide(struct shunt_socket *socket, struct shunt_verdict *verdict)
{
	struct thrift_message message = {};
	struct thrift_field key;
	int result = thrift_header(socket, &message);

	if (result > 0 && message.kind != THRIFT_CALL && message.kind != THRIFT_ONEWAY)
		result = -SHUNT_MALFORMED;
#ifdef BY_METHOD
	key = (struct thrift_field){ THRIFT_STRING, message.name, message.name_length };
#else
	if (result > 0)
		result = thrift_find(socket, &message, KEY_FIELD, &key);
#endif
	if (result > 0)
		thrift_forward(&message, &key, verdict);
	else if (result < 0)
		shunt_refuse(verdict, -result);
	else
		verdict->action = SHUNT_MORE;
}

static void refuse(struct shunt_socket *socket, enum shunt_refusal why, struct shunt_verdict *verdict)
{
	switch (why) {
	case SHUNT_MISSING_FIELD:
		thrift_refuse(socket, verdict, THRIFT_PROTOCOL_ERROR, "shunt: the message has no key");
		break;
	case SHUNT_TOO_LONG:
		thrift_refuse(socket, verdict, THRIFT_PROTOCOL_ERROR, "shunt: the message is too long");
		break;
	case SHUNT_NO_BACKEND:
		thrift_refuse(socket, verdict, THRIFT_INTERNAL_ERROR, "shunt: there is no backend");
		break;
	case SHUNT_BACKEND_GONE:
		thrift_refuse(socket, verdict, THRIFT_INTERNAL_ERROR, "shunt: the backend is gone");
		break;
	case SHUNT_NO_REPLY:
		thrift_refuse(socket, verdict, THRIFT_INTERNAL_ERROR, "shunt: the backend does not answer");
		break;
	default:
		thrift_refuse(socket, verdict, THRIFT_PROTOCOL_ERROR, "shunt: the message is malformed");
	}
}

SHUNT_SERVICE(.name = "thrift-forwarder", .parse = parse, .parse_reply = parse, .decide = decide, .refuse = refuse,
	      .max_message = 1024 * 1024);
