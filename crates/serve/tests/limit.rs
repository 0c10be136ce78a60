//! Tests that the rate limit means the same in both engines, and while connections move between them.
//! Needs root.

#[allow(dead_code, reason = "the service has no backends")]
mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::time::Instant;

use common::{ENGINES, PATIENCE, Serving};
use shunt_netns::Net;
use shunt_serve::engine::Engine;

/// Counts the answers until the service closes a connection, which it does at the limit. With
/// `in_kernel`, the kernel must get the connection.
fn answers(serving: &Serving, together: usize, in_kernel: bool) -> usize {
    let mut stream = serving.connect();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut count, mut line) = (0, String::new());
    while in_kernel && serving.status()["in-kernel"] != 1 {
        for _ in 0..40 {
            stream.write_all(b"a line\n").unwrap();
            reader.read_line(&mut line).unwrap();
            count += 1;
        }
    }
    loop {
        if stream.write_all("a line\n".repeat(together).as_bytes()).is_err() {
            return count;
        }
        for _ in 0..together {
            line.clear();
            if !reader.read_line(&mut line).is_ok_and(|length| length > 0) {
                return count;
            }
            assert_eq!(line, "a line\n");
            count += 1;
        }
    }
}

#[test]
fn every_engine_serves_as_many_messages() {
    for engine in ENGINES {
        // One message in three hours: all that are served are of the burst.
        let serving = Serving::limited(Net::new(), "line-counter", engine, 1e-4, 500);
        assert_eq!(answers(&serving, 1, engine == Engine::Kernel), 500, "{engine:?}");
        // Other connections of the address have none left.
        assert_eq!(answers(&serving, 1, false), 0);
        let status = serving.status();
        assert_eq!(status["drops"]["too-many"], 2, "{status:#}");
        let of = |engine: &str| status[engine]["messages"].as_u64().unwrap();
        // On a busy machine, the automatic engine stays in user space.
        let is_right = match engine {
            Engine::User => of("kernel") == 0,
            Engine::Kernel => of("kernel") > 0,
            Engine::Auto => true,
        };
        assert!(is_right, "{status:#}");
        // Refused messages are not decided about.
        assert_eq!(serving.dump("lines")["value"], 500);
    }
}

#[test]
fn the_limit_is_of_all_connections_together() {
    for engine in ENGINES {
        let serving = Serving::limited(Net::new(), "line-counter", engine, 1e-4, 3000);
        let total: usize = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..4)
                .map(|at| {
                    scope.spawn({
                        let serving = &serving;
                        move || answers(serving, 1 + at % 2 * 7, false)
                    })
                })
                .collect();
            clients.into_iter().map(|client| client.join().unwrap()).sum()
        });
        // Answers can be lost with the connection: the refusal of a later message closes it.
        assert!((2900..=3000).contains(&total), "{engine:?}: {total}");
        assert_eq!(serving.dump("lines")["value"], 3000, "{engine:?}");
    }
}

#[test]
fn buckets_fill_again() {
    let serving = Serving::limited(Net::new(), "line-counter", Engine::Auto, 1000.0, 10);
    let began = Instant::now();
    while serving.dump("lines")["value"].as_u64().unwrap() < 50 {
        assert!(began.elapsed() < PATIENCE);
        // The service closes the connection of a refused message. A new one is served later.
        let mut stream = serving.connect();
        let _ = stream.write_all("x\n".repeat(200).as_bytes());
        let _ = stream.read_to_end(&mut Vec::new());
    }
    assert!(serving.status()["drops"]["too-many"].as_u64().unwrap() > 0);
}
