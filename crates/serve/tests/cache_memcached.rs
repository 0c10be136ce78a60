//! Sends the same random commands to memcached and to the cache, and compares all answers. Needs root
//! and memcached.

#[allow(dead_code, reason = "the cache has no backends")]
mod common;
#[path = "common/peer.rs"]
mod peer;
#[path = "common/random.rs"]
mod random;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use common::{ENGINES, Serving};
use peer::{Peer, connect};
use random::Random;
use shunt_netns::Net;
use shunt_serve::engine::Engine;

/// Starts memcached.
fn memcached(net: &Net) -> Peer {
    let mut arguments = vec!["-l", "127.0.0.1", "-p", "4100", "-U", "0", "-t", "1", "-u", "root"];
    // Its threads for maintenance would hold items now and then, which changes its answers.
    arguments.extend(["-o", "no_lru_crawler,no_lru_maintainer,no_slab_reassign"]);
    Peer::start(net, "memcached", &arguments)
}

fn key(random: &mut Random) -> String {
    match random.below(40) {
        0 => "k".repeat(250),
        1 => "line\rline".to_owned(),
        2 => "\u{e4}\u{f6}".to_owned(),
        _ => format!("key{}", random.below(8)),
    }
}

fn value(random: &mut Random) -> Vec<u8> {
    let length = match random.below(60) {
        0 => random.below(1_100_000),
        1 => 1_048_576 - 60 - random.below(20),
        2..6 => random.below(5000),
        6..20 => {
            let bits = random.below(31);
            return random.below(1 << bits).to_string().into_bytes();
        }
        20 => return b"18446744073709551615".to_vec(),
        21 => return b"12 \r\n 3".to_vec(),
        _ => random.below(40),
    };
    (0..length).map(|_| b"\r\n 0123abc\0\xff"[random.below(12) as usize]).collect()
}

const SECONDS: [&str; 9] = ["0", "0", "0", "0", "50000", "2592000", "-1", "2592001", "4000000000"];
const NOREPLY: [&str; 6] = ["", "", "", "", " noreply", " nonsense"];

/// Returns a storing command with its data, which may be bad.
fn storing(random: &mut Random, alone: bool) -> Vec<u8> {
    let name = random.one(&["set", "set", "set", "add", "replace", "append", "prepend", "cas"]);
    let (key, value) = (key(random), value(random));
    let flags = random.one(&["0", "0", "7", "4294967295", "4294967296", "-1", "x"]);
    let flags = if random.below(3) == 0 { flags } else { "5" };
    let length = match random.below(40) {
        0 => "-1".to_owned(),
        1 => "abc".to_owned(),
        2 if !alone => format!("{}", value.len() + 1),
        3 if !value.is_empty() => format!("{}", value.len() - 1),
        _ => value.len().to_string(),
    };
    let cas = if name == "cas" { format!(" {}", random.below(40)) } else { String::new() };
    let more = format!("{cas}{}", random.one(&NOREPLY));
    let line = format!("{name} {key} {flags} {} {length}{more}\r\n", random.one(&SECONDS));
    let end: &[u8] = if !alone && random.below(30) == 0 { b"\n" } else { b"\r\n" };
    [line.as_bytes(), &value, end].concat()
}

fn meta(random: &mut Random, alone: bool) -> Vec<u8> {
    let names: &[&str] = match alone {
        true => &["mg", "mg", "ms", "md", "ma", "me"],
        false => &["mg", "mg", "ms", "md", "mn", "me"],
    };
    let (name, mut key) = (random.one(names), key(random));
    let mut flags = String::new();
    let mut data = Vec::new();
    let pool: &[&str] = match name {
        "mg" => &["v", "t", "f", "s", "c", "k", "h", "u", "q", "Oabc", "N50000", "R60000", "T50000", "v"],
        "ms" => &["c", "k", "q", "O1", "F9", "T50000", "MS", "ME", "MA", "MP", "MR", "MX", "I", "C7", "Fx"],
        "md" => &["k", "q", "Oabc", "I", "T50000", "C9", "Cx"],
        "ma" => {
            &["c", "k", "q", "Oabc", "v", "N0", "J13", "D7", "MD", "MI", "M-", "M+", "t", "C5", "MZ", "Dx"]
        }
        _ => &[],
    };
    if !pool.is_empty() {
        for _ in 0..random.below(6) {
            flags += " ";
            flags += random.one(pool);
        }
        if random.below(30) == 0 {
            flags +=
                random.one(&[" Z", " O123456789012345678901234567890123", " \u{e4}", " b", " TT", " Ny"]);
        }
        if random.below(20) == 0 {
            key = random.one(&["Zm9v", "Zg==", "AAECAw==", "!!!", "Zm9"]).to_owned();
            flags += " b";
        }
    }
    match name {
        "mn" => key = String::new(),
        // Its class and size are those of memcached's memory.
        "me" => key = "missing".to_owned(),
        "ms" => {
            let value = value(random);
            let length = value.len().to_string();
            flags = format!(" {}{flags}", if random.below(30) == 0 { "x" } else { &length });
            let end: &[u8] = if !alone && random.below(30) == 0 { b"xx" } else { b"\r\n" };
            data = [&value, end].concat();
        }
        _ => {}
    }
    [format!("{name} {key}{flags}\r\n").as_bytes(), &data].concat()
}

