//! Tests both engines and the moves between them: each message gets one answer, whole and in order,
//! however the bytes are segmented.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use common::{Backend, ENGINES, Serving, message, read_message};
use serde_json::Value;
use shunt_netns::Net;
use shunt_serve::engine::Engine;

#[test]
fn an_echo_gives_back_every_byte() {
    for engine in ENGINES {
        let serving = Serving::start(Net::new(), "echo", engine, &[]);
        let mut client = serving.connect();
        let mut exchange = |number: u32| {
            let sent = message(0, number, number as usize * 7 % 3000);
            client.write_all(&sent).unwrap();
            let mut got = vec![0; sent.len()];
            client
                .read_exact(&mut got)
                .unwrap_or_else(|error| panic!("{engine:?} {number}: {error} {:#}", serving.status()));
            assert_eq!(got, sent);
        };
        (0..400).for_each(&mut exchange);
        match engine {
            Engine::User => assert_eq!(serving.status()["kernel"]["messages"], 0),
            _ => serving.until_in_kernel(|| exchange(1)),
        }
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        serving.wait("it is over", |status| status["open-connections"] == 0);
    }
}

#[test]
fn a_client_that_comes_before_the_kernel_half_is_loaded_moves_into_it() {
    // The first exchange may come too late on a busy machine.
    let is_early = (0..20).any(|_| {
        let serving = Serving::early(Net::new(), "length-echo");
        let mut client = serving.connect();
        let mut exchange = |number: u32| {
            let sent = message(0, number, 200);
            client.write_all(&sent).unwrap();
            assert_eq!(read_message(&mut client).unwrap(), sent);
        };
        exchange(0);
        let is_early = serving.status()["kernel-half"] == "loading";
        serving.until_in_kernel(|| exchange(1));
        is_early
    });
    assert!(is_early, "the kernel half was always there before the first answer");
}

#[test]
fn one_at_a_time_through_the_router() {
    for engine in ENGINES {
        let net = Net::new();
        let backends: Vec<Backend> = (0..3).map(|at| Backend::start(&net, 5000 + at)).collect();
        let addresses: Vec<_> = backends.iter().map(|backend| backend.address).collect();
        let serving = Serving::start(net, "length-router", engine, &addresses);
        let mut client = serving.connect();
        let mut exchange = |number: u32| {
            let sent = message(number % 3, number, number as usize * 13 % 2000);
            client.write_all(&sent).unwrap();
            let got = read_message(&mut client)
                .unwrap_or_else(|error| panic!("{engine:?} {number}: {error} {:#}", serving.status()));
            assert_eq!(got, sent);
        };
        let mut count = 0;
        let mut rounds = |many: u32| {
            (count..count + 3 * many).for_each(&mut exchange);
            count += 3 * many;
        };
        rounds(200);
        if engine == Engine::Auto {
            serving.until(|| rounds(1), |status| !status["moves"].as_array().unwrap().is_empty());
        }
        let status = serving.status();
        let of = |engine: &str| status[engine]["messages"].as_u64().unwrap();
        let is_right = match engine {
            Engine::User => of("kernel") == 0,
            Engine::Kernel => of("kernel") > 0,
            // The first message after each move may be too long for the kernel.
            Engine::Auto => status["moves"].as_array().is_some_and(|moves| !moves.is_empty()),
        };
        assert!(is_right, "{status:#}");
        for backend in &backends {
            assert_eq!(backend.messages.load(SeqCst), u64::from(count / 3));
        }
        drop(client);
        serving.wait("it is over", |status| status["open-connections"] == 0);
        let status = serving.status();
        assert_eq!(
            status["user"]["messages"].as_u64().unwrap() + status["kernel"]["messages"].as_u64().unwrap(),
            u64::from(count),
            "{status:#}"
        );
    }
}

/// Starts the router with `count` backends, which answer each message with itself.
fn router(engine: Engine, count: u16) -> (Serving, Vec<Backend>) {
    let net = Net::new();
    let backends: Vec<Backend> = (0..count).map(|at| Backend::start(&net, 5000 + at)).collect();
    let addresses: Vec<_> = backends.iter().map(|backend| backend.address).collect();
    (Serving::start(net, "length-router", engine, &addresses), backends)
}

