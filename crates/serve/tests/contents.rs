//! Tests the content stores of services: both halves have the same contents, answers are whole
//! while others replace a content, and backends and files fill the stores. Needs root.

#[allow(dead_code, reason = "not every helper is needed")]
mod common;
#[path = "common/random.rs"]
mod random;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use common::{ENGINES, Serving};
use random::Random;
use serde_json::Value;
use shunt_netns::Net;
use shunt_serve::engine::{Engine, Files, Request};
use shunt_serve::service::store::{Session, Store};
use shunt_serve::service::trial::Trial;
use shunt_serve::service::{Answer, Service, Verdict, builtin};

/// Runs random commands in both halves, and compares verdicts and state.
#[test]
fn both_halves_have_the_same_contents() {
    let builtin = builtin::named("line-cache").expect("a builtin");
    let size = builtin.native.state();
    let (user, kernel) = (Store::new(size, false).unwrap(), Store::new(size, true).unwrap());
    let native = builtin.native.with_store(user.clone());
    let mut trial = Trial::load(builtin.object).unwrap().with_store(&kernel).unwrap();
    let mut session = Session::default();
    let mut random = Random(11);
    let (mut hits, mut stored) = (0, 0);
    for step in 0..20_000 {
        let key = format!("key-{}", random.below(3000));
        let line = match random.below(5) {
            0 => format!("del {key}\n"),
            1 | 2 => format!("get {key}\n"),
            _ => format!("put {key} {}\n", "x".repeat(random.below(2900) as usize)),
        };
        let verdict = native.decide_in(&mut session, line.as_bytes());
        assert_eq!(verdict, trial.decide_in(&mut session, line.as_bytes()).unwrap(), "{line:?}");
        match verdict {
            Verdict::Reply(bytes) if line.starts_with("get") => {
                hits += 1;
                let text = bytes.strip_suffix(b"\n").unwrap();
                assert!(text.iter().all(|byte| *byte == b'x') || text.starts_with(b"from a backend "));
            }
            _ => stored += 1,
        }
        if step % 1000 == 0 {
            let reply = format!("from a backend {step}\n");
            let (message, reply) = (line.as_bytes(), reply.as_bytes());
            let answers = [
                native.replied_in(&mut session, message, reply),
                trial.replied_in(&mut session, message, reply).unwrap(),
            ];
            assert_eq!(answers, [Answer::Nothing, Answer::Nothing]);
            assert!(user.snapshot() == kernel.snapshot(), "after {step} lines");
        }
    }
    assert!(user.snapshot() == kernel.snapshot());
    assert!(hits > 1000 && stored > 1000, "{hits} {stored}");
}

struct Client {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Client {
    fn new(serving: &Serving) -> Client {
        let stream = serving.connect();
        let reader = BufReader::new(stream.try_clone().unwrap());
        Client { stream, reader }
    }

    fn send(&mut self, line: &str) {
        self.stream.write_all(line.as_bytes()).unwrap();
    }

    fn read(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line
    }

