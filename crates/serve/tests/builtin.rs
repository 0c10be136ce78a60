//! The builtin services, as an engine sees them.

use shunt_serve::service::{Answer, Parse, Refusal, Service, Verdict, builtin};

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