fn expect(client: &mut TcpStream, serving: &Serving, wanted: &[u8], what: &str) {
    let got = read_message(client).unwrap_or_else(|error| panic!("{what}: {error} {:#}", serving.status()));
    assert!(got == wanted, "{what}: {} bytes instead of {}", got.len(), wanted.len());
}

/// Sends messages and reads their answers, one after another.
fn one_by_one(client: &mut TcpStream, serving: &Serving, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let sent = message(number, number, number as usize % 300);
        client.write_all(&sent).unwrap();
        expect(client, serving, &sent, &format!("message {number}"));
    }
}

#[test]
fn messages_cut_at_every_byte() {
    for engine in ENGINES {
        let (serving, _backends) = router(engine, 2);
        let mut client = serving.connect();
        let mut number = 0;
        let pair = |number| [message(number, number, 5), message(number + 1, number + 1, 9)];
        for cut in 1..pair(0).concat().len() {
            // The kernel should own the conversation, if it can, when the next message is cut.
            one_by_one(&mut client, &serving, number..number + 2);
            number += 2;
            let (two, bytes) = (pair(number), pair(number).concat());
            client.write_all(&bytes[..cut]).unwrap();
            if cut % 3 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
            client.write_all(&bytes[cut..]).unwrap();
            for sent in two {
                expect(&mut client, &serving, &sent, &format!("{engine:?}, cut at {cut}"));
            }
            number += 2;
        }
        let status = serving.status();
        assert_eq!(status["drops"], serde_json::json!({}), "{status:#}");
    }
}

#[test]
fn back_and_forth_under_load() {
    for engine in ENGINES {
        let (serving, _backends) = router(engine, 3);
        std::thread::scope(|scope| {
            for seed in 0..4u32 {
                let serving = &serving;
                scope.spawn(move || {
                    let mut client = serving.connect();
                    let mut number = seed * 1_000_000;
                    for round in 0..30u32 {
                        let calm = number + 40 + round % 7;
                        one_by_one(&mut client, serving, number..calm);
                        number = calm;
                        // Send many messages in pieces that ignore message boundaries.
                        let last = number + 100 + round;
                        let sent: Vec<Vec<u8>> = (number..last)
                            .map(|number| message(number * 7, number, (number as usize * 37) % 2500))
                            .collect();
                        let bytes = sent.concat();
                        let mut writer = client.try_clone().unwrap();
                        let writing = scope.spawn(move || {
                            for piece in bytes.chunks(1 + (round as usize * 997) % 20_000) {
                                writer.write_all(piece).unwrap();
                            }
                        });
                        for (at, sent) in sent.iter().enumerate() {
                            expect(&mut client, serving, sent, &format!("{engine:?}, round {round}, {at}"));
                        }
                        writing.join().unwrap();
                        number = last;
                    }
                });
            }
        });
        serving.wait("it is over", |status| status["open-connections"] == 0);
        let status = serving.status();
        let moves: u64 =
            status["moves"].as_array().unwrap().iter().map(|of| of["count"].as_u64().unwrap()).sum();
        // On a busy machine, the automatic engine may stay in user space.
        let is_right = match engine {
            Engine::User => moves == 0,
            Engine::Kernel => moves > 0,
            Engine::Auto => true,
        };
        assert!(is_right, "{status:#}");
        assert_eq!((&status["queued-bytes"], &status["in-kernel"]), (&0.into(), &0.into()), "{status:#}");
    }
}

#[test]
fn a_backend_that_resets_costs_no_message() {
    for engine in ENGINES {
        let (serving, backends) = router(engine, 3);
        backends[1].resets_after.store(60, SeqCst);
        let mut client = serving.connect();
        one_by_one(&mut client, &serving, 0..600);
        let status = serving.status();
        assert!(status["retried"].as_u64().unwrap() > 0, "{status:#}");
    }
}

