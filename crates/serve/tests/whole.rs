//! Tests that clients get each answer whole, and that no connection is cut, however messages and their
//! ends arrive while the kernel serves the connection. Needs root.

#[allow(dead_code, reason = "each test uses parts of it")]
mod common;
#[path = "common/random.rs"]
mod random;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use common::{Backend, ENGINES, PATIENCE, Serving, message};
use random::Random;
use serde_json::Value;
use shunt_netns::Net;
use shunt_serve::engine::Engine;

/// Returns the request that stores an item, and the answer to a `get` of it without its last line.
fn item(key: &str, value: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let set = [format!("set {key} 0 0 {}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat();
    let got = [format!("VALUE {key} 0 {}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat();
    (set, got)
}

/// Stores items of these lengths under `k0`, `k1`, and so on. Returns the whole answers to `get`.
fn store(serving: &Serving, lengths: &[usize]) -> Vec<Vec<u8>> {
    let mut stream = serving.connect();
    let items = lengths.iter().enumerate().map(|(key, length)| {
        let (set, got) = item(&format!("k{key}"), &vec![b'a' + key as u8 % 26; *length]);
        stream.write_all(&set).unwrap();
        expect(&mut stream, b"STORED\r\n", "set");
        [&got[..], b"END\r\n"].concat()
    });
    items.collect()
}

fn expect(stream: &mut impl Read, expected: &[u8], what: &str) {
    let (mut got, mut at) = (vec![0; expected.len()], 0);
    while at < got.len() {
        match stream.read(&mut got[at..]) {
            Ok(0) => panic!("{what}: the connection ended after {at} of {} bytes", expected.len()),
            Ok(count) => at += count,
            Err(error) => panic!("{what}: {error} after {at} bytes of {}", expected.len()),
        }
    }
    let wrong = got.iter().zip(expected).position(|(got, expected)| got != expected);
    assert_eq!(wrong, None, "{what}: {:?}", String::from_utf8_lossy(&got[wrong.unwrap_or(0)..]));
}

#[test]
fn several_messages_behind_a_pending_answer_are_all_answered() {
    for engine in ENGINES {
        let serving = Serving::cache(Net::new(), engine, 16 << 20);
        let answers = store(&serving, &[10, 300]);
        let both = [&answers[0][..answers[0].len() - 5], &answers[1]].concat();
        let mut stream = serving.connect();
        for round in 0..300 {
            // The second segment often arrives before TCP has the answer to the first.
            let (several, then) = match round % 2 {
                0 => ("get k0\r\nget k1\r\n", answers.concat()),
                _ => ("get k0 k1\r\n", both.clone()),
            };
            stream.write_all(b"get k1\r\n").unwrap();
            stream.write_all(several.as_bytes()).unwrap();
            expect(&mut stream, &answers[1], "the first");
            expect(&mut stream, &then, several);
        }
    }
}

#[test]
fn an_answer_for_which_tcp_has_little_room_is_sent_whole() {
    let net = Net::new();
    net.words("sysctl -q -w net.ipv4.tcp_notsent_lowat=4096");
    net.words("ip link set lo mtu 1500");
    let serving = Serving::cache(net, Engine::Kernel, 16 << 20);
    let lengths: Vec<usize> = (0..20).map(|key| 300 + 85 * key).collect();
    let answers = store(&serving, &lengths);
    // Unlike the counts of messages, these are current.
    let hits = || {
        let status = serving.status();
        let counters = status["state"].as_array().unwrap();
        let hits = counters.iter().find(|counter| counter["name"] == "get_hits").unwrap();
        hits["value"].as_u64().unwrap()
    };
    for round in 0..8 {
        let mut stream: TcpStream = serving.net.inside(|| {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
            // With a small window, TCP sends small segments.
            socket.set_recv_buffer_size(4096).unwrap();
            socket.connect(&serving.address.into()).unwrap();
            socket.into()
        });
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let before = hits();
        let keys: Vec<usize> = (0..16).map(|at| (round * 7 + at * 13) % answers.len()).collect();
        for (at, key) in keys.iter().enumerate() {
            stream.write_all(format!("get k{key}\r\n").as_bytes()).unwrap();
            let began = Instant::now();
            while hits() != before + at as u64 + 1 {
                assert!(began.elapsed() < PATIENCE, "round {round}: message {at} is not answered");
            }
        }
        for (at, key) in keys.iter().enumerate() {
            expect(&mut stream, &answers[*key], &format!("round {round}, answer {at}"));
        }
    }
    let is_some = |status: &Value| status["kernel"]["messages"].as_u64().unwrap() > 0;
    serving.wait("the kernel has served messages", is_some);
}

#[test]
fn messages_right_before_the_end_are_answered() {
    for engine in ENGINES {
        let serving = Serving::cache(Net::new(), engine, 16 << 20);
        let answers = store(&serving, &[10, 300]);
        for _ in 0..100 {
            let mut stream = serving.connect();
            for _ in 0..2 {
                stream.write_all(b"get k0\r\n").unwrap();
                expect(&mut stream, &answers[0], "the first");
            }
            stream.write_all(b"get k1\r\n").unwrap();
            stream.write_all(b"get k0\r\nget k1\r\n").unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            expect(&mut stream, &[&answers[1][..], &answers[0], &answers[1]].concat(), "the last");
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
    }
}

/// A client that makes up messages, and knows their answers.
struct Client {
    service: &'static str,
    number: u64,
    random: Random,
    /// The answers to `get` of the items that this client has stored.
    stored: HashMap<u64, Vec<u8>>,
    messages: u32,
}

impl Client {
    fn length(&mut self) -> usize {
        let most = [1, 10, 300, 2000, 9000][self.random.below(5) as usize];
        // Around the longest answer of the kernel, one in eight.
        let (from, most) = if self.random.below(8) == 0 { (1900, 200) } else { (1, most) };
        (from + self.random.below(most)) as usize
    }

    /// Returns a message and its answer.
    fn message(&mut self) -> (Vec<u8>, Vec<u8>) {
        self.messages += 1;
        if self.service != "cache" {
            let length = self.length();
            let message = message(self.random.below(3) as u32, self.messages, length);
            return (message.clone(), message);
        }
        let keys = [self.random.below(40), self.random.below(40)];
        let name = |key: u64| format!("{}-{key}-{}", self.number, "x".repeat(key as usize));
        if self.random.below(12) == 0 {
            let name = name(keys[0]);
            let value = vec![b'a' + self.messages as u8 % 26; self.length()];
            let (set, got) = item(&name, &value);
            self.stored.insert(keys[0], got);
            return (set, b"STORED\r\n".to_vec());
        }
        let keys = &keys[..if self.random.below(16) == 0 { 2 } else { 1 }];
        let names: String = keys.iter().map(|key| format!(" {}", name(*key))).collect();
        let values: Vec<u8> = keys.iter().filter_map(|key| self.stored.get(key)).flatten().copied().collect();
        (format!("get{names}\r\n").into_bytes(), [&values[..], b"END\r\n"].concat())
    }

    fn pause(&mut self) {
        match self.random.below(12) {
            0 => std::thread::sleep(Duration::from_micros(self.random.below(800))),
            1 => std::thread::yield_now(),
            _ => {}
        }
    }

    /// Writes messages one by one, together, or cut anywhere.
    fn write(&mut self, mut stream: &TcpStream, messages: &[Vec<u8>]) {
        let all = messages.concat();
        let most = [3, 20, 60, 300, 3000][self.random.below(5) as usize];
        let how = self.random.below(5);
        let (mut at, mut next) = (0, messages.iter());
        while at < all.len() {
            let length = match how {
                0 => all.len(),
                1 => (1 + self.random.below(most) as usize).min(all.len() - at),
                _ => next.next().expect("bytes are left").len(),
            };
            stream.write_all(&all[at..at + length]).unwrap();
            at += length;
            self.pause();
        }
    }

    /// Sends so many messages, and checks their answers. With `ends` the connection ends with them.
    fn ask(&mut self, stream: &TcpStream, count: u64, ends: bool) {
        let (messages, answers): (Vec<_>, Vec<_>) = (0..count).map(|_| self.message()).unzip();
        let what = format!("{} {}: {count} messages", self.service, self.number);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut reader = stream;
                expect(&mut reader, &answers.concat(), &what);
                if ends {
                    assert_eq!(reader.read(&mut [0]).unwrap(), 0, "{what}");
                }
            });
            self.write(stream, &messages);
            if ends {
                stream.shutdown(Shutdown::Write).unwrap();
            }
        });
    }
}

#[test]
fn random_messages_in_random_pieces_are_all_answered() {
    for (service, engine) in [
        ("cache", Engine::Kernel),
        ("cache", Engine::Auto),
        ("length-echo", Engine::Kernel),
        ("length-router", Engine::Kernel),
        ("length-router", Engine::Auto),
    ] {
        let net = Net::new();
        let backends: Vec<Backend> = (0..3).map(|at| Backend::start(&net, 5001 + at)).collect();
        let addresses: Vec<_> = backends.iter().map(|backend| backend.address).collect();
        let serving = match service {
            "cache" => Serving::cache(net, engine, 64 << 20),
            "length-router" => Serving::start(net, service, engine, &addresses),
            _ => Serving::start(net, service, engine, &[]),
        };
        std::thread::scope(|scope| {
            for number in 0..3 {
                let serving = &serving;
                scope.spawn(move || {
                    let random = Random(number * 2 + 1);
                    let mut client = Client { service, number, random, stored: HashMap::new(), messages: 0 };
                    for _ in 0..2 {
                        let stream = serving.connect();
                        for _ in 0..6 {
                            let count = 1 + client.random.below(64);
                            client.ask(&stream, count, false);
                            (0..client.random.below(40)).for_each(|_| client.ask(&stream, 1, false));
                        }
                        let (count, ends) = (1 + client.random.below(8), client.random.below(2) == 0);
                        client.ask(&stream, count, ends);
                    }
                });
            }
        });
        if engine == Engine::Kernel {
            let is_enough = |status: &Value| status["kernel"]["messages"].as_u64().unwrap() > 100;
            serving.wait("the kernel has served messages", is_enough);
        }
        let status = serving.status();
        assert_eq!(status["drops"], serde_json::json!({}), "{status:#}");
    }
}
