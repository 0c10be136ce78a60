//! Tests the Thrift forwarder on messages in Apache Thrift's format, in user space and in the
//! kernel. Needs root.

use std::path::{Path, PathBuf};

use shunt_serve::service::file::Program;
use shunt_serve::service::trial::Trial;
use shunt_serve::service::{Answer, Key, Parse, Refusal, Service, Verdict};

/// Returns a call of `msg` with these fields and a STOP.
fn message(framed: bool, strict: bool, kind: u8, fields: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    if strict {
        body.extend([0x80, 1, 0, kind, 0, 0, 0, 3]);
        body.extend(b"msg");
    } else {
        body.extend([0, 0, 0, 3]);
        body.extend(b"msg");
        body.push(kind);
    }
    body.extend([0, 0, 0, 9]);
    body.extend(fields);
    body.push(0);
    if framed {
        let mut frame = (body.len() as u32).to_be_bytes().to_vec();
        frame.extend(body);
        return frame;
    }
    body
}

/// Builds the service from its source, as a user does. Returns the path of its file.
fn build(directory: &Path, define: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("services/thrift-forwarder.c");
    let object = directory.join(format!("{define}.bpf.o"));
    shunt_serve::workshop::build(&source, Some(&object), &[define.to_owned()]).unwrap()
}

const FORMS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];
const CALL: u8 = 1;
const ONEWAY: u8 = 4;

/// Both halves of the service, which must agree.
struct Both {
    program: Program,
    trial: Trial,
}

impl Both {
    fn new() -> Both {
        Both::open("builtin:thrift-forwarder")
    }

    fn built(define: &str) -> Both {
        let directory = tempfile::tempdir().unwrap();
        Both::open(build(directory.path(), define).to_str().unwrap())
    }

    fn open(name: &str) -> Both {
        let program = Program::open(name).unwrap();
        let trial = Trial::load(&program.object).expect("root");
        Both { program, trial }
    }

    fn parse(&mut self, bytes: &[u8]) -> Parse {
        let parsed = self.program.native.parse(bytes);
        assert_eq!(self.trial.parse(bytes).unwrap(), parsed, "{bytes:x?}");
        parsed
    }

    fn decide(&mut self, bytes: &[u8]) -> Verdict {
        let verdict = self.program.native.decide(bytes);
        assert_eq!(self.trial.decide(bytes).unwrap(), verdict, "{bytes:x?}");
        verdict
    }

    fn refuse(&mut self, bytes: &[u8], why: Refusal) -> Answer {
        let answer = self.program.native.refuse(bytes, why);
        assert_eq!(self.trial.refuse(bytes, why).unwrap(), answer, "{bytes:x?}");
        answer
    }
}

#[test]
fn a_message_is_known_at_its_end_and_no_earlier() {
    let mut both = Both::new();
    // A map of i32 to list of struct { 2: set<uuid> }, a list of doubles, an empty map, and last
    // the key.
    let mut fields = vec![13, 0, 5, 8, 15, 0, 0, 0, 1, 0, 0, 0, 7, 12, 0, 0, 0, 2];
    fields.extend([14, 0, 2, 16, 0, 0, 0, 1]);
    fields.extend([0xee; 16]);
    fields.extend([0, 0]);
    fields.extend([15, 0, 6, 4, 0, 0, 0, 2]);
    fields.extend([0xdd; 16]);
    fields.extend([13, 0, 7, 0, 0, 0, 0, 0, 0]);
    fields.extend([8, 0, 1, 0xff, 0xff, 0xff, 0xfe]);
    for (framed, strict) in FORMS {
        let whole = message(framed, strict, CALL, &fields);
        for length in 0..whole.len() {
            let parsed = both.parse(&whole[..length]);
            // A frame's header has its length.
            let expected = if framed && length >= 5 { Parse::Message(whole.len()) } else { Parse::More };
            assert_eq!(parsed, expected, "{framed} {strict} {length}");
        }
        let mut more = whole.clone();
        more.extend([0x80, 1, 2]);
        assert_eq!(both.parse(&more), Parse::Message(whole.len()));
        let verdict = both.decide(&whole);
        assert_eq!(verdict, Verdict::Forward { key: Key::Number(-2_i64 as u64), one_way: false });
    }
}

#[test]
fn the_key_may_be_of_many_types() {
    let mut both = Both::new();
    let numbers: [(&[u8], u64); 5] = [
        (&[2, 0, 1, 1], 1),
        (&[3, 0, 1, 0x80], -128_i64 as u64),
        (&[6, 0, 1, 1, 2], 258),
        (&[8, 0, 1, 0, 0, 1, 2], 258),
        (&[10, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8], 0x0102_0304_0506_0708),
    ];
    for (framed, strict) in FORMS {
        for (field, number) in numbers {
            let verdict = both.decide(&message(framed, strict, ONEWAY, field));
            assert_eq!(verdict, Verdict::Forward { key: Key::Number(number), one_way: true });
        }
        let whole = message(framed, strict, CALL, &[11, 0, 1, 0, 0, 0, 4, b'u', b's', b'e', b'r']);
        let Verdict::Forward { key: Key::Bytes(range), one_way: false } = both.decide(&whole) else {
            panic!("{framed} {strict}");
        };
        assert_eq!(&whole[range], b"user");
    }
}

