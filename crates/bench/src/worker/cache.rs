//! The load on memcached and Redis: one thread with an epoll instance and many connections, each
//! with one pending request, as memtier and redis-benchmark do it. One request in ten is a set,
//! over 10,000 items of 1 B to 4 KB. Every returned value is compared.
//!
//! libmemcached's generators are not suitable. memcaslap does not support Unix sockets. memcslap
//! has a thread for each connection, so with one CPU for the client it measures the scheduler.
//! redis-benchmark has neither a duration nor a marked start for measuring its processor time.

use std::io::{Read, Write};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use super::many::{Conversation, converse};
use super::socket::{Socket, unless_blocked};
use super::{Client, name};

const ITEMS: u64 = 10_000;
const LARGEST: usize = 4096;
/// One request in this many is a set.
const SET_EVERY: u64 = 10;

/// Whose protocol is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Cache {
    /// memcached's text protocol
    Memcached,
    /// Redis' protocol
    Redis,
}

impl Cache {
    /// Returns the answer to a set.
    fn stored(self) -> &'static [u8] {
        match self {
            Cache::Memcached => b"STORED\r\n",
            Cache::Redis => b"+OK\r\n",
        }
    }

    fn append_set(self, request: &mut Vec<u8>, key: u64, value: &[u8]) {
        let size = value.len();
        let head = match self {
            Cache::Memcached => write!(request, "set item:{key:05} 0 0 {size}\r\n"),
            Cache::Redis => write!(request, "*3\r\n$3\r\nSET\r\n$10\r\nitem:{key:05}\r\n${size}\r\n"),
        };
        head.expect("a Vec takes all");
        request.extend_from_slice(value);
        request.extend_from_slice(b"\r\n");
    }

    fn append_get(self, request: &mut Vec<u8>, key: u64) {
        match self {
            Cache::Memcached => write!(request, "get item:{key:05}\r\n"),
            Cache::Redis => write!(request, "*2\r\n$3\r\nGET\r\n$10\r\nitem:{key:05}\r\n"),
        }
        .expect("a Vec takes all");
    }

    /// Appends the whole answer to a get.
    fn append_answer(self, answer: &mut Vec<u8>, key: u64, value: &[u8]) {
        let size = value.len();
        let (head, tail): (_, &[u8]) = match self {
            Cache::Memcached => (write!(answer, "VALUE item:{key:05} 0 {size}\r\n"), b"\r\nEND\r\n"),
            Cache::Redis => (write!(answer, "${size}\r\n"), b"\r\n"),
        };
        head.expect("a Vec takes all");
        answer.extend_from_slice(value);
        answer.extend_from_slice(tail);
    }
}

pub(super) fn run(client: &Client, cache: Cache, connections: usize) -> Result<()> {
    let values = Values { block: block(), cache };
    store_all(client, &values)?;
    converse(client, connections, 1, 0, |socket, index| Requester::new(socket, index, &values))
}

/// Stores every item once, over a separate connection.
fn store_all(client: &Client, values: &Values) -> Result<()> {
    let mut socket = Socket::connect(&client.to, client.nodelay)?;
    let mut requests = Vec::new();
    let stored = values.cache.stored();
    let mut answers = vec![0; 100 * stored.len()];
    for first in (0..ITEMS).step_by(100) {
        requests.clear();
        (first..first + 100).for_each(|key| values.append_set(&mut requests, key));
        socket.write_all(&requests)?;
        socket.read_exact(&mut answers)?;
        let all = answers.chunks(stored.len()).all(|answer| answer == stored);
        ensure!(all, "{} refused to store an item", name(values.cache));
    }
    Ok(())
}

/// The values of the items: ranges of one block, whose size and contents follow from the key.
struct Values {
    block: Vec<u8>,
    cache: Cache,
}

fn block() -> Vec<u8> {
    let mut state = 1;
    (0..3 * LARGEST).map(|_| (next_random(&mut state) >> 56) as u8).collect()
}

impl Values {
    /// Returns an item's value. Sizes are distributed evenly over the powers of two up to 4 KB.
    fn of(&self, key: u64) -> &[u8] {
        let mut state = key.wrapping_add(77).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let power = next_random(&mut state) >> 32;
        let most = 1 << (1 + power % 12);
        let size = 1 + (next_random(&mut state) >> 32) as usize % most;
        let offset = (next_random(&mut state) >> 32) as usize % (2 * LARGEST);
        &self.block[offset..offset + size]
    }

    fn append_set(&self, request: &mut Vec<u8>, key: u64) {
        self.cache.append_set(request, key, self.of(key));
    }
}

/// A connection with one pending request.
struct Requester<'a> {
    values: &'a Values,
    socket: Socket,
    random: u64,
    begun: Instant,
    request: Vec<u8>,
    written: usize,
    expected: Vec<u8>,
    answer: Vec<u8>,
    received: usize,
}

impl Requester<'_> {
    fn new(socket: Socket, index: u64, values: &Values) -> Requester<'_> {
        Requester {
            values,
            socket,
            random: index + 1,
            begun: Instant::now(),
            request: Vec::new(),
            written: 0,
            expected: Vec::new(),
            answer: vec![0; 2 * LARGEST],
            received: 0,
        }
    }

    /// Chooses a random request.
    fn begin(&mut self) {
        let (values, random) = (self.values, next_random(&mut self.random) >> 16);
        let key = random % ITEMS;
        self.request.clear();
        self.expected.clear();
        (self.written, self.received) = (0, 0);
        if (random / ITEMS).is_multiple_of(SET_EVERY) {
            values.append_set(&mut self.request, key);
            self.expected.extend_from_slice(values.cache.stored());
        } else {
            values.cache.append_get(&mut self.request, key);
            values.cache.append_answer(&mut self.expected, key, values.of(key));
        }
        self.begun = Instant::now();
    }
}

impl Conversation for Requester<'_> {
    fn socket(&mut self) -> &mut Socket {
        &mut self.socket
    }

    fn request(&mut self, count: usize) -> Result<bool> {
        if count > 0 {
            self.begin();
        }
        while self.written < self.request.len() {
            let sent = unless_blocked(self.socket.write(&self.request[self.written..])).context("sending")?;
            let Some(count) = sent else { break };
            self.written += count;
        }
        Ok(self.written < self.request.len())
    }

    /// Reads until the answer is complete. Fails if it is wrong.
    fn receive(&mut self, _: &mut [u8], mut complete: impl FnMut(Instant)) -> Result<usize> {
        // Only one request is pending, so nothing follows a complete answer.
        while self.received < self.expected.len() {
            let got =
                unless_blocked(self.socket.read(&mut self.answer[self.received..])).context("receiving")?;
            match got {
                Some(0) => bail!("the server closed the connection"),
                Some(count) => self.received += count,
                None => return Ok(0),
            }
        }
        ensure!(self.answer[..self.received] == self.expected[..], "the server answered with something else");
        complete(self.begun);
        Ok(1)
    }
}

fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state ^ *state >> 29
}
