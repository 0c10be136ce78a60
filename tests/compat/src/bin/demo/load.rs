//! The load on memcached: one thread, an epoll set and many connections with one request under way on each, as
//! memtier and redis-benchmark do it. Nine gets to one set over 10,000 items of 1 B to 4 KB; every value that
//! comes back is compared. It makes its calls through libc, as any dynamically linked program does.
//!
//! libmemcached's own generators are not used here: memcaslap knows no Unix sockets, and memcslap has a thread
//! for each connection, so that with one CPU for the client it measures the scheduler.

use anyhow::{Context, Result, bail, ensure};
use mio::event::Source;
use mio::net::{TcpStream, UnixStream};
use mio::{Events, Interest, Poll, Token};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Where memcached listens.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// TCP.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

const ITEMS: u64 = 10_000;
const LARGEST: usize = 4096;
/// One request in this many is a set.
const SET_EVERY: u64 = 10;

/// Runs `requests` requests over `connections` connections and prints one JSON object.
pub(crate) fn run(target: &Target, connections: usize, requests: u64) -> Result<()> {
    let values = Values::new();
    store_all(target, &values)?;
    let mut poll = Poll::new()?;
    let mut conversations = Vec::with_capacity(connections);
    for index in 0..connections {
        let mut stream = connect(target)?;
        poll.registry().register(&mut *stream, Token(index), Interest::READABLE | Interest::WRITABLE)?;
        conversations.push(Conversation::new(stream, index as u64));
    }

    let mut events = Events::with_capacity(connections);
    let mut latencies = Vec::with_capacity(requests as usize);
    let (mut begun, mut done) = (0, 0);
    let start = Instant::now();
    while done < requests {
        poll.poll(&mut events, Some(Duration::from_secs(5)))?;
        ensure!(!events.is_empty(), "no answer within 5 s: {done} of {requests} requests done");
        for event in &events {
            let conversation = &mut conversations[event.token().0];
            if conversation.advance()? {
                latencies.push(conversation.begun.elapsed().as_nanos() as u32);
                done += 1;
            }
            if conversation.is_idle() && begun < requests {
                begun += 1;
                conversation.begin(&values)?;
            }
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    latencies.sort_unstable();
    let percentile = |part: f64| f64::from(latencies[(latencies.len() as f64 * part) as usize]) / 1000.0;
    let report = serde_json::json!({
        "requests": requests,
        "seconds": seconds,
        "p50_us": percentile(0.5),
        "p99_us": percentile(0.99),
    });
    println!("{report}");
    Ok(())
}

/// A socket of either kind.
trait Stream: Read + Write + Source {}
impl<S: Read + Write + Source> Stream for S {}

fn connect(target: &Target) -> Result<Box<dyn Stream>> {
    Ok(match target {
        Target::Tcp(address) => {
            let stream = TcpStream::connect(*address).context("connecting to memcached")?;
            Box::new(stream)
        }
        Target::Unix(path) => Box::new(UnixStream::connect(path).context("connecting to memcached")?),
    })
}

/// Stores every item once, over a connection of its own.
fn store_all(target: &Target, values: &Values) -> Result<()> {
    let mut stream = connect_blocking(target)?;
    let mut requests = Vec::new();
    let mut answers = Vec::new();
    for first in (0..ITEMS).step_by(100) {
        requests.clear();
        (first..first + 100).for_each(|key| values.append_set(&mut requests, key));
        stream.write_all(&requests)?;
        answers.resize(100 * STORED.len(), 0);
        stream.read_exact(&mut answers)?;
        ensure!(
            answers.chunks(STORED.len()).all(|answer| answer == STORED),
            "memcached refused to store an item"
        );
    }
    Ok(())
}

trait Blocking: Read + Write {}
impl<S: Read + Write> Blocking for S {}

fn connect_blocking(target: &Target) -> Result<Box<dyn Blocking>> {
    Ok(match target {
        Target::Tcp(address) => Box::new(std::net::TcpStream::connect(address)?),
        Target::Unix(path) => Box::new(std::os::unix::net::UnixStream::connect(path)?),
    })
}

const STORED: &[u8] = b"STORED\r\n";

/// The value of each item: a window of one block, so that size and content follow from the key.
struct Values {
    block: Vec<u8>,
}

impl Values {
    fn new() -> Values {
        let mut state = 1;
        Values { block: (0..3 * LARGEST).map(|_| (next_random(&mut state) >> 56) as u8).collect() }
    }

    /// Sizes are spread evenly over the powers of two up to 4 KB.
    fn of(&self, key: u64) -> &[u8] {
        let mut state = key.wrapping_add(77).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let power = next_random(&mut state) >> 32;
        let most = 1 << (1 + power % 12);
        let size = 1 + (next_random(&mut state) >> 32) as usize % most;
        let offset = (next_random(&mut state) >> 32) as usize % (2 * LARGEST);
        &self.block[offset..offset + size]
    }

    fn append_set(&self, request: &mut Vec<u8>, key: u64) {
        let value = self.of(key);
        write!(request, "set item:{key:05} 0 0 {}\r\n", value.len()).expect("a Vec takes all");
        request.extend_from_slice(value);
        request.extend_from_slice(b"\r\n");
    }

    /// The whole answer to a get.
    fn append_answer(&self, answer: &mut Vec<u8>, key: u64) {
        let value = self.of(key);
        write!(answer, "VALUE item:{key:05} 0 {}\r\n", value.len()).expect("a Vec takes all");
        answer.extend_from_slice(value);
        answer.extend_from_slice(b"\r\nEND\r\n");
    }
}

/// One connection, with at most one request under way.
struct Conversation {
    stream: Box<dyn Stream>,
    random: u64,
    begun: Instant,
    request: Vec<u8>,
    written: usize,
    expected: Vec<u8>,
    answer: Vec<u8>,
    received: usize,
}

impl Conversation {
    fn new(stream: Box<dyn Stream>, index: u64) -> Conversation {
        Conversation {
            stream,
            random: index + 1,
            begun: Instant::now(),
            request: Vec::new(),
            written: 0,
            expected: Vec::new(),
            answer: vec![0; 2 * LARGEST],
            received: 0,
        }
    }

    fn is_idle(&self) -> bool {
        self.expected.is_empty()
    }

    /// Sends a random request.
    fn begin(&mut self, values: &Values) -> Result<()> {
        let random = next_random(&mut self.random) >> 16;
        let key = random % ITEMS;
        self.request.clear();
        self.expected.clear();
        (self.written, self.received) = (0, 0);
        if (random / ITEMS).is_multiple_of(SET_EVERY) {
            values.append_set(&mut self.request, key);
            self.expected.extend_from_slice(STORED);
        } else {
            write!(self.request, "get item:{key:05}\r\n").expect("a Vec takes all");
            values.append_answer(&mut self.expected, key);
        }
        self.begun = Instant::now();
        self.write()
    }

    fn write(&mut self) -> Result<()> {
        while self.written < self.request.len() {
            match self.stream.write(&self.request[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected) => {
                    break;
                }
                Err(error) => return Err(error).context("sending a request"),
            }
        }
        Ok(())
    }

    /// Goes as far as the socket allows; whether the answer has become complete. It must be right.
    fn advance(&mut self) -> Result<bool> {
        if self.is_idle() {
            return Ok(false);
        }
        self.write()?;
        // One request is under way at a time: a complete answer leaves nothing more to read.
        while self.received < self.expected.len() {
            match self.stream.read(&mut self.answer[self.received..]) {
                Ok(0) => bail!("memcached closed the connection"),
                Ok(count) => self.received += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error).context("receiving an answer"),
            }
        }
        ensure!(self.answer[..self.received] == self.expected[..], "memcached answered with something else");
        self.expected.clear();
        Ok(true)
    }
}

fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state ^ *state >> 29
}
