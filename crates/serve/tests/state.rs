//! Tests that the state of a service does not depend on the engine: each message is counted exactly
//! once, in the kernel, in user space, and while a connection moves between them. Needs root.

#[allow(dead_code, reason = "the service has no backends")]
mod common;
#[path = "common/random.rs"]
mod random;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use common::{ENGINES, Serving};
use random::Random;
use shunt_netns::Net;
use shunt_serve::engine::{Engine, try_kernel};
use shunt_serve::service::builtin;
use shunt_serve::service::store::{Session, Store};
use shunt_serve::service::trial::Trial;
use shunt_serve::service::{Service, Verdict};

/// A client of line-counter, with what it expects.
struct Client {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
    name: String,
    lines: u64,
    expected: Vec<String>,
}

impl Client {
    fn new(serving: &Serving, name: &str) -> Client {
        let stream = serving.connect();
        let reader = BufReader::new(stream.try_clone().unwrap());
        Client { stream, reader, name: name.to_owned(), lines: 0, expected: Vec::new() }
    }

    /// Returns a line that is echoed, or one that asks for the counts.
    fn line(&mut self, asks: bool) -> String {
        self.lines += 1;
        let (name, lines) = (&self.name, self.lines);
        let line = if asks { format!("{name} ?\n") } else { format!("{name} line {lines}\n") };
        let answer = if asks { format!("{lines} lines, this is {lines}\n") } else { line.clone() };
        self.expected.push(answer);
        line
    }

    fn check(&mut self, serving: &Serving) {
        for expected in std::mem::take(&mut self.expected) {
            let mut got = String::new();
            let read = self.reader.read_line(&mut got);
            assert!(got == expected, "{got:?} instead of {expected:?}, {read:?}: {:#}", serving.status());
        }
    }
}

/// Sends lines alone, together and in pieces, so that the connection moves often.
fn talk(serving: &Serving, name: &str, seed: u64, rounds: u64) -> u64 {
    let (mut client, mut random) = (Client::new(serving, name), Random(seed));
    for _ in 0..rounds {
        for _ in 0..20 + random.below(40) {
            let asks = random.below(30) == 0;
            let line = client.line(asks);
            client.stream.write_all(line.as_bytes()).unwrap();
            client.check(serving);
        }
        let lines: Vec<String> = (0..random.below(50)).map(|at| client.line(at % 17 == 3)).collect();
        for piece in lines.concat().as_bytes().chunks(1 + random.below(300) as usize) {
            client.stream.write_all(piece).unwrap();
        }
        client.check(serving);
    }
    client.lines
}

