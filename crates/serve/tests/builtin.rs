//! Tests the builtin services through the interface that engines use.

use shunt_serve::service::{Answer, Key, Parse, Refusal, Service, Share, Verdict, builtin};

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

/// Returns the answer to a refused message, and checks that the connection stays open.
fn answer(name: &str, message: &[u8]) -> String {
    let service = builtin::named(name).expect("a builtin").native;
    assert_eq!(service.parse(message), Parse::Message(message.len()));
    let Verdict::Refuse(why) = service.decide(message) else { panic!("{message:?} is served") };
    let Answer::Reply(bytes) = service.refuse(message, why) else { panic!("{message:?} is not answered") };
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the key by which a message is forwarded.
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
    let several = answer("redis-router", b"*3\r\n$6\r\nSINTER\r\n$1\r\na\r\n$1\r\nb\r\n");
    assert!(several.starts_with("-ERR ") && several.ends_with("\r\n"), "{several}");
    let service = builtin::named("redis-router").expect("a builtin").native;
    assert_eq!(service.decide(b"*1\r\n$4\r\nping\r\n"), Verdict::Reply(b"+PONG\r\n".to_vec()));
    assert_eq!(service.decide(b"*1\r\n$4\r\nQUIT\r\n"), Verdict::Close(b"+OK\r\n".to_vec()));
    assert_eq!(service.parse(b"ping\r\nGET a\r\n"), Parse::Message(6));
    assert_eq!(service.decide(b"ping\r\n"), Verdict::Reply(b"+PONG\r\n".to_vec()));
    assert_eq!(service.decide(b"\r\n"), Verdict::Drop);
    assert!(answer("redis-router", b"GET a\r\n").starts_with("-ERR "));
}

#[test]
fn memcached_requests_go_by_their_key() {
    let memcached = |message: &[u8]| key("memcached-router", message);
    assert_eq!(memcached(b"get user:1\r\n"), "user:1");
    assert_eq!(memcached(b"set user:1 0 0 5\r\nhello\r\n"), "user:1");
    assert_eq!(memcached(b"gat 60 user:1\r\n"), "user:1");
    assert_eq!(memcached(b"\x80\0\0\x06\0\0\0\0\0\0\0\x06\0\0\0\x07\0\0\0\0\0\0\0\0user:1"), "user:1");
    assert!(answer("memcached-router", b"mg a v\r\n").starts_with("SERVER_ERROR "));
    let flush = b"\x80\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0\0";
    // An error for an unknown command, with the request's opaque field.
    assert!(answer("memcached-router", flush).starts_with("\u{fffd}\x08\0\0\0\0\0\u{fffd}\0\0\0!\0\0\0\x07"));
    let service = builtin::named("memcached-router").expect("a builtin").native;
    let silent = service.decide(b"set a 0 0 1 noreply\r\nb\r\n");
    assert_eq!(silent, Verdict::Forward { key: Key::Bytes(4..5), one_way: true });
    assert_eq!(service.parse(b"set a 0 0 9999999\r\n"), Parse::Refused(Refusal::TooLong));
}

/// Returns the parts of a split message.
fn parts(name: &str, message: &[u8]) -> Vec<String> {
    let service = builtin::named(name).expect("a builtin").native;
    assert_eq!(service.parse(message), Parse::Message(message.len()));
    assert_eq!(service.decide(message), Verdict::Split);
    let mut share = Share::default();
    let parts = std::iter::from_fn(|| {
        let part = service.part(message, &mut share);
        share.index += 1;
        part
    });
    parts.map(|part| part.escape_ascii().to_string()).collect()
}

/// Returns the client's answer for these answers to parts, and whether the last stands for all.
fn joined(name: &str, answers: &[&[u8]]) -> (String, bool) {
    let service = builtin::named(name).expect("a builtin").native;
    let mut share = Share { count: answers.len() as u32, ..Share::default() };
    let mut all = Vec::new();
    for answer in answers {
        let joined = service.join(answer, &mut share);
        share.index += 1;
        if joined.is_alone {
            return (joined.bytes.escape_ascii().to_string(), true);
        }
        all.extend(joined.bytes);
    }
    (all.escape_ascii().to_string(), false)
}

