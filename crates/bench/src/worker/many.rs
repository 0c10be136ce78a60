//! Many connections in one epoll instance. Each keeps a fixed number of requests pending: every
//! answer starts the next request.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::socket::{Socket, unless_blocked};
use super::{Client, Clock, PATIENCE_MS, Phase, finish};
use crate::latency::Latencies;

/// Average answers on each connection before the measurement. By then its transport is settled.
const WARM_ANSWERS: u64 = 16;

pub(super) fn run(client: &Client, connections: usize, depth: usize) -> Result<()> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let mut requesters = HashMap::with_capacity(connections);
    for _ in 0..connections {
        let socket = Socket::connect(&client.to, client.nodelay)?;
        socket.set_nonblocking()?;
        epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, socket.key()))?;
        requesters.insert(socket.key(), Requester::new(socket, client.size));
    }

    let mut clock = Clock::start(client);
    let mut latencies = Latencies::new();
    for requester in requesters.values_mut() {
        requester.request(depth)?;
        requester.watch(&epoll)?;
    }
    let mut events = [EpollEvent::empty(); 64];
    let mut buffer = vec![0; (client.size * depth).max(64 * 1024)];
    let warm = WARM_ANSWERS * connections as u64;
    let (mut answers, mut operations) = (0, 0);
    let seconds = loop {
        let count = epoll.wait(&mut events, EpollTimeout::from(PATIENCE_MS))?;
        ensure!(count > 0, "no answer within {PATIENCE_MS} ms");
        let now = Instant::now();
        let phase = if answers < warm { Phase::Warm } else { clock.phase(now, operations)? };
        if phase == Phase::Over {
            break clock.seconds(now);
        }
        for event in &events[..count] {
            let requester: &mut Requester = requesters.get_mut(&event.data()).context("a socket of ours")?;
            let answered = requester.receive(&mut buffer, |begun| {
                if phase == Phase::Measured {
                    latencies.record(begun.elapsed());
                }
            })?;
            answers += answered as u64;
            if phase == Phase::Measured {
                operations += answered as u64;
            }
            requester.request(answered)?;
            requester.watch(&epoll)?;
        }
    };
    finish(&latencies.measured(operations, seconds))
}

struct Requester {
    socket: Socket,
    message: Vec<u8>,
    /// Unsent bytes.
    unsent: usize,
    /// Received bytes of the current answer.
    received: usize,
    /// The start times of the pending requests.
    begun: VecDeque<Instant>,
    watched: EpollFlags,
}

impl Requester {
    fn new(socket: Socket, size: usize) -> Requester {
        let begun = VecDeque::new();
        Requester {
            socket,
            message: vec![7; size],
            unsent: 0,
            received: 0,
            begun,
            watched: EpollFlags::EPOLLIN,
        }
    }

    /// Starts `count` more requests, each with a separate call, like a program that does not know
    /// of the others.
    fn request(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            self.begun.push_back(Instant::now());
            self.unsent += self.message.len();
        }
        while self.unsent > 0 {
            let rest = match self.unsent % self.message.len() {
                0 => self.message.len(),
                rest => rest,
            };
            let message = &self.message[self.message.len() - rest..];
            let Some(count) = unless_blocked(self.socket.write(message))? else { break };
            self.unsent -= count;
        }
        Ok(())
    }

    /// Reads once. Returns how many answers became complete.
    fn receive(&mut self, buffer: &mut [u8], mut complete: impl FnMut(Instant)) -> Result<usize> {
        let mut answered = 0;
        if let Some(count) = unless_blocked(self.socket.read(buffer))? {
            ensure!(count > 0, "the server closed a connection");
            self.received += count;
            while self.received >= self.message.len() {
                self.received -= self.message.len();
                complete(self.begun.pop_front().context("more answers than requests")?);
                answered += 1;
            }
        }
        Ok(answered)
    }

    fn watch(&mut self, epoll: &Epoll) -> Result<()> {
        let mut wanted = EpollFlags::EPOLLIN;
        wanted.set(EpollFlags::EPOLLOUT, self.unsent > 0);
        if wanted != self.watched {
            epoll.modify(&self.socket, &mut EpollEvent::new(wanted, self.socket.key()))?;
            self.watched = wanted;
        }
        Ok(())
    }
}
