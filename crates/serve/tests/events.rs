//! Tests timers, deferred answers and bytes for other connections: both halves of a service decide the
//! same, and all engines carry it out in the same way. Needs root.

#[allow(dead_code, reason = "the service has no backends")]
mod common;
#[path = "common/random.rs"]
mod random;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{ENGINES, Serving};
use random::Random;
use serde_json::Value;
use shunt_netns::Net;
use shunt_serve::engine::Engine;
use shunt_serve::service::store::{Session, Store};
use shunt_serve::service::trial::Trial;
use shunt_serve::service::{Service, builtin};
use shunt_serve::workshop::vectors;

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

    fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line
    }

    /// Sends a line and returns the next one.
    fn ask(&mut self, text: &str) -> String {
        self.send(text);
        self.line()
    }
}

fn start(engine: Engine) -> Serving {
    Serving::start(Net::new(), "line-hub", engine, &[])
}

fn moves(status: &Value, reason: &str) -> u64 {
    let moves = status["moves"].as_array().unwrap();
    moves.iter().find(|of| of["reason"] == reason).map_or(0, |of| of["count"].as_u64().unwrap())
}

#[test]
fn both_halves_decide_the_same_about_events() {
    let hub = builtin::named("line-hub").expect("a builtin");
    let [user, kernel] = [false, true].map(|in_kernel| Store::new(hub.native.state(), in_kernel).unwrap());
    let native = hub.native.with_store(user.clone());
    let mut trial = Trial::load(hub.object).unwrap().with_store(&kernel).unwrap();
    let mut random = Random(1);
    let mut sessions = [Session::default(), Session::default()];
    let words = ["sub", "unsub", "pub", "to", "me", "wait", "every", "stop", "idle", "other"];
    for round in 0..2000 {
        let [a, b] = &mut sessions;
        let context = random.below(4);
        let (in_user, in_kernel) = match random.below(8) {
            0 => (native.timer_in(a, context), trial.event("timer", b, context).unwrap()),
            1 => (native.closed_in(a), trial.event("closed", b, 0).unwrap()),
            2 => (native.accepted_in(a), trial.event("accepted", b, 0).unwrap()),
            3 => {
                let in_kernel = trial.event("service_timer", &mut Session::default(), context).unwrap();
                (native.service_timer(context), in_kernel)
            }
            4 => (native.started(), trial.event("started", &mut Session::default(), 0).unwrap()),
            _ => {
                let word = words[random.below(words.len() as u64) as usize];
                let text = "x".repeat(random.below(300) as usize);
                let line = format!("{word} {} {text}\n", random.below(1 << 40));
                let (in_user, in_kernel) =
                    (native.decide_in(a, line.as_bytes()), trial.decide_in(b, line.as_bytes()).unwrap());
                assert_eq!(in_user, in_kernel, "round {round}: {line}");
                assert_eq!(a, b, "round {round}: {line}");
                continue;
            }
        };
        assert_eq!(in_user, in_kernel, "round {round}");
        assert_eq!(a, b, "round {round}");
    }
    assert_eq!(vectors::differences(hub.object, &user, &kernel), Vec::<String>::new());
}

#[test]
fn idle_clients_are_closed_and_busy_ones_are_not_moved() {
    for engine in ENGINES {
        let serving = start(engine);
        let mut client = Client::new(&serving);
        assert_eq!(client.ask("idle 100000\n"), "ok\n");
        for number in 0..300 {
            let line = format!("line {number}\n");
            assert_eq!(client.ask(&line), line);
        }
        let status = serving.status();
        assert_eq!(moves(&status, "event"), 0, "{status:#}");
        if engine != Engine::User {
            serving.until_in_kernel(|| assert_eq!(client.ask("line\n"), "line\n"));
        }
        // New backends leave the timers alone.
        serving.reload(&[]);
        assert_eq!(client.ask("more\n"), "more\n");
        // An earlier time than user space knows.
        assert_eq!(client.ask("idle 30\n"), "ok\n");
        assert_eq!(client.line(), "idle\n");
        assert_eq!(client.reader.read(&mut [0]).unwrap(), 0);
        serving.wait("it is over", |status| status["open-connections"] == 0);
        assert_eq!(serving.dump("ended_idle")["value"], 1);
        assert!(serving.dump("beats")["value"].as_u64().unwrap() > 0);
    }
}

#[test]
fn deferred_answers_keep_their_place() {
    for engine in ENGINES {
        let serving = start(engine);
        let mut client = Client::new(&serving);
        for round in 0..40 {
            let line = format!("line {round}\n");
            assert_eq!(client.ask(&line), line);
            if round % 5 == 0 {
                client.send(&format!("wait 3\nwait 1\nafter {round}\n"));
                let got = [client.line(), client.line(), client.line()];
                assert_eq!(got, ["done\n".to_owned(), "done\n".into(), format!("after {round}\n")]);
            }
        }
        // A client that has sent its end still gets the answer.
        client.send("wait 20\nlast\n");
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = String::new();
        client.reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "done\nlast\n");
    }
}