#[test]
fn every_line_is_counted_once_wherever_it_is_served() {
    for engine in ENGINES {
        let serving = Serving::start(Net::new(), "line-counter", engine, &[]);
        let names: Vec<String> = (0..4).map(|seed| format!("client-{seed}")).collect();
        let lines: Vec<u64> = std::thread::scope(|scope| {
            let serving = &serving;
            let clients: Vec<_> = (0..)
                .zip(&names)
                .map(|(seed, name)| scope.spawn(move || talk(serving, name, seed, 30)))
                .collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        let status = serving.status();
        let part =
            |name| status["state"].as_array().unwrap().iter().find(|part| part["name"] == name).unwrap();
        assert_eq!(part("lines")["value"], lines.iter().sum::<u64>(), "{status:#}");
        assert_eq!(part("lengths")["count"], lines.iter().sum::<u64>(), "{status:#}");
        assert_eq!(part("clients")["entries"], 4, "{status:#}");
        assert_eq!(part("clients")["capacity"], 4096, "{status:#}");
        let dump = serving.dump("clients");
        for (name, lines) in names.iter().zip(lines) {
            let mut entries = dump["entries"].as_array().unwrap().iter();
            let entry = entries.find(|entry| entry["key"] == **name).unwrap();
            assert_eq!(entry["value"]["lines"], lines, "{dump:#}");
        }
        assert_eq!(serving.dump("by_words")["entries"].as_array().unwrap().len(), 4);
        let moves = status["moves"].as_array().unwrap().len();
        let in_kernel = status["kernel"]["messages"].as_u64().unwrap();
        // On a busy machine, the automatic engine stays in user space.
        let is_right = match engine {
            Engine::User => moves == 0,
            Engine::Kernel => moves > 0 && in_kernel >= 100,
            Engine::Auto => true,
        };
        assert!(is_right, "{status:#}");
    }
}

/// Runs random lines of several connections in both halves, and compares verdicts and state.
#[test]
fn both_halves_leave_the_same_state() {
    let builtin = builtin::named("line-counter").expect("a builtin");
    try_kernel(builtin.object, true).expect("root");
    let size = builtin.native.state();
    let (user, kernel) = (Store::new(size, false).unwrap(), Store::new(size, true).unwrap());
    let native = builtin.native.with_store(user.clone());
    let mut trial = Trial::load(builtin.object).unwrap().with_store(&kernel).unwrap();
    let mut sessions = vec![(Session::default(), Session::default()); 5];
    let mut random = Random(7);
    for step in 0..40_000 {
        let at = random.below(sessions.len() as u64) as usize;
        let number = random.below(9000);
        let line = match random.below(4) {
            0 => format!("name-{} ?\n", number % 50),
            1 => "\n".to_owned(),
            _ => format!("name-{number} something of {}\n", "x".repeat(random.below(200) as usize)),
        };
        let (in_user, in_kernel) = &mut sessions[at];
        let verdicts = [
            native.decide_in(in_user, line.as_bytes()),
            trial.decide_in(in_kernel, line.as_bytes()).unwrap(),
        ];
        assert_eq!(verdicts[0], verdicts[1], "{line:?}");
        assert_eq!(in_user, in_kernel, "{line:?}");
        if step % 1000 == 0 {
            assert!(user.snapshot() == kernel.snapshot(), "after {step} lines");
        }
    }
    assert!(user.snapshot() == kernel.snapshot());
    assert!(matches!(native.decide(b"name-1 ?\n"), Verdict::Reply(_)));
}

/// Without a detour through user space: the service's own answers are longer than its messages.
#[test]
fn the_kernel_sends_the_answers_of_a_service() {
    for engine in [Engine::Kernel, Engine::Auto] {
        let serving = Serving::start(Net::new(), "line-counter", engine, &[]);
        let mut client = serving.connect();
        let ask = |client: &mut TcpStream, number: usize, line: usize| {
            client.write_all(b"anna ?\n").unwrap();
            let wanted = format!("{number} lines, this is {line}\n");
            let mut got = vec![0; wanted.len()];
            client.read_exact(&mut got).unwrap();
            assert_eq!(String::from_utf8_lossy(&got), wanted);
        };
        (1..=500).for_each(|number| ask(&mut client, number, number));
        // A message in two pieces is answered by user space, and those after it by either half.
        for number in 501..=600 {
            client.write_all(b"anna").unwrap();
            client.write_all(if number % 7 == 0 { b" ?\nbert\n" } else { b" ?\n" }).unwrap();
            let bert = if number % 7 == 0 { "bert\n" } else { "" };
            let line = number + (501..number).filter(|number| number % 7 == 0).count();
            let wanted = format!("{number} lines, this is {line}\n{bert}");
            let mut got = vec![0; wanted.len()];
            client.read_exact(&mut got).unwrap();
            assert_eq!(String::from_utf8_lossy(&got), wanted);
        }
        // User space answers until the kernel has the connection, which takes longer on a busy
        // machine. With `auto` it may answer all of them there.
        let others = (501..=600).filter(|number| number % 7 == 0).count();
        let mut number = 600;
        while engine == Engine::Kernel && serving.status()["kernel"]["messages"].as_u64().unwrap() < 440 {
            assert!(number < 100_000, "the kernel does not answer: {:#}", serving.status());
            for _ in 0..100 {
                number += 1;
                ask(&mut client, number, number + others);
            }
        }
    }
}