/// Returns a command. With `alone` nothing is under way when it is sent: only then are memcached's
/// answers to sums and to a wrong key in a `get` always the same.
fn command(random: &mut Random, alone: bool) -> Vec<u8> {
    let key = |random: &mut Random| key(random);
    let line = match random.below(100) {
        0..35 => return storing(random, alone),
        35..55 => {
            let name = random.one(&["get", "get", "get", "gets", "bget"]);
            let count = if random.below(4) == 0 { random.below(40) } else { 1 };
            let mut keys: Vec<String> = (0..count).map(|_| key(random)).collect();
            if alone && random.below(10) == 0 {
                keys.push("k".repeat(251));
            }
            format!("{name} {}", keys.join(random.one(&[" ", " ", "  "])))
        }
        55..60 => {
            let keys: Vec<String> = (0..random.below(4)).map(|_| key(random)).collect();
            let seconds = if random.below(10) == 0 { "soon" } else { random.one(&SECONDS) };
            format!("{} {seconds} {}", random.one(&["gat", "gats"]), keys.join(" "))
        }
        60..65 => {
            format!("delete {}{}", key(random), random.one(&[" 0", " 5", "", "", " noreply", " 0 noreply"]))
        }
        65..73 if alone => {
            let delta = random.one(&["1", "7", "0", "18446744073709551615", "-1", "x", "+2", "9 "]);
            format!("{} {} {delta}{}", random.one(&["incr", "decr"]), key(random), random.one(&NOREPLY))
        }
        73..77 => format!("touch {} {}{}", key(random), random.one(&SECONDS), random.one(&NOREPLY)),
        77 => random
            .one(&["flush_all", "flush_all noreply", "flush_all 0", "flush_all -1 noreply", "flush_all x"])
            .to_owned(),
        78 => random
            .one(&["verbosity 1", "verbosity", "verbosity x", "verbosity 1 noreply", "verbosity 1 2 3"])
            .to_owned(),
        79 => random
            .one(&[
                "",
                "\r",
                " ",
                "x",
                "get",
                "gets ",
                "set",
                "mg",
                "ms k",
                "mx a",
                "nonsense",
                "incr a",
                "shutdown",
                "stats nonsense",
                "get\0 a",
                "delete",
                "touch a",
                "cas a 0 0 1",
                "GET a",
                "mget a",
            ])
            .to_owned(),
        80 if alone => format!("{} {} 0 0 2\r\nxy", random.one(&["set", "add", "append"]), "k".repeat(251)),
        81 if !alone => "ms k 2 \0".to_owned(),
        _ => return meta(random, alone),
    };
    format!("{line}{}", if random.below(10) == 0 { "\n" } else { "\r\n" }).into_bytes()
}

/// Makes times in answers equal, because the clocks of both tick at different moments.
fn without_times(answer: &[u8]) -> Vec<u8> {
    let mut answer = answer.to_vec();
    for at in 2..answer.len() {
        let is_time = answer[at - 2..at] == *b" t" || answer[at] == b'9' && answer[at - 1] == b'T';
        let mut at = at;
        while is_time && answer.get(at).is_some_and(u8::is_ascii_digit) {
            answer[at] = b'0';
            at += 1;
        }
    }
    answer
}