#[test]
fn a_get_of_several_keys_is_one_for_each() {
    let split = |message: &[u8]| parts("memcached-router", message);
    assert_eq!(split(b"get a b\r\n"), [r"get a\r\n", r"get b\r\n"]);
    assert_eq!(split(b"gats 60 a  bc \n"), [r"gats 60 a\r\n", r"gats 60 bc\r\n"]);
    assert_eq!(split(b"get a \r\n"), [r"get a\r\n"]);
    let join = |answers: &[&[u8]]| joined("memcached-router", answers);
    let (found, nothing) = (b"VALUE a 0 1\r\nx\r\nEND\r\n", b"END\r\n");
    assert_eq!(join(&[found, nothing]), (r"VALUE a 0 1\r\nx\r\nEND\r\n".to_owned(), false));
    assert_eq!(join(&[nothing, nothing]), (r"END\r\n".to_owned(), false));
    assert_eq!(join(&[found, b"SERVER_ERROR out\r\n", nothing]), (r"SERVER_ERROR out\r\n".to_owned(), true));
}

#[test]
fn a_quiet_command_is_answered_when_there_is_something_to_say() {
    let header = |magic: u8, opcode: u8, status: u8, body: &[u8]| {
        let length = body.len() as u8;
        let key = if magic == 0x80 { length } else { 0 };
        let bytes =
            [magic, opcode, 0, key, 0, 0, 0, status, 0, 0, 0, length, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0];
        [&bytes, body].concat()
    };
    for (quiet, loud, is_get) in [
        (0x09, 0x00, true),
        (0x0d, 0x0c, true),
        (0x11, 0x01, false),
        (0x14, 0x04, false),
        (0x16, 0x06, false),
        (0x19, 0x0e, false),
        (0x1a, 0x0f, false),
        (0x1e, 0x1d, true),
        (0x24, 0x23, true),
    ] {
        let sent = parts("memcached-router", &header(0x80, quiet, 0, b"k"));
        assert_eq!(sent, [header(0x80, loud, 0, b"k").escape_ascii().to_string()]);
        let told = |status| joined("memcached-router", &[&header(0x81, loud, status, b"v")]).0;
        let as_it_is = |status| header(0x81, quiet, status, b"v").escape_ascii().to_string();
        assert_eq!(told(0), if is_get { as_it_is(0) } else { String::new() }, "{quiet:x}");
        assert_eq!(told(1), if is_get { String::new() } else { as_it_is(1) }, "{quiet:x}");
        assert_eq!(told(0x82), as_it_is(0x82), "{quiet:x}");
    }
}

#[test]
fn redis_commands_with_several_keys_are_one_for_each() {
    let split = |message: &[u8]| parts("redis-router", message);
    assert_eq!(
        split(b"*3\r\n$4\r\nmget\r\n$1\r\na\r\n$2\r\nbc\r\n"),
        [r"*2\r\n$4\r\nmget\r\n$1\r\na\r\n", r"*2\r\n$4\r\nmget\r\n$2\r\nbc\r\n"]
    );
    assert_eq!(
        split(b"*5\r\n$4\r\nMSET\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\nb\r\n$1\r\n2\r\n"),
        [r"*3\r\n$4\r\nMSET\r\n$1\r\na\r\n$1\r\n1\r\n", r"*3\r\n$4\r\nMSET\r\n$1\r\nb\r\n$1\r\n2\r\n"]
    );
    let odd = answer("redis-router", b"*4\r\n$4\r\nMSET\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\nb\r\n");
    assert!(odd.starts_with("-ERR "), "{odd}");
    let join = |answers: &[&[u8]]| joined("redis-router", answers);
    assert_eq!(
        join(&[b"*1\r\n$1\r\nx\r\n", b"*1\r\n$-1\r\n"]),
        (r"*2\r\n$1\r\nx\r\n$-1\r\n".to_owned(), false)
    );
    assert_eq!(join(&[b":1\r\n", b":0\r\n", b":41\r\n"]), (r":42\r\n".to_owned(), false));
    assert_eq!(join(&[b"+OK\r\n", b"+OK\r\n"]), (r"+OK\r\n".to_owned(), false));
    assert_eq!(join(&[b"+OK\r\n", b"-OOM\r\n", b"+OK\r\n"]), (r"-OOM\r\n".to_owned(), true));
}