#[test]
fn each_service_of_a_process_has_its_own_native_half() {
    let directory = tempfile::tempdir().unwrap();
    let paths = ["KEY_FIELD=2", "BY_METHOD=1"].map(|define| build(directory.path(), define));
    // Nothing else is opened between the two.
    let [by_second, by_method] = paths.map(|path| Program::open(path.to_str().unwrap()).unwrap().native);
    let bare = message(true, true, CALL, &[]);
    assert_eq!(by_second.decide(&bare), Verdict::Refuse(Refusal::MissingField));
    assert!(matches!(by_method.decide(&bare), Verdict::Forward { .. }), "{:?}", by_method.decide(&bare));
}

#[test]
fn the_key_may_be_another_argument_or_the_method() {
    let by_second = &mut Both::built("KEY_FIELD=2");
    let by_method = &mut Both::built("BY_METHOD=1");
    let key = |both: &mut Both, whole: &[u8]| match both.decide(whole) {
        Verdict::Forward { key: Key::Bytes(range), one_way: false } => whole[range].to_owned(),
        other => panic!("{other:?}"),
    };
    for (framed, strict) in FORMS {
        let fields = [8, 0, 1, 0, 0, 0, 7, 11, 0, 2, 0, 0, 0, 4, b'u', b's', b'e', b'r'];
        let whole = message(framed, strict, CALL, &fields);
        assert_eq!(key(by_second, &whole), b"user");
        assert_eq!(key(by_method, &whole), b"msg");
        // A service that decides by the method's name needs no argument.
        let bare = message(framed, strict, CALL, &[]);
        assert_eq!(by_second.decide(&bare), Verdict::Refuse(Refusal::MissingField));
        assert_eq!(key(by_method, &bare), b"msg");
    }
}

#[test]
fn what_cannot_be_forwarded_is_answered_as_thrift_does() {
    let mut both = Both::new();
    for (framed, strict) in FORMS {
        let whole = message(framed, strict, CALL, &[8, 0, 2, 0, 0, 0, 1]);
        assert_eq!(both.decide(&whole), Verdict::Refuse(Refusal::MissingField));
        let Answer::Reply(answer) = both.refuse(&whole, Refusal::MissingField) else { panic!() };
        let text = b"shunt: the message has no key";
        let mut fields = vec![11, 0, 1, 0, 0, 0, text.len() as u8];
        fields.extend(text);
        fields.extend([8, 0, 2, 0, 0, 0, 7]);
        assert_eq!(answer, message(framed, strict, 3, &fields));
        // An answer has the format of a message.
        assert_eq!(both.parse(&answer), Parse::Message(answer.len()));

        let whole = message(framed, strict, ONEWAY, &[8, 0, 2, 0, 0, 0, 1]);
        assert_eq!(both.refuse(&whole, Refusal::MissingField), Answer::Nothing);
    }
    assert_eq!(both.refuse(b"GET / HTTP", Refusal::Malformed), Answer::Close(Vec::new()));
}

#[test]
fn what_is_no_thrift_is_refused() {
    let mut both = Both::new();
    let refused: [(&[u8], Refusal); 5] = [
        (&[0x80, 2, 0, 1], Refusal::UnknownVersion),
        (&[0, 0, 0, 0, 0], Refusal::Malformed),
        (&[0x7f, 0, 0, 0, 0], Refusal::TooLong),
        (b"GET / HTTP/1.1", Refusal::TooLong),
        (&[0x80, 1, 0, 1, 0xff, 0, 0, 0], Refusal::Malformed),
    ];
    for (bytes, why) in refused {
        assert_eq!(both.parse(bytes), Parse::Refused(why), "{bytes:x?}");
    }
    for depth in [10, 15, 16, 40] {
        let mut fields = vec![12, 0, 2];
        for _ in 1..depth {
            fields.extend([12, 0, 1]);
        }
        fields.extend(vec![0; depth]);
        let parsed = both.parse(&message(false, true, CALL, &fields));
        // The arguments are a struct themselves.
        assert_eq!(parsed == Parse::Refused(Refusal::TooComplex), depth >= 16, "{depth}: {parsed:?}");
    }
    for field in [[7, 0, 2, 0, 0, 0, 1, 0], [11, 0, 2, 0xff, 0, 0, 1, 0], [15, 0, 2, 5, 0, 0, 0, 1]] {
        assert_eq!(both.parse(&message(false, true, CALL, &field)), Parse::Refused(Refusal::Malformed));
    }
}
