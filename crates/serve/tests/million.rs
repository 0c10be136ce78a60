//! A stress test with many numbered messages, compared byte for byte, and cut or joined anywhere.
//! Backends fail and are slow, and clients vanish in the middle of a message.
//! `SHUNT_SERVE_MESSAGES` is the number of messages for each client.

mod common;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use common::{Backend, ENGINES, Serving, message, read_message};
use shunt_netns::Net;
use shunt_serve::engine::Engine;

const CLIENTS: u32 = 4;
/// Messages of each client, unless the environment overrides it.
const MESSAGES: u32 = 100_000;

/// Returns a client's message of this number. The lengths have all remainders modulo a word, and
/// some span several segments.
fn nth(seed: u32, number: u32) -> Vec<u8> {
    let length = if number % 1000 == 999 { 60_000 } else { number % 61 };
    message(number.wrapping_mul(7).wrapping_add(seed), seed << 24 | number, length as usize)
}

/// Sends messages in pieces of various lengths, and many in one piece. For a part of the time each
/// message waits for its answer.
fn talk(serving: &Serving, seed: u32, count: u32) {
    let client = serving.connect();
    let (mut writer, mut reader) = (client.try_clone().unwrap(), std::io::BufReader::new(client));
    let mut number = 0;
    let mut round = seed;
    while number < count {
        round += 1;
        let last = count.min(number + if round.is_multiple_of(4) { 60 } else { 2000 });
        let check = |reader: &mut _, number| {
            let got = read_message(reader).unwrap_or_else(|error| panic!("{number}: {error}"));
            assert!(got == nth(seed, number), "message {number} of client {seed}");
        };
        if round.is_multiple_of(4) {
            for number in number..last {
                writer.write_all(&nth(seed, number)).unwrap();
                check(&mut reader, number);
            }
        } else {
            let piece =
                if round % 4 == 1 { 1 + round as usize % 120 } else { 1 + round as usize * 997 % 60_000 };
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let bytes: Vec<u8> = (number..last).flat_map(|number| nth(seed, number)).collect();
                    // Cut only the first messages so small, because each piece is a system call.
                    let (small, rest) = bytes.split_at(if piece < 200 { 8000.min(bytes.len()) } else { 0 });
                    small.chunks(piece).for_each(|piece| writer.write_all(piece).unwrap());
                    rest.chunks(piece.max(10_000)).for_each(|piece| writer.write_all(piece).unwrap());
                });
                (number..last).for_each(|number| check(&mut reader, number));
            });
        }
        number = last;
    }
}

fn everything(engine: Engine) {
    let count =
        std::env::var("SHUNT_SERVE_MESSAGES").map_or(MESSAGES, |text| text.parse().expect("a number"));
    let net = Net::new();
    let backends: Vec<Backend> = (0..3).map(|at| Backend::start(&net, 5000 + at)).collect();
    let addresses: Vec<_> = backends.iter().map(|backend| backend.address).collect();
    let serving = Serving::start(net, "length-router", engine, &addresses);
    backends[1].resets_after.store(4000, SeqCst);
    let (began, done) = (Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(SeqCst) {
                backends[2].paused.store(true, SeqCst);
                std::thread::sleep(Duration::from_millis(20));
                backends[2].paused.store(false, SeqCst);
                let mut vanishes = serving.connect();
                vanishes.write_all(&[&nth(9, 1)[..], &nth(9, 60)[..30]].concat()).unwrap();
                socket2::SockRef::from(&vanishes).set_linger(Some(Duration::ZERO)).unwrap();
                drop(vanishes);
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        let serving = &serving;
        let clients: Vec<_> =
            (0..CLIENTS).map(|seed| scope.spawn(move || talk(serving, seed, count))).collect();
        let results: Vec<_> = clients.into_iter().map(|client| client.join()).collect();
        done.store(true, SeqCst);
        assert!(results.iter().all(Result::is_ok), "{:#}", serving.status());
    });
    serving.wait("it is over", |status| status["open-connections"] == 0);
    let status = serving.status();
    println!(
        "{engine:?}: {} messages in {:.1?}, {} sent again",
        CLIENTS * count,
        began.elapsed(),
        status["retried"]
    );
    assert!(status["retried"].as_u64().unwrap() > 0 || count < 10_000, "{status:#}");
    assert!(status["drops"]["cut-short"].as_u64().unwrap() > 0, "{status:#}");
    assert_eq!((&status["queued-bytes"], &status["in-kernel"]), (&0.into(), &0.into()), "{status:#}");
}

#[test]
fn every_message_is_answered_once_and_in_order() {
    ENGINES.into_iter().for_each(everything);
}
