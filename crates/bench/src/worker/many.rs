//! Many connections in one epoll instance. Each keeps a fixed number of requests pending: every
//! answer starts the next request.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::socket::{Socket, unless_blocked};
use super::{Client, Clock, PATIENCE_MS, Phase, finish};
use crate::latency::Latencies;

/// Average answers on each connection before the measurement. By then its transport is settled.
const WARM_ANSWERS: u64 = 16;

/// A connection whose client always has requests under way.
pub(super) trait Conversation {
    fn socket(&mut self) -> &mut Socket;

    /// Starts `count` more requests, and sends as much as the socket takes. Returns true if bytes
    /// remain.
    fn request(&mut self, count: usize) -> Result<bool>;

    /// Reads as much as there is. Calls `complete` with the start of each answered request, and
    /// returns how many there were.
    fn receive(&mut self, buffer: &mut [u8], complete: impl FnMut(Instant)) -> Result<usize>;
}

pub(super) fn run(client: &Client, connections: usize, depth: usize) -> Result<()> {
    let warm = WARM_ANSWERS * connections as u64;
    converse(client, connections, depth, warm, |socket, _| Requester::new(socket, client.size))
}

/// Keeps `depth` requests under way on each connection. The measurement begins after `warm` answers
/// at the earliest.
pub(super) fn converse<C: Conversation>(
    client: &Client,
    connections: usize,
    depth: usize,
    warm: u64,
    conversation: impl Fn(Socket, u64) -> C,
) -> Result<()> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let mut conversations = HashMap::with_capacity(connections);
    for index in 0..connections {
        let mut socket = Socket::connect(&client.to, client.nodelay)?;
        socket.watch(&epoll, EpollFlags::EPOLLIN)?;
        conversations.insert(socket.key(), conversation(socket, index as u64));
    }

    let request = |conversation: &mut C, count| -> Result<()> {
        let mut wanted = EpollFlags::EPOLLIN;
        wanted.set(EpollFlags::EPOLLOUT, conversation.request(count)?);
        conversation.socket().watch(&epoll, wanted)
    };
    let mut clock = Clock::start(client);
    let mut latencies = Latencies::new();
    for conversation in conversations.values_mut() {
        request(conversation, depth)?;
    }
    let mut events = [EpollEvent::empty(); 64];
    let mut buffer = vec![0; (client.size * depth).max(64 * 1024)];
    let mut answers = 0;
    loop {
        let count = epoll.wait(&mut events, EpollTimeout::from(PATIENCE_MS))?;
        ensure!(count > 0, "no answer within {PATIENCE_MS} ms");
        let now = Instant::now();
        let phase = if answers < warm { Phase::Warm } else { clock.phase(now, latencies.count())? };
        if phase == Phase::Over {
            return finish(&latencies.measured(latencies.count(), clock.seconds(now)));
        }
        for event in &events[..count] {
            let conversation = conversations.get_mut(&event.data()).context("a socket of ours")?;
            let answered = conversation.receive(&mut buffer, |begun| {
                if phase == Phase::Measured {
                    latencies.record(begun.elapsed());
                }
            })?;
            answers += answered as u64;
            request(conversation, answered)?;
        }
    }
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
}

impl Requester {
    fn new(socket: Socket, size: usize) -> Requester {
        Requester { socket, message: vec![7; size], unsent: 0, received: 0, begun: VecDeque::new() }
    }
}

impl Conversation for Requester {
    fn socket(&mut self) -> &mut Socket {
        &mut self.socket
    }

    /// Sends each request with a separate call, like a program that does not know of the others.
    fn request(&mut self, count: usize) -> Result<bool> {
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
        Ok(self.unsent > 0)
    }

    /// Reads once.
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
}