#[test]
fn a_client_that_stops_sending_gets_all_its_answers() {
    for engine in ENGINES {
        let (serving, _backends) = router(engine, 3);
        let mut client = serving.connect();
        one_by_one(&mut client, &serving, 0..100);
        let sent: Vec<Vec<u8>> = (0..300).map(|number| message(number, number, 50)).collect();
        client.write_all(&sent.concat()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        for (at, sent) in sent.iter().enumerate() {
            expect(&mut client, &serving, sent, &format!("{engine:?}, {at}"));
        }
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
        serving.wait("it is over", |status| status["open-connections"] == 0);
    }
}

#[test]
fn clients_that_vanish_or_talk_rubbish_hurt_nobody_else() {
    for engine in ENGINES {
        let (serving, _backends) = router(engine, 2);
        let mut good = serving.connect();
        for round in 0..10 {
            one_by_one(&mut good, &serving, round * 50..round * 50 + 50);
            let mut bad = serving.connect();
            one_by_one(&mut bad, &serving, 0..40);
            match round % 3 {
                0 => bad.write_all(&message(1, 1, 100)[..60]).unwrap(),
                1 => {
                    bad.write_all(&u32::MAX.to_be_bytes()).unwrap();
                    assert_eq!(bad.read(&mut [0]).unwrap(), 0, "{engine:?}");
                }
                _ => {
                    bad.write_all(&message(1, 1, 100)[..60]).unwrap();
                    socket2::SockRef::from(&bad).set_linger(Some(Duration::ZERO)).unwrap();
                }
            }
        }
        serving.wait("only the good one is left", |status| status["open-connections"] == 1);
        one_by_one(&mut good, &serving, 0..40);
        let status = serving.status();
        assert_eq!(status["drops"]["too-long"], 3, "{status:#}");
        assert_eq!(status["drops"]["cut-short"], 7, "{status:#}");
    }
}

#[test]
fn a_backend_that_does_not_read_makes_its_clients_wait() {
    for engine in ENGINES {
        let (serving, backends) = router(engine, 2);
        let mut client = serving.connect();
        one_by_one(&mut client, &serving, 0..100);
        backends[1].paused.store(true, SeqCst);
        // Send as much as the service accepts in two seconds.
        client.set_nonblocking(true).unwrap();
        let (mut bytes, mut sent) = (Vec::new(), 0u32);
        let (began, mut taken) = (Instant::now(), 0);
        while began.elapsed() < Duration::from_secs(2) {
            if bytes.is_empty() {
                bytes = message(1, sent, 1000);
                sent += 1;
            }
            match client.write(&bytes) {
                Ok(count) => {
                    taken += count;
                    bytes.drain(..count);
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        // The accepted bytes are in the client's two sockets, the service, and the backend's two
        // sockets.
        assert!(taken < 8 << 20, "{engine:?}: {taken} bytes were taken");
        client.set_nonblocking(false).unwrap();
        // Another client must be served meanwhile.
        let mut other = serving.connect();
        for number in 0..50 {
            let sent = message(2, number, 100);
            other.write_all(&sent).unwrap();
            expect(&mut other, &serving, &sent, "beside a backend that does not read");
        }
        backends[1].paused.store(false, SeqCst);
        let mut writer = client.try_clone().unwrap();
        let writing = std::thread::spawn(move || writer.write_all(&bytes).unwrap());
        for number in 0..sent {
            expect(&mut client, &serving, &message(1, number, 1000), &format!("{engine:?}, {number}"));
        }
        writing.join().unwrap();
    }
}

#[test]
fn backends_come_and_go() {
    for engine in ENGINES {
        let (serving, backends) = router(engine, 3);
        let addresses: Vec<_> = backends.iter().map(|backend| backend.address).collect();
        let mut client = serving.connect();
        for round in 0..6u32 {
            one_by_one(&mut client, &serving, round * 100..round * 100 + 100);
            serving.reload(&addresses[..1 + round as usize % 3]);
        }
        one_by_one(&mut client, &serving, 0..100);
        let status = serving.status();
        assert_eq!(status["backends"].as_array().unwrap().len(), 3, "{status:#}");
        assert_eq!(status["drops"], serde_json::json!({}), "{status:#}");
    }
}

#[test]
fn what_is_left_of_a_read_is_not_served_twice() {
    let serving = Serving::start(Net::new(), "echo", Engine::Auto, &[]);
    for connection in 0..30 {
        let mut client = serving.connect();
        // After these, the next message moves the conversation to the kernel, and one read takes
        // only a part of that message.
        for number in 0..31 {
            client.write_all(&[number]).unwrap();
            client.read_exact(&mut [0]).unwrap();
        }
        let sent = message(0, connection, 200_000);
        let mut writer = client.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| writer.write_all(&sent).unwrap());
            expect(&mut client, &serving, &sent, &format!("connection {connection}"));
        });
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "nothing comes twice");
    }
}