    fn ask(&mut self, line: &str) -> String {
        self.send(line);
        self.read()
    }
}

/// Returns the row of a part of the state.
fn part(status: &Value, name: &str) -> Value {
    let parts = status["state"].as_array().unwrap();
    parts.iter().find(|part| part["name"] == name).unwrap().clone()
}

/// Stores, reads and deletes, alone and several together. Each client has keys that no other one
/// uses, so it knows each answer; one key belongs to all, and its contents are one letter repeated.
fn talk(serving: &Serving, name: &str, seed: u64, rounds: u64) {
    let (mut client, mut random) = (Client::new(serving), Random(seed));
    let mut own: Vec<Option<String>> = vec![None; 8];
    for _ in 0..rounds {
        // Either messages with one outstanding, or several in one segment.
        let together = random.below(4) == 0;
        let (mut sent, mut expected) = (String::new(), Vec::new());
        for _ in 0..1 + random.below(30) {
            let key = random.below(8) as usize;
            let length = random.below(3000) as usize;
            let (line, answer) = match random.below(8) {
                0 => {
                    own[key] = Some(format!("{name}-{length}-{}\n", "y".repeat(length)));
                    let line = format!("put {name}-{key} {}", own[key].as_ref().unwrap());
                    (line, Some("ok\n".to_owned()))
                }
                1 => {
                    own[key] = None;
                    (format!("del {name}-{key}\n"), Some("ok\n".to_owned()))
                }
                2 => {
                    let letter = char::from(b'a' + random.below(26) as u8);
                    let text = String::from(letter).repeat(1 + random.below(1500) as usize);
                    (format!("put shared {text}\n"), Some("ok\n".to_owned()))
                }
                3 => ("get shared\n".to_owned(), None),
                _ => (
                    format!("get {name}-{key}\n"),
                    Some(own[key].clone().unwrap_or_else(|| "none\n".to_owned())),
                ),
            };
            if together {
                sent += &line;
                expected.push((line, answer));
            } else {
                let got = client.ask(&line);
                check(&line, answer.as_deref(), &got, serving);
            }
        }
        client.send(&sent);
        for (line, answer) in expected {
            let got = client.read();
            check(&line, answer.as_deref(), &got, serving);
        }
    }
}

fn check(line: &str, expected: Option<&str>, got: &str, serving: &Serving) {
    let is_right = match expected {
        Some(expected) => got == expected,
        None => {
            let text = got.strip_suffix('\n').unwrap_or("two letters: ab");
            got == "none\n" || text.bytes().all(|byte| byte == text.as_bytes()[0])
        }
    };
    assert!(is_right, "{line:?}: {got:?} instead of {expected:?}: {:#}", serving.status());
}

#[test]
fn answers_are_whole_in_every_engine() {
    for engine in ENGINES {
        let serving = Serving::start(Net::new(), "line-cache", engine, &[]);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let serving = &serving;
                scope.spawn(move || talk(serving, &format!("client-{seed}"), seed, 60));
            }
        });
        let status = serving.status();
        assert_eq!(part(&status, "contents")["capacity"], 1024, "{status:#}");
        assert_eq!(part(&status, "contents")["refused"], 0, "{status:#}");
        let dump = serving.dump("contents");
        let entries = dump["entries"].as_array().unwrap();
        assert_eq!(part(&status, "contents")["entries"], entries.len(), "{status:#}");
        // Nothing is pinned any more: each entry can be replaced and deleted.
        let mut client = Client::new(&serving);
        for entry in entries {
            let key = entry["key"].as_str().unwrap();
            assert_eq!(client.ask(&format!("put {key} new\n")), "ok\n");
            assert_eq!(client.ask(&format!("get {key}\n")), "new\n");
            assert_eq!(client.ask(&format!("del {key}\n")), "ok\n");
            assert_eq!(client.ask(&format!("get {key}\n")), "none\n");
        }
        assert_eq!(part(&serving.status(), "contents")["entries"], 0);
        if engine == Engine::Kernel {
            assert!(status["kernel"]["messages"].as_u64().unwrap() > 100, "{status:#}");
        }
    }
}

#[test]
fn a_full_store_evicts_and_counts_that() {
    for engine in [Engine::User, Engine::Kernel] {
        let serving = Serving::start(Net::new(), "line-cache", engine, &[]);
        let mut client = Client::new(&serving);
        for number in 0..3000 {
            assert_eq!(client.ask(&format!("put key-{number} {number}\n")), "ok\n");
        }
        let found = (0..3000).filter(|number| client.ask(&format!("get key-{number}\n")) != "none\n").count();
        let contents = part(&serving.status(), "contents");
        assert_eq!(contents["entries"], found, "{contents}");
        assert_eq!(contents["evicted"], 3000 - found, "{contents}");
        assert!((512..=1024).contains(&found), "{contents}");
        assert_eq!(client.ask(&format!("put long {}\n", "x".repeat(4096))), "error: too long\n");
        assert_eq!(part(&serving.status(), "contents")["refused"], 1);
    }
}

