//! Tests interoperability with Apache Thrift's library in both directions, in user space and in the
//! kernel. Needs root and python3-thrift.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use shunt_serve::service::trial::Trial;
use shunt_serve::service::{Answer, Key, Parse, Refusal, Service, Verdict, builtin};

/// Returns the library's output for these lines.
fn library(what: &str, lines: &str) -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/thrift_peer.py");
    // Debian's interpreter, which finds python3-thrift.
    let mut child = Command::new("/usr/bin/python3")
        .args([script, what])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 is there");
    child.stdin.take().expect("piped").write_all(lines.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{what}: is python3-thrift installed?");
    String::from_utf8(output.stdout).expect("text")
}

fn bytes_of(digits: &str) -> Vec<u8> {
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("digits"))
        .collect()
}

#[test]
fn the_library_and_the_forwarder_understand_each_other() {
    let builtin = builtin::named("thrift-forwarder").expect("a builtin");
    let mut trial = Trial::load(builtin.object).expect("root");
    let mut answers = String::new();
    let mut expected = String::new();
    let written = library("write", "");
    assert_eq!(written.lines().count(), 40);
    for line in written.lines() {
        let [form, kind, key, digits] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let message = bytes_of(digits);
        let framed = form.starts_with("framed");
        for end in 0..=message.len() {
            let early = framed && end >= 5 || end == message.len();
            let whole = if early { Parse::Message(message.len()) } else { Parse::More };
            assert_eq!(builtin.native.parse(&message[..end]), whole, "{end} of {line}");
            assert_eq!(trial.parse(&message[..end]).unwrap(), whole, "{end} of {line}");
        }
        let verdict = builtin.native.decide(&message);
        assert_eq!(trial.decide(&message).unwrap(), verdict, "{line}");
        let one_way = kind == "4";
        match key {
            "none" => {
                assert_eq!(verdict, Verdict::Refuse(Refusal::MissingField), "{line}");
                let answer = builtin.native.refuse(&message[..128], Refusal::MissingField);
                assert_eq!(trial.refuse(&message[..128], Refusal::MissingField).unwrap(), answer, "{line}");
                if one_way {
                    assert_eq!(answer, Answer::Nothing, "{line}");
                    continue;
                }
                let Answer::Reply(answer) = answer else { panic!("{answer:?} to {line}") };
                write!(answers, "{form} ").expect("a string");
                answer.iter().for_each(|byte| write!(answers, "{byte:02x}").expect("a string"));
                answers.push('\n');
                expected.push_str("3 77 7 shunt: the message has no key\n");
            }
            key => {
                let Verdict::Forward { key: found, one_way: found_one_way } = verdict else {
                    panic!("{line}")
                };
                assert_eq!(found_one_way, one_way, "{line}");
                match (found, key.parse::<i64>()) {
                    (Key::Number(number), Ok(key)) => assert_eq!(number as i64, key, "{line}"),
                    (Key::Bytes(range), Err(_)) => {
                        let key = if key == "empty" { "" } else { key };
                        assert_eq!(&message[range], key.as_bytes(), "{line}");
                    }
                    (found, _) => panic!("{found:?} of {line}"),
                }
            }
        }
    }
    assert_eq!(library("read", &answers), expected);
}
