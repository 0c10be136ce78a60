//! A closed load: one thread with many connections, on each of which so many requests are
//! outstanding. An answer is followed by the next request.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use super::load::{Sample, WARM, sample};
use crate::latency::Latencies;
use crate::process::Times;

/// A closed load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closed<'a> {
    /// What the server is, for messages.
    pub(super) server: &'a str,
    /// The bytes of each answer.
    pub(super) length: usize,
    pub(super) outstanding: usize,
    pub(super) time: Duration,
}

/// A connection with its pending answers.
struct Client {
    stream: TcpStream,
    pending: usize,
    /// Bytes of an incomplete answer.
    got: usize,
    sent: Instant,
}

impl Closed<'_> {
    /// Runs over these connections. `spent` returns the processor times so far, and `ask` appends the
    /// next request of the connection with this number.
    pub(super) fn run(
        self,
        streams: Vec<TcpStream>,
        spent: impl Fn() -> Times,
        mut ask: impl FnMut(usize, &mut Vec<u8>),
    ) -> Result<Sample> {
        let Closed { server, length, outstanding, time } = self;
        let (epoll, mut clients) = (epoll::create(CreateFlags::CLOEXEC)?, Vec::new());
        for (number, stream) in streams.into_iter().enumerate() {
            stream.set_nonblocking(true)?;
            epoll::add(&epoll, &stream, EventData::new_u64(number as u64), EventFlags::IN)?;
            clients.push(Client { stream, pending: 0, got: 0, sent: Instant::now() });
        }
        for (number, client) in clients.iter_mut().enumerate() {
            client.ask(outstanding, |bytes| ask(number, bytes))?;
        }
        let (begin, mut latencies, mut before) = (Instant::now(), Latencies::new(), None);
        let (mut buffer, mut events) = (vec![0; 1 << 18], Vec::<Event>::with_capacity(clients.len()));
        loop {
            let now = Instant::now();
            let is_measured = now - begin >= WARM;
            if is_measured && before.is_none() {
                before = Some(spent());
            }
            if now - begin >= WARM + time {
                let spent = spent().since(&before.context("set above")?);
                let mut sample = sample(&latencies, latencies.count(), time);
                sample.processor_us = spent.as_secs_f64() * 1e6 / latencies.count().max(1) as f64;
                return Ok(sample);
            }
            events.clear();
            let timeout = Timespec { tv_sec: 5, tv_nsec: 0 };
            let count = epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout))?;
            ensure!(count > 0, "no answer for five seconds");
            for event in &events {
                let number = event.data.u64() as usize;
                let client = &mut clients[number];
                let read = client.stream.read(&mut buffer)?;
                ensure!(read > 0, "the {server} closed a connection");
                client.got += read;
                let answers = client.got / length;
                client.got %= length;
                let is_right = answers < client.pending || answers == client.pending && client.got == 0;
                ensure!(is_right, "an answer has another length");
                client.pending -= answers;
                let now = Instant::now();
                if is_measured {
                    (0..answers).for_each(|_| latencies.record(now - client.sent));
                }
                client.ask(answers, |bytes| ask(number, bytes))?;
            }
        }
    }
}

impl Client {
    /// Sends requests, in one piece.
    fn ask(&mut self, count: usize, mut next: impl FnMut(&mut Vec<u8>)) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let mut bytes = Vec::new();
        (0..count).for_each(|_| next(&mut bytes));
        (self.sent, self.pending) = (Instant::now(), self.pending + count);
        self.stream.write_all(&bytes)?;
        Ok(())
    }
}
