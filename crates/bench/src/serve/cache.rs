//! The load of the cache: one thread with many connections reads items that exist, from memcached or
//! from `shunt serve builtin:cache`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use shunt_sys::proc::pids;

use super::load::{CACHE_CLIENTS, Sample, WARM, connect, sample};
use crate::latency::Latencies;
use crate::process::Stat;

const KEYS: usize = 1000;

/// A connection with its pending answers.
struct Client {
    stream: TcpStream,
    /// The next key.
    key: usize,
    /// Bytes of an incomplete answer.
    got: usize,
    sent: Instant,
}

/// Stores the items, and reads them for `time`, with so many requests outstanding on each connection.
pub(super) fn run(bytes: usize, outstanding: usize, time: Duration, server: u32) -> Result<Sample> {
    let mut stream = connect()?;
    for key in 0..KEYS {
        let line = format!("set key-{key:06} 0 0 {bytes}\r\n");
        stream.write_all(&[line.as_bytes(), &vec![b'v'; bytes], b"\r\n"].concat())?;
        let mut stored = [0; b"STORED\r\n".len()];
        stream.read_exact(&mut stored)?;
        ensure!(&stored == b"STORED\r\n", "an item is not stored");
    }
    let answer = format!("VALUE key-000000 0 {bytes}\r\n").len() + bytes + b"\r\nEND\r\n".len();
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    let mut clients = Vec::new();
    for number in 0..CACHE_CLIENTS {
        let stream = connect()?;
        stream.set_nonblocking(true)?;
        epoll::add(&epoll, &stream, EventData::new_u64(number as u64), EventFlags::IN)?;
        clients.push(Client { stream, key: number * 7, got: 0, sent: Instant::now() });
    }
    for client in &mut clients {
        client.ask(outstanding)?;
    }
    let (begin, mut latencies, mut before) = (Instant::now(), Latencies::new(), None);
    let (mut buffer, mut events) = (vec![0; 1 << 17], Vec::<Event>::with_capacity(CACHE_CLIENTS));
    loop {
        let now = Instant::now();
        let is_measured = now - begin >= WARM;
        if is_measured && before.is_none() {
            before = Some(processor_time(server));
        }
        if now - begin >= WARM + time {
            let spent = processor_time(server) - before.context("set above")?;
            let mut sample = sample(&latencies, latencies.count(), time);
            sample.processor_us = spent.as_secs_f64() * 1e6 / latencies.count().max(1) as f64;
            return Ok(sample);
        }
        events.clear();
        let timeout = Timespec { tv_sec: 5, tv_nsec: 0 };
        let count = epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout))?;
        ensure!(count > 0, "no answer for five seconds");
        for event in &events {
            let client = &mut clients[event.data.u64() as usize];
            let read = client.stream.read(&mut buffer)?;
            ensure!(read > 0, "the cache closed a connection");
            client.got += read;
            let answers = client.got / answer;
            client.got %= answer;
            let now = Instant::now();
            if is_measured {
                (0..answers).for_each(|_| latencies.record(now - client.sent));
            }
            client.ask(answers)?;
        }
    }
}

impl Client {
    /// Sends requests, in one piece.
    fn ask(&mut self, count: usize) -> Result<()> {
        let mut bytes = Vec::with_capacity(count * 16);
        for _ in 0..count {
            self.key = (self.key + 1) % KEYS;
            write!(bytes, "get key-{:06}\r\n", self.key)?;
        }
        self.sent = Instant::now();
        self.stream.write_all(&bytes)?;
        Ok(())
    }
}

/// Returns the processor time so far of the server, of this process, and of the kernel's threads that
/// serve sockets: the kernel's half of a service runs there, and in the process that sends.
fn processor_time(server: u32) -> Duration {
    let is_counted = |stat: &Stat| {
        let is_kernels = stat.name.starts_with("(kworker") || stat.name.starts_with("(ksoftirqd");
        stat.pid == server || stat.pid == std::process::id() || is_kernels
    };
    pids().filter_map(Stat::of).filter(is_counted).map(|stat| stat.cpu()).sum()
}