/// A backend that answers `get KEY` with a line of the key and the number of requests so far.
fn backend(net: &Net, port: u16) -> (SocketAddr, Arc<AtomicU64>) {
    let address: SocketAddr = ([127, 0, 0, 1], port).into();
    let listener = net.inside(|| TcpListener::bind(address)).unwrap();
    let requests = Arc::new(AtomicU64::new(0));
    let counted = requests.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let counted = counted.clone();
            std::thread::spawn(move || {
                let mut writer = stream.try_clone().unwrap();
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let number = counted.fetch_add(1, SeqCst) + 1;
                    let key = line.split(' ').nth(1).unwrap_or_default().to_owned();
                    if writer.write_all(format!("{key} {number}\n").as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    (address, requests)
}

#[test]
fn a_backends_reply_is_stored() {
    for engine in ENGINES {
        let net = Net::new();
        let (address, requests) = backend(&net, 5001);
        let serving = Serving::start(net, "line-cache", engine, &[address]);
        let mut client = Client::new(&serving);
        for number in 1..=200 {
            let key = format!("some-key-{number}");
            let expected = format!("{key} {number}\n");
            for _ in 0..3 {
                assert_eq!(client.ask(&format!("get {key}\n")), expected, "{:#}", serving.status());
            }
        }
        // Several together: one reply for each.
        let lines: String = (1000..1050).map(|number| format!("get other-{number}\n")).collect();
        client.send(&lines);
        for number in 1000..1050 {
            assert!(client.read().starts_with(&format!("other-{number} ")));
        }
        assert_eq!(requests.load(SeqCst), 250);
        let status = serving.status();
        assert_eq!(part(&status, "misses")["value"], 250, "{status:#}");
        assert_eq!(part(&status, "hits")["value"], 400, "{status:#}");
        if engine == Engine::Kernel {
            serving.wait("the kernel has the client", |status| status["in-kernel"] == 1);
            let before = serving.status()["kernel"]["messages"].as_u64().unwrap();
            for _ in 0..100 {
                assert_eq!(client.ask("get some-key-7\n"), "some-key-7 7\n");
            }
            // Its counts are read twice a second.
            serving.wait("the kernel has answered", |status| {
                status["kernel"]["messages"].as_u64().unwrap() > before
            });
        }
    }
}

#[test]
fn files_fill_a_store_and_a_reload_reads_them_again() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
    std::fs::create_dir(directory.path().join("sub")).unwrap();
    write("one", "first\n");
    write("sub/two", "second\n");
    let files = Files { store: "contents".to_owned(), path: directory.path().to_owned() };
    for engine in [Engine::User, Engine::Kernel] {
        write("one", "first\n");
        write("sub/two", "second\n");
        let serving = Serving::filled(Net::new(), "line-cache", engine, std::slice::from_ref(&files), &[]);
        let mut client = Client::new(&serving);
        assert_eq!(client.ask("get one\n"), "first\n");
        assert_eq!(client.ask("get sub/two\n"), "second\n");
        assert_eq!(client.ask("put own text\n"), "ok\n");
        write("one", "changed\n");
        std::fs::remove_file(directory.path().join("sub/two")).unwrap();
        serving.change(Request::Reload).unwrap();
        assert_eq!(client.ask("get one\n"), "changed\n");
        assert_eq!(client.ask("get sub/two\n"), "none\n");
        assert_eq!(client.ask("get own\n"), "text\n");
        write("one", &"x".repeat(5000));
        let why = serving.change(Request::Reload).unwrap_err();
        assert!(why.contains("4096 at most"), "{why}");
        assert_eq!(client.ask("get one\n"), "changed\n");
    }
}

#[test]
fn a_service_registers_backends_where_it_is_permitted() {
    for engine in ENGINES {
        let net = Net::new();
        let (address, requests) = backend(&net, 5001);
        let serving = Serving::registering(net, "line-cache", engine, "127.0.0.1/32");
        let mut client = Client::new(&serving);
        assert_eq!(client.ask("get first\n"), "none\n");
        assert_eq!(client.ask(&format!("add {address}\n")), "ok\n");
        serving.wait("the backend is there", |status| status["registrations"]["done"] == 1);
        // The threads have the new list a little later.
        let mut number = 0;
        let mut ask_until = |client: &mut Client, is_stored: bool| {
            loop {
                number += 1;
                assert!(number < 10_000, "{:#}", serving.status());
                if (client.ask(&format!("get key-{number}\n")) != "none\n") == is_stored {
                    return;
                }
            }
        };
        ask_until(&mut client, true);
        // Twice, elsewhere, at a Unix socket, and nowhere.
        for wrong in [&address.to_string(), "127.0.0.2:5001", "unix:/run/some", "nowhere"] {
            assert_eq!(client.ask(&format!("add {wrong}\n")), "ok\n");
        }
        serving.wait("they are refused", |status| status["registrations"]["refused"] == 4);
        assert_eq!(client.ask(&format!("remove {address}\n")), "ok\n");
        serving.wait("the backend is gone", |status| status["registrations"]["done"] == 2);
        ask_until(&mut client, false);
        assert!(requests.load(SeqCst) > 0);
        assert_eq!(serving.status()["backends"].as_array().unwrap().len(), 0);
    }
}

#[test]
fn backends_without_a_place_in_the_kernel_are_named() {
    let net = Net::new();
    let backends: Vec<_> = (5001..5004).map(|port| backend(&net, port)).collect();
    let serving = Serving::start(net, "line-cache", Engine::Kernel, &[backends[0].0]);
    for (address, _) in &backends[1..] {
        serving.change(Request::Register { address: address.to_string(), weight: 1 }).unwrap();
    }
    let mut client = Client::new(&serving);
    let is_without =
        |status: &Value| status["moves"].as_array().unwrap().iter().any(|one| one["reason"] == "no-place");
    let mut number = 0;
    while !is_without(&serving.status()) {
        assert!(number < 100, "{:#}", serving.status());
        serving.wait("the kernel has the client", |status| status["in-kernel"] == 1);
        assert!(client.ask(&format!("get key-{number}\n")).starts_with(&format!("key-{number} ")));
        number += 1;
    }
    let status = serving.status();
    let places: Vec<bool> =
        status["backends"].as_array().unwrap().iter().map(|one| one["kernel"] == true).collect();
    assert_eq!(places, [true, false, false], "{status:#}");
}