#[test]
fn ticks_come_between_answers() {
    for engine in ENGINES {
        let serving = start(engine);
        let ticks: u64 = std::thread::scope(|scope| {
            let run = |seed: u64| {
                let serving = &serving;
                move || {
                    let (mut client, mut random) = (Client::new(serving), Random(seed));
                    let mut ticks = 0;
                    let mut expect = |client: &mut Client, wanted: &str| loop {
                        match client.line() {
                            line if line == "tick\n" => ticks += 1,
                            line => return assert_eq!(line, wanted),
                        }
                    };
                    client.send("every 1\n");
                    expect(&mut client, "ok\n");
                    let mut number = 0;
                    for _ in 0..60 {
                        let count = if random.below(3) == 0 { random.below(40) + 1 } else { 1 };
                        let lines: Vec<String> =
                            (0..count).map(|at| format!("{seed} {}\n", number + at)).collect();
                        number += count;
                        client.send(&lines.concat());
                        lines.iter().for_each(|line| expect(&mut client, line));
                        // The kernel gets the conversation meanwhile.
                        if random.below(4) == 0 {
                            std::thread::sleep(Duration::from_millis(2));
                        }
                    }
                    client.send("stop\n");
                    expect(&mut client, "ok\n");
                    ticks
                }
            };
            let clients: Vec<_> = (1..4).map(|seed| scope.spawn(run(seed))).collect();
            clients.into_iter().map(|client| client.join().unwrap()).sum()
        });
        assert_eq!(serving.dump("ticks")["value"], ticks, "{engine:?}");
        serving.wait("it is over", |status| status["open-connections"] == 0);
        assert_eq!(serving.dump("ended")["value"], 3);
    }
}

#[test]
fn subscribers_get_everything_once_and_in_order() {
    for engine in ENGINES {
        let serving = start(engine);
        // More clients than threads, so that bytes cross threads.
        let mut subscribers: Vec<Client> = (0..6).map(|_| Client::new(&serving)).collect();
        for (at, client) in subscribers.iter_mut().enumerate() {
            for number in 0..40 {
                let line = format!("{at} {number}\n");
                assert_eq!(client.ask(&line), line);
            }
            assert_eq!(client.ask("sub news\n"), "ok\n");
            assert_eq!(client.ask("sub end\n"), "ok\n");
        }
        let mut publisher = Client::new(&serving);
        for number in 0..200 {
            assert_eq!(publisher.ask(&format!("pub news {number}\n")), "ok\n");
        }
        for client in &mut subscribers {
            (0..200).for_each(|number| assert_eq!(client.line(), format!("pub news {number}\n")));
        }
        assert_eq!(subscribers[0].ask("unsub news\n"), "ok\n");
        publisher.send("pub news more\n");
        assert_eq!(subscribers[1].line(), "pub news more\n");
        drop(publisher);
        assert_eq!(subscribers[0].line(), "bye\n");
        assert_eq!(subscribers[1].line(), "bye\n");
        // To one connection, by its handle.
        let mut one = Client::new(&serving);
        let handle = one.ask("me\n");
        let handle = handle.trim_end();
        let mut other = Client::new(&serving);
        for number in 0..60 {
            let line = format!("{number}\n");
            assert_eq!(one.ask(&line), line);
            assert_eq!(other.ask(&format!("to {handle} {number}\n")), "ok\n");
            assert_eq!(one.line(), format!("to {handle} {number}\n"));
        }
        drop(one);
        assert_eq!(subscribers[0].line(), "bye\n");
        // No later connection has the handle.
        let mut again = Client::new(&serving);
        assert_eq!(other.ask(&format!("to {handle} late\n")), "ok\n");
        assert_eq!(again.ask("mine\n"), "mine\n");
    }
}

#[test]
fn a_subscriber_that_does_not_read_is_closed_and_counted() {
    let serving = start(Engine::Auto);
    let [mut slow, mut good] = [Client::new(&serving), Client::new(&serving)];
    assert_eq!(slow.ask("sub news\n"), "ok\n");
    assert_eq!(good.ask("sub news\n"), "ok\n");
    let mut publisher = Client::new(&serving);
    let text = "x".repeat(200);
    let batch = 500;
    let (began, mut sent) = (Instant::now(), 0);
    while serving.status()["drops"]["slow"] != 1 {
        assert!(began.elapsed() < common::PATIENCE, "{:#}", serving.status());
        for _ in 0..batch {
            publisher.send(&format!("pub news {sent} {text}\n"));
            sent += 1;
        }
        for _ in 0..batch {
            assert_eq!(publisher.line(), "ok\n");
        }
        for number in sent - batch..sent {
            assert_eq!(good.line(), format!("pub news {number} {text}\n"));
        }
        let queued = serving.status()["queued-bytes"].as_u64().unwrap();
        assert!(queued < 2 << 20, "{queued} bytes");
    }
    serving.wait("it is closed", |status| status["open-connections"] == 2);
    // Those that ended in any way are not subscribed any more.
    drop(slow);
    assert_eq!(publisher.ask("pub news last\n"), "ok\n");
    assert_eq!(good.line(), "pub news last\n");
}

/// `closed` runs for each connection when the service ends, also for those that still wait for an answer,
/// and with the state that the kernel has left.
#[test]
fn connections_that_are_open_at_the_end_are_closed_too() {
    for engine in ENGINES {
        for waits in [false, true] {
            let mut serving = Serving::draining(Net::new(), "line-hub", engine, Duration::from_millis(300));
            let mut clients: Vec<Client> = (0..5).map(|_| Client::new(&serving)).collect();
            for client in &mut clients {
                for number in 0..100 {
                    let line = format!("line {number}\n");
                    assert_eq!(client.ask(&line), line);
                }
                if waits {
                    client.send("wait 1000000\n");
                }
            }
            if waits {
                // So the connections are open until the time of the drain is over.
                serving.wait("the messages are there", |status| {
                    let count = |half: &str| status[half]["messages"].as_u64().unwrap();
                    count("user") + count("kernel") == 505
                });
            }
            serving.end();
            // The third counter of the state.
            let ended = serving.store.snapshot()[16..24].try_into().unwrap();
            assert_eq!(u64::from_ne_bytes(ended), 5, "{engine:?}, waits {waits}");
        }
    }
}
