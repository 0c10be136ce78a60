// What the peers of the Thrift forwarder say to each other. Every answer has the name of the backend that gave it.

namespace java peer

struct Item {
    1: string name,
    2: list<i64> numbers,
}

exception Refusal {
    1: string who,
    2: i32 code,
}

service Peer {
    string whose(1: i32 key, 2: string payload),
    string named(1: string key, 2: map<string, list<Item>> items),
    string wide(1: i64 key),
    binary mirror(1: i32 key, 2: binary payload),
    string fail(1: i32 key) throws (1: Refusal refusal),
    oneway void note(1: i32 key, 2: string sender),
    i32 noted(1: i32 key, 2: string sender),
    string keyless(2: string payload),
}

// The backends know nothing of it.
service Wider extends Peer {
    string unknown(1: i32 key),
}