/// A client with numbered messages, whose answers must come in order.
struct Numbered<'a> {
    serving: &'a Serving,
    client: TcpStream,
    sent: u32,
    got: u32,
}

impl Numbered<'_> {
    fn new(serving: &Serving) -> Numbered<'_> {
        Numbered { serving, client: serving.connect(), sent: 0, got: 0 }
    }

    fn send(&mut self, count: u32) {
        let messages =
            (self.sent..self.sent + count).map(|number| message(number, number, number as usize % 50));
        self.client.write_all(&messages.collect::<Vec<_>>().concat()).unwrap();
        self.sent += count;
    }

    fn receive(&mut self) {
        let wanted = message(self.got, self.got, self.got as usize % 50);
        expect(&mut self.client, self.serving, &wanted, &format!("message {}", self.got));
        self.got += 1;
    }

    /// Sends `count` messages, with `outstanding` of them pending at a time.
    fn exchange(&mut self, outstanding: u32, count: u32) {
        let until = self.sent + count;
        while self.got < until {
            self.send((until - self.sent).min(outstanding - (self.sent - self.got)));
            self.receive();
        }
    }
}

/// Runs clients that alternate between one pending message and many, and end at any moment.
fn to_and_fro(service: &str, clients: u32, rounds: u32) -> u64 {
    let net = Net::new();
    let backends: Vec<Backend> = match service {
        "length-router" => (0..3).map(|at| Backend::start(&net, 5000 + at)).collect(),
        _ => Vec::new(),
    };
    let addresses: Vec<_> = backends.iter().map(|backend| backend.address).collect();
    let serving = Serving::start(net, service, Engine::Auto, &addresses);
    std::thread::scope(|scope| {
        for client in 0..clients {
            let serving = &serving;
            scope.spawn(move || {
                for round in 0..rounds {
                    let chance = (client * 7919 + round * 104_729) % 6007;
                    let mut client = Numbered::new(serving);
                    for turn in 0..3 {
                        client.exchange(1, 80 << turn);
                        client.exchange(16, 1000 + chance);
                    }
                    client.send(chance % 20);
                    match chance % 3 {
                        0 => {}
                        1 => socket2::SockRef::from(&client.client).set_linger(Some(Duration::ZERO)).unwrap(),
                        _ => {
                            client.client.shutdown(Shutdown::Write).unwrap();
                            while client.got < client.sent {
                                client.receive();
                            }
                            assert_eq!(client.client.read(&mut [0]).unwrap(), 0);
                        }
                    }
                }
            });
        }
    });
    serving.wait("it is over", |status| status["open-connections"] == 0);
    let status = serving.status();
    assert_eq!((&status["queued-bytes"], &status["in-kernel"]), (&0.into(), &0.into()), "{status:#}");
    assert_eq!(status["stays-in-map"], serde_json::Value::Null);
    let moves = status["moves"].as_array().unwrap();
    moves.iter().find(|of| of["reason"] == "plain").map_or(0, |of| of["count"].as_u64().unwrap())
}

#[test]
fn out_of_the_map_and_in_again() {
    for service in ["length-echo", "length-router"] {
        // Some conversations stay in user space while their thread measures which engine is faster.
        let mut left = 0;
        for _ in 0..10 {
            left += to_and_fro(service, 12, 2);
            if left > 20 {
                break;
            }
        }
        assert!(left > 20, "{service}: {left}");
    }
}

