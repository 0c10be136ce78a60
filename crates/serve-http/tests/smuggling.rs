//! Sends the corpus of smuggled requests to the proxy. The backend must see exactly the requests
//! that the proxy has forwarded, each with the framing of a strict parser.

mod common;

use std::io::{Read, Write};
use std::net::Shutdown;

use common::{Lab, backends, ok};

struct Vector {
    name: &'static str,
    statuses: Vec<u16>,
    bytes: Vec<u8>,
}

/// Parses a line of the corpus.
fn vector(line: &'static str) -> Vector {
    let (name, rest) = line.split_once(' ').expect("a name");
    let (statuses, text) = rest.split_once(" \"").expect("statuses and bytes");
    let statuses = statuses.split(' ').map(|status| status.parse().expect("a status")).collect();
    Vector { name, statuses, bytes: unescape(text.strip_suffix('"').expect("a quotation mark").as_bytes()) }
}

fn unescape(text: &[u8]) -> Vec<u8> {
    let (mut out, mut at) = (Vec::new(), 0);
    let hex = |at: usize| (text[at] as char).to_digit(16).expect("a digit") as u8;
    while at < text.len() {
        match &text[at..] {
            [b'\\', b'x', ..] => {
                out.push(hex(at + 2) << 4 | hex(at + 3));
                at += 4;
            }
            [b'\\', char, ..] => {
                out.push(match char {
                    b'r' => b'\r',
                    b'n' => b'\n',
                    b't' => b'\t',
                    b'0' => 0,
                    other => *other,
                });
                at += 2;
            }
            [b'{', char, b'*', rest @ ..] => {
                let end = rest.iter().position(|byte| *byte == b'}').expect("a bracket");
                let count = std::str::from_utf8(&rest[..end]).expect("digits").parse().expect("a number");
                out.extend(vec![*char; count]);
                at += end + 4;
            }
            [byte, ..] => {
                out.push(*byte);
                at += 1;
            }
            [] => unreachable!("the loop has ended"),
        }
    }
    out
}

fn corpus() -> Vec<Vector> {
    let lines = include_str!("smuggling.txt").lines();
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(vector).collect()
}

#[test]
fn corpus_reaches_the_backend_only_as_the_proxy_has_understood_it() {
    let mut lab = Lab::new();
    let seen = lab.replying(9001, |_| ok(""));
    lab.start(&backends(&[9001]));
    let corpus = corpus();
    assert!(corpus.len() > 200);
    let mut wrong = Vec::new();
    for Vector { name, statuses, bytes } in &corpus {
        let mut stream = lab.connect();
        // A refusal may end the connection before everything is sent.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut replies = Vec::new();
        stream.read_to_end(&mut replies).unwrap_or_else(|error| panic!("{name}: {error}"));
        let text = String::from_utf8_lossy(&replies);
        let got: Vec<u16> = text
            .lines()
            .filter_map(|line| line.strip_prefix("HTTP/1.1 "))
            .map(|line| line[..3].parse().expect("a status"))
            .collect();
        let requests = seen.take();
        let forwarded = statuses.iter().filter(|status| **status == 200).count();
        let targets: Vec<&str> = requests.iter().map(|request| request.line.as_str()).collect();
        let is_canonical = requests.iter().all(|request| {
            let count = |name: &str| {
                request.fields.iter().filter(|(other, _)| other.eq_ignore_ascii_case(name)).count()
            };
            let framings = count("content-length") + count("transfer-encoding");
            count("host") == 1
                && framings <= 1
                && request.line.ends_with(" HTTP/1.1")
                && !request.line.contains("smuggled")
        });
        if got != *statuses || requests.len() != forwarded || !is_canonical {
            wrong.push(format!("{name}: {got:?} instead of {statuses:?}; the backend saw {targets:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    lab.stop();
}

#[test]
fn corpus_is_refused_in_the_same_way_byte_by_byte() {
    let mut lab = Lab::new();
    let seen = lab.replying(9001, |_| ok(""));
    lab.start(&backends(&[9001]));
    for Vector { name, statuses, bytes } in corpus().iter().filter(|vector| vector.bytes.len() < 300) {
        let mut stream = lab.connect();
        for byte in bytes {
            if stream.write_all(&[*byte]).is_err() {
                break;
            }
        }
        let _ = stream.shutdown(Shutdown::Write);
        let mut replies = Vec::new();
        let _ = stream.read_to_end(&mut replies);
        let forwarded = statuses.iter().filter(|status| **status == 200).count();
        let requests = seen.take();
        assert_eq!(requests.len(), forwarded, "{name}: {requests:?}");
        let text = String::from_utf8_lossy(&replies);
        // The connection may be reset before the client has read a refusal, since it still sends.
        let count = text.matches("HTTP/1.1 ").count();
        assert!(count == statuses.len() || count == forwarded, "{name}: {text}");
    }
    lab.stop();
}
