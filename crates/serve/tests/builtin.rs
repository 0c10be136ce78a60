//! The builtin services, as an engine sees them.

use shunt_serve::service::{Answer, Key, Parse, Refusal, Service, Verdict, builtin};

#[test]
fn an_echo_takes_whatever_there_is() {
    let echo = builtin::named("echo").expect("a builtin").native;
    assert_eq!(echo.name(), "echo");
    assert!(!echo.properties().replies);
    assert_eq!(echo.parse(b""), Parse::More);
    assert_eq!(echo.parse(b"abc"), Parse::Message(3));
    assert_eq!(echo.parse(&vec![0; 100_000]), Parse::Message(65_536));
    assert_eq!(echo.parse_reply(b"abc"), Parse::Refused(Refusal::Malformed));
    assert_eq!(echo.decide(b"abc"), Verdict::Echo);
    assert_eq!(echo.refuse(b"abc", Refusal::NoBackend), Answer::Close(Vec::new()));
    assert_eq!(echo.accepted(), Answer::Nothing);
}

#[test]
fn every_builtin_says_its_own_name() {
    for builtin in builtin::all() {
        assert_eq!(builtin.native.name(), builtin.name);
    }
}

/// The text of the answer to a message that is refused, and the connection goes on.
fn answer(name: &str, message: &[u8]) -> String {
    let service = builtin::named(name).expect("a builtin").native;
    assert_eq!(service.parse(message), Parse::Message(message.len()));
    let Verdict::Refuse(why) = service.decide(message) else { panic!("{message:?} is served") };
    let Answer::Reply(bytes) = service.refuse(message, why) else { panic!("{message:?} is not answered") };
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The key by which a message is forwarded.
fn key(name: &str, message: &[u8]) -> String {
    let service = builtin::named(name).expect("a builtin").native;
    assert_eq!(service.parse(message), Parse::Message(message.len()));
    match service.decide(message) {
        Verdict::Forward { key: Key::Bytes(range), one_way: false } => {
            String::from_utf8_lossy(&message[range]).into_owned()
        }
        verdict => panic!("{verdict:?}"),
    }
}

#[test]
fn redis_commands_go_by_their_key() {
    let redis = |message: &[u8]| key("redis-router", message);
    assert_eq!(redis(b"*2\r\n$3\r\nGET\r\n$6\r\nuser:1\r\n"), "user:1");
    assert_eq!(redis(b"*3\r\n$3\r\nset\r\n$11\r\n{user:1}:ab\r\n$2\r\nhi\r\n"), "user:1");
    assert_eq!(redis(b"*2\r\n$3\r\nDEL\r\n$4\r\n{}ab\r\n"), "{}ab");
    let several = answer("redis-router", b"*3\r\n$3\r\nDEL\r\n$1\r\na\r\n$1\r\nb\r\n");
    assert!(several.starts_with("-ERR ") && several.ends_with("\r\n"), "{several}");
    let service = builtin::named("redis-router").expect("a builtin").native;
    assert_eq!(service.decide(b"*1\r\n$4\r\nping\r\n"), Verdict::Reply(b"+PONG\r\n".to_vec()));
    assert_eq!(service.decide(b"*1\r\n$4\r\nQUIT\r\n"), Verdict::Close(b"+OK\r\n".to_vec()));
    assert_eq!(service.parse(b"GET a\r\n"), Parse::Refused(Refusal::Malformed));
}

#[test]
fn memcached_requests_go_by_their_key() {
    let memcached = |message: &[u8]| key("memcached-router", message);
    assert_eq!(memcached(b"get user:1\r\n"), "user:1");
    assert_eq!(memcached(b"set user:1 0 0 5\r\nhello\r\n"), "user:1");
    assert_eq!(memcached(b"gat 60 user:1\r\n"), "user:1");
    assert_eq!(memcached(b"\x80\0\0\x06\0\0\0\0\0\0\0\x06\0\0\0\x07\0\0\0\0\0\0\0\0user:1"), "user:1");
    assert!(answer("memcached-router", b"get a b\r\n").starts_with("SERVER_ERROR "));
    assert!(answer("memcached-router", b"mg a v\r\n").starts_with("SERVER_ERROR "));
    let quiet = b"\x80\x09\0\x01\0\0\0\0\0\0\0\x01\0\0\0\x07\0\0\0\0\0\0\0\0a";
    // An unknown command, with the opaque of the request.
    assert!(answer("memcached-router", quiet).starts_with("\u{fffd}\t\0\0\0\0\0\u{fffd}\0\0\0$\0\0\0\x07"));
    let service = builtin::named("memcached-router").expect("a builtin").native;
    let silent = service.decide(b"set a 0 0 1 noreply\r\nb\r\n");
    assert_eq!(silent, Verdict::Forward { key: Key::Bytes(4..5), one_way: true });
    assert_eq!(service.parse(b"set a 0 0 9999999\r\n"), Parse::Refused(Refusal::TooLong));
}
