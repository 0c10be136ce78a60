//! Tests that a reader in the kernel never sees parts of two values, whatever user space does to the
//! items meanwhile: replaces, deletes, evicts and moves them. Needs root.

#[allow(dead_code, reason = "the cache has no backends")]
mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use common::{ENGINES, PATIENCE, Serving};
use shunt_netns::Net;
use shunt_serve::engine::Engine;

const KEYS: u64 = 8;

/// Returns a value whose bytes are all equal, and differ from those of the next number.
fn value(key: u64, number: u64) -> Vec<u8> {
    let length = 1 + (number * 7919 + key) % 1900;
    vec![b'A' + (number % 26) as u8; length as usize]
}

/// Reads a whole answer to `get`, and returns the value.
fn answer(reader: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = String::new();
    reader.read_line(&mut line).expect("an answer");
    if line == "END\r\n" {
        return None;
    }
    let length: usize = line.trim_end().rsplit(' ').next().unwrap().parse().expect(&line);
    let mut value = vec![0; length];
    reader.read_exact(&mut value).unwrap();
    line.clear();
    reader.read_line(&mut line).unwrap();
    assert_eq!(line, "\r\n");
    line.clear();
    reader.read_line(&mut line).unwrap();
    assert_eq!(line, "END\r\n");
    Some(value)
}

fn write(mut stream: TcpStream, stop: &AtomicBool, seed: u64) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let large = vec![b'x'; 200_000];
    for number in (seed..).step_by(2) {
        if stop.load(Relaxed) {
            return;
        }
        let key = number / 2 % KEYS;
        let value = match number % 50 {
            // Others fill the memory, so that items are evicted and moved.
            0 => &large,
            _ => &value(key, number),
        };
        let name = if number % 50 == 0 { format!("large{}", number % 4001) } else { format!("key{key}") };
        let line = format!("set {name} 0 0 {}\r\n", value.len());
        stream.write_all(&[line.as_bytes(), value, b"\r\n"].concat()).unwrap();
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line, "STORED\r\n");
        if number % 31 == 0 {
            stream.write_all(format!("delete key{key} noreply\r\n").as_bytes()).unwrap();
        }
    }
}

#[test]
fn a_reader_sees_one_value_however_fast_it_is_replaced() {
    for engine in ENGINES {
        let serving = Serving::cache(Net::new(), engine, 16 << 20);
        let (stop, hits) = (AtomicBool::new(false), AtomicU64::new(0));
        let streams: Vec<TcpStream> = (0..6).map(|_| serving.connect()).collect();
        std::thread::scope(|scope| {
            for (at, stream) in streams.into_iter().enumerate() {
                let (stop, hits) = (&stop, &hits);
                if at < 2 {
                    scope.spawn(move || write(stream, stop, at as u64));
                } else {
                    scope.spawn(move || {
                        let mut stream = stream;
                        let mut reader = BufReader::new(stream.try_clone().unwrap());
                        for number in 0_u64.. {
                            if stop.load(Relaxed) {
                                return;
                            }
                            let line = format!("get key{}\r\n", number % KEYS);
                            stream.write_all(line.as_bytes()).unwrap();
                            if let Some(value) = answer(&mut reader) {
                                assert!(value.iter().all(|byte| *byte == value[0]), "torn");
                                hits.fetch_add(1, Relaxed);
                            }
                        }
                    });
                }
            }
            let began = Instant::now();
            let is_enough = || {
                let status = serving.status();
                let in_kernel = status["kernel"]["messages"].as_u64().unwrap();
                let needed = match engine {
                    Engine::Kernel => 5000,
                    _ => 0,
                };
                in_kernel >= needed && hits.load(Relaxed) > 20_000
            };
            while !is_enough() && began.elapsed() < PATIENCE * 3 {
                std::thread::sleep(Duration::from_millis(50));
            }
            let enough = is_enough();
            stop.store(true, Relaxed);
            assert!(enough, "{} {:#}", hits.load(Relaxed), serving.status());
        });
    }
}
