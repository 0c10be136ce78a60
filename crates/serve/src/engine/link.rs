//! A connection to a backend, for one conversation: what is to be written to it, and which messages it has not answered.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with, sockopt,
};

use super::backends::Backend;
use super::buffer::Buffer;
use super::limits;
use super::waiting::Turn;

/// See the module.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) backend: Arc<Backend>,
    pub(crate) socket: OwnedFd,
    /// Until then it may be connecting. None: it is connected.
    pub(crate) connecting: Option<Instant>,
    pub(crate) output: Buffer,
    unsent: VecDeque<Unsent>,
    /// Bytes of the first of `unsent` that are written.
    written: usize,
    /// Written or not, in the order in which the backend will answer.
    pub(crate) unanswered: VecDeque<Turn>,
    /// Since when it has said nothing of what it is to answer.
    pub(crate) silent_since: Instant,
    /// Part of a reply.
    pub(crate) input: Vec<u8>,
    /// What epoll is asked for.
    pub(crate) interest: EventFlags,
    /// Tells events of this connection from those of one before it at the same place.
    pub(crate) generation: u16,
    /// The backend is not in the list any more: it gets no more messages.
    pub(crate) retired: bool,
}

/// A message that has not been written as a whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unsent {
    length: usize,
    /// None: the backend will not answer it.
    turn: Option<Turn>,
}

const CONNECT: Duration = Duration::from_secs(5);

impl Link {
    /// Begins to connect.
    pub(crate) fn open(backend: Arc<Backend>, generation: u16, now: Instant) -> io::Result<Link> {
        let family = if backend.address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
        limits::bound(&socket)?;
        match rustix::net::connect(&socket, &backend.address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(Link {
            backend,
            socket,
            connecting: Some(now + CONNECT),
            output: Buffer::default(),
            unsent: VecDeque::new(),
            written: 0,
            unanswered: VecDeque::new(),
            silent_since: now,
            input: Vec::new(),
            interest: EventFlags::empty(),
            generation,
            retired: false,
        })
    }

    /// Nothing waits to be written, and nothing to be answered.
    pub(crate) fn is_idle(&self) -> bool {
        self.output.is_empty() && self.unanswered.is_empty() && self.input.is_empty()
    }

    pub(crate) fn has_room(&self) -> bool {
        self.output.len() < limits::BUFFER
    }

    pub(crate) fn push(&mut self, message: &[u8], turn: Option<Turn>, now: Instant) {
        self.output.push(message);
        self.unsent.push_back(Unsent { length: message.len(), turn });
        if let Some(turn) = turn {
            self.await_reply(turn, now);
        }
        self.backend.messages.add(1);
        self.backend.bytes.add(message.len() as u64);
    }

    /// The backend is to answer, and has been silent at most since then.
    pub(crate) fn await_reply(&mut self, turn: Turn, since: Instant) {
        if self.unanswered.is_empty() {
            self.silent_since = since;
        }
        self.unanswered.push_back(turn);
    }

    /// Whether it is connected by now.
    pub(crate) fn connected(&mut self) -> io::Result<bool> {
        if self.connecting.is_none() {
            return Ok(true);
        }
        sockopt::socket_error(&self.socket)??;
        if rustix::net::getpeername(&self.socket).is_err() {
            return Ok(false);
        }
        self.connecting = None;
        self.backend.connected.add(1);
        self.backend.works();
        Ok(true)
    }

    /// Writes as much as the kernel takes.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            match send(&self.socket, self.output.as_slice(), SendFlags::NOSIGNAL) {
                Ok(count) => self.wrote(count),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn wrote(&mut self, count: usize) {
        self.output.take(count);
        self.written += count;
        while let Some(first) = self.unsent.front()
            && self.written >= first.length
        {
            self.written -= first.length;
            self.unsent.pop_front();
        }
    }

    /// What it has not written, now that it is over: the message, its turn, and whether a part of it was written.
    pub(crate) fn unsent(&mut self) -> Vec<(Vec<u8>, Option<Turn>, bool)> {
        let mut left = Vec::new();
        let mut bytes = self.output.as_slice();
        for unsent in std::mem::take(&mut self.unsent) {
            let (message, rest) = bytes.split_at(unsent.length - self.written);
            left.push((message.to_vec(), unsent.turn, self.written > 0));
            self.written = 0;
            bytes = rest;
        }
        self.output.clear();
        left
    }

    /// Reads behind what `bytes` holds.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> Result<usize, Errno> {
        receive(self.socket.as_fd(), bytes)
    }
}

/// recv(2), without a signal in the way.
pub(crate) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match recv(socket, &mut *bytes, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            Ok((_, count)) => return Ok(count),
            Err(error) => return Err(error),
        }
    }
}