/// Starts a backend of length-router. It announces too long a reply to each message with an odd
/// number, and answers all others.
fn too_long_at_times(net: &Net) -> SocketAddr {
    let address: SocketAddr = ([127, 0, 0, 1], 5000).into();
    let listener = net.inside(|| TcpListener::bind(address)).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                while let Ok(message) = read_message(&mut stream) {
                    let is_odd = message[11] % 2 == 1;
                    let reply = if is_odd { &[0x01, 0, 0, 0, 7, 7, 7, 7] } else { &message[..] };
                    if stream.write_all(reply).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

#[test]
fn a_reply_that_is_too_long_ends_one_client_and_no_backend() {
    for engine in ENGINES {
        let net = Net::new();
        let address = too_long_at_times(&net);
        let serving = Serving::start(net, "length-router", engine, &[address]);
        serving.wait("the backend is up", |status| status["backends"][0]["up"] == true);
        let mut other = serving.connect();
        let mut expect_answer = |number| {
            other.write_all(&message(1, 2 * number, 20)).unwrap();
            assert_eq!(read_message(&mut other).unwrap(), message(1, 2 * number, 20), "{engine:?}");
        };
        for number in 0..10 {
            expect_answer(number);
            let mut client = serving.connect();
            client.write_all(&message(1, 2 * number + 1, 20)).unwrap();
            // length-router has no answer to a refused message, so the client is closed.
            assert!(matches!(client.read(&mut [0; 100]), Ok(0) | Err(_)), "{engine:?}");
        }
        expect_answer(10);
        let status = serving.status();
        assert_eq!(status["backends"][0]["failures"], 0, "{status:#}");
        assert_eq!(status["drops"], serde_json::json!({ "too-long": 10 }), "{status:#}");
    }
}

/// Starts a Redis backend that stops answering while the returned flag is set.
fn silent_when_told(net: &Net) -> (SocketAddr, Arc<AtomicBool>) {
    let address: SocketAddr = ([127, 0, 0, 1], 5000).into();
    let listener = net.inside(|| TcpListener::bind(address)).unwrap();
    let is_silent = Arc::new(AtomicBool::new(false));
    let told = is_silent.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let told = told.clone();
            std::thread::spawn(move || {
                while stream.read(&mut [0; 1000]).is_ok_and(|count| count > 0) {
                    if !told.load(SeqCst) {
                        stream.write_all(b"+OK\r\n").unwrap();
                    }
                }
            });
        }
    });
    (address, is_silent)
}

#[test]
fn a_backend_that_says_nothing_is_given_up_in_time() {
    for engine in ENGINES {
        let net = Net::new();
        let (address, is_silent) = silent_when_told(&net);
        let serving = Serving::start(net, "redis-router", engine, &[address]);
        serving.reload_with("reply-timeout = 0.5", &[address]);
        let mut client = serving.connect();
        let mut ask = || {
            client.write_all(b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n").unwrap();
            let mut answer = [0; 1000];
            let count = client.read(&mut answer).unwrap();
            String::from_utf8_lossy(&answer[..count]).into_owned()
        };
        // The conversation moves to the kernel after enough calm messages, which takes longer on a
        // busy machine.
        let in_kernel = i64::from(engine != Engine::User);
        for number in 0.. {
            assert_eq!(ask(), "+OK\r\n", "{engine:?}, {number}");
            if number >= 60 && serving.status()["in-kernel"] == in_kernel {
                break;
            }
            assert!(number < 100_000, "{:#}", serving.status());
        }
        is_silent.store(true, SeqCst);
        assert_eq!(ask(), "-ERR shunt: the backend does not answer\r\n", "{engine:?}");
        let status = serving.status();
        assert_eq!(status["drops"], serde_json::json!({ "no-reply": 1 }), "{status:#}");
        let silent = |it: &Value| it["reason"] == "silent" && it["count"] == 1;
        let is_moved = status["moves"].as_array().unwrap().iter().any(silent);
        // On a busy machine, the automatic engine may have moved the conversation before.
        assert!(is_moved == (engine == Engine::Kernel) || engine == Engine::Auto, "{status:#}");
        // The next command opens a new connection, as soon as the backend may be tried again.
        is_silent.store(false, SeqCst);
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(ask(), "+OK\r\n", "{engine:?}");
    }
}