/// Sends all bytes in random pieces, and returns what arrives until the connection ends.
fn exchange(mut stream: TcpStream, bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut reader = stream.try_clone().unwrap();
    let reading = std::thread::spawn(move || {
        let mut got = Vec::new();
        let _ = reader.read_to_end(&mut got);
        got
    });
    let mut rest = bytes;
    while !rest.is_empty() {
        let bits = random.below(17);
        let (piece, more) = rest.split_at(rest.len().min(1 + random.below(1 << bits) as usize));
        if stream.write_all(piece).is_err() {
            break;
        }
        rest = more;
    }
    let _ = stream.shutdown(Shutdown::Write);
    reading.join().unwrap()
}

#[test]
fn streams_of_commands_in_any_pieces_have_the_answers_of_memcached() {
    for (number, engine) in ENGINES.into_iter().enumerate() {
        let serving = Serving::cache(Net::new(), engine, 64 << 20);
        let memcached = memcached(&serving.net);
        for seed in 0..60 {
            let mut random = Random(seed * 3 + number as u64);
            let commands: Vec<Vec<u8>> = (0..200).map(|_| command(&mut random, false)).collect();
            // memcached forgets answers if the stream ends within a command.
            let bytes = [&commands.concat()[..], b"\r\nmn\r\nmn\r\nmn\r\n"].concat();
            let wanted = exchange(connect(&serving.net, memcached.address), &bytes, &mut random);
            let got = exchange(serving.connect(), &bytes, &mut random);
            compare(&wanted, &got, &format!("{engine:?}, seed {seed}"));
        }
    }
}

fn compare(wanted: &[u8], got: &[u8], context: &str) {
    let (wanted, got) = (without_times(wanted), without_times(got));
    if wanted != got {
        let at = wanted.iter().zip(&got).position(|(one, other)| one != other);
        let at = at.unwrap_or(wanted.len().min(got.len()));
        let near = |bytes: &[u8]| {
            let end = bytes.len().min(at + 200);
            bytes[at.saturating_sub(200).min(end)..end].escape_ascii().to_string()
        };
        panic!(
            "{context}: at byte {at} of {} and {}\nmemcached {}\ncache     {}",
            wanted.len(),
            got.len(),
            near(&wanted),
            near(&got),
        );
    }
}

#[test]
fn commands_one_at_a_time_have_the_answers_of_memcached() {
    for (number, engine) in ENGINES.into_iter().enumerate() {
        let serving = Serving::cache(Net::new(), engine, 64 << 20);
        let memcached = memcached(&serving.net);
        let mut random = Random(1000 + number as u64);
        let (mut theirs, mut ours) = (connect(&serving.net, memcached.address), serving.connect());
        for count in 0..20_000 {
            // Runs of reads are what the kernel serves.
            let sent = match count / 100 % 3 {
                0 => command(&mut random, true),
                _ => format!("get {}\r\n", key(&mut random)).into_bytes(),
            };
            theirs.write_all(&sent).unwrap();
            theirs.write_all(b"mn\r\n").unwrap();
            let mut wanted = Vec::new();
            while !wanted.ends_with(b"MN\r\n") {
                let mut bytes = [0; 65536];
                let read = theirs.read(&mut bytes).unwrap_or_else(|error| {
                    panic!("{engine:?} {count}: {error} after {}", sent.escape_ascii())
                });
                assert!(read > 0, "memcached has closed after {}", sent.escape_ascii());
                wanted.extend_from_slice(&bytes[..read]);
            }
            wanted.truncate(wanted.len() - 4);
            ours.write_all(&sent).unwrap();
            // Without an answer, the next one must be that of the next command.
            ours.write_all(if wanted.is_empty() { b"mn\r\n" } else { b"" }).unwrap();
            let mut got = vec![0; wanted.len() + if wanted.is_empty() { 4 } else { 0 }];
            let read = ours.read_exact(&mut got);
            if wanted.is_empty() {
                wanted.extend_from_slice(b"MN\r\n");
            }
            assert!(
                read.is_ok() && without_times(&got) == without_times(&wanted),
                "{engine:?} {count}: after {:?}: {:?} instead of {:?}, {read:?} {:#}",
                &sent.escape_ascii().to_string()[..sent.len().min(300)],
                &got[..got.len().min(300)].escape_ascii().to_string(),
                &wanted[..wanted.len().min(300)].escape_ascii().to_string(),
                serving.status()
            );
        }
        let status = serving.status();
        let in_kernel = status["kernel"]["messages"].as_u64().unwrap();
        let is_right = match engine {
            Engine::User => in_kernel == 0,
            Engine::Kernel => in_kernel > 1000,
            // Each move back makes the next one later.
            Engine::Auto => true,
        };
        assert!(is_right, "{engine:?} {status:#}");
    }
}
