//! A conversation's connection to a backend: its output, and the messages without a reply.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};

use super::backends::Backend;
use super::buffer::Buffer;
use super::limits;
use super::waiting::Turn;
use crate::service::Key;

/// A connection to a backend.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) backend: Arc<Backend>,
    pub(crate) socket: OwnedFd,
    /// The deadline of the pending connect, or `None` if the socket is connected.
    pub(crate) connecting: Option<Instant>,
    pub(crate) output: Buffer,
    unsent: VecDeque<Unsent>,
    /// How many bytes of the first of `unsent` are written.
    written: usize,
    /// The turns of messages without a reply, written or not, in the order of the replies.
    pub(crate) unanswered: VecDeque<Turn>,
    /// Since when the backend has sent nothing although a reply is pending.
    pub(crate) silent_since: Instant,
    /// An incomplete reply.
    pub(crate) input: Vec<u8>,
    /// The current epoll interest.
    pub(crate) interest: EventFlags,
    /// Distinguishes this connection's events from stale ones of an earlier connection at its
    /// index.
    pub(crate) generation: u16,
    /// The backend is no longer in the list, so it gets no more messages.
    pub(crate) retired: bool,
}

/// A message that is not completely written.
#[derive(Debug)]
pub(crate) struct Unsent {
    length: usize,
    recipient: Recipient,
}

/// The place of a message's key, for sending it again.
#[derive(Clone, Debug)]
pub(crate) enum Recipient {
    /// The message has this turn, and its key is there.
    Turn(Turn),
    /// The backend of this key, which will not answer.
    OneWay(Key),
}

/// A message that was not completely written when its connection failed.
#[derive(Debug)]
pub(crate) struct Left {
    /// The bytes that were not written.
    pub(crate) message: Vec<u8>,
    pub(crate) recipient: Recipient,
    /// A part of the message was written.
    pub(crate) is_cut: bool,
}

const CONNECT: Duration = Duration::from_secs(5);

impl Link {
    /// Starts a non-blocking connect.
    pub(crate) fn open(backend: Arc<Backend>, generation: u16, now: Instant) -> io::Result<Link> {
        let socket = backend.address.connect()?;
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

    /// Returns true if no output, reply or incomplete input is pending.
    pub(crate) fn is_idle(&self) -> bool {
        self.output.is_empty() && self.unanswered.is_empty() && self.input.is_empty()
    }

    pub(crate) fn has_room(&self) -> bool {
        self.output.len() < limits::BUFFER
    }

    pub(crate) fn push(&mut self, message: &[u8], recipient: Recipient, now: Instant) {
        self.output.push(message);
        if let Recipient::Turn(turn) = recipient {
            self.await_reply(turn, now);
        }
        self.unsent.push_back(Unsent { length: message.len(), recipient });
        let sent = self.backend.sent.own();
        sent.messages.add(1);
        sent.bytes.add(message.len() as u64);
    }

    /// Adds a turn whose reply is pending. The silence begins at `since` if no other reply is.
    pub(crate) fn await_reply(&mut self, turn: Turn, since: Instant) {
        if self.unanswered.is_empty() {
            self.silent_since = since;
        }
        self.unanswered.push_back(turn);
    }

    /// Returns true if the socket is connected, and an error if the connect failed.
    pub(crate) fn connected(&mut self) -> io::Result<bool> {
        if self.connecting.is_none() {
            return Ok(true);
        }
        sockopt::socket_error(&self.socket)??;
        if rustix::net::getpeername(&self.socket).is_err() {
            return Ok(false);
        }
        self.connecting = None;
        self.backend.sent.own().connections.add(1);
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

    /// Takes the unwritten messages of a failed connection.
    pub(crate) fn unsent(&mut self) -> Vec<Left> {
        let mut left = Vec::new();
        let mut bytes = self.output.as_slice();
        for unsent in std::mem::take(&mut self.unsent) {
            let (message, rest) = bytes.split_at(unsent.length - self.written);
            let (message, is_cut) = (message.to_vec(), self.written > 0);
            left.push(Left { message, recipient: unsent.recipient, is_cut });
            self.written = 0;
            bytes = rest;
        }
        self.output.clear();
        left
    }

    /// Reads into `bytes`.
    pub(crate) fn read(&self, bytes: &mut [u8]) -> Result<usize, Errno> {
        receive(self.socket.as_fd(), bytes)
    }
}

/// Calls recv(2), and repeats it after EINTR.
pub(crate) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match recv(socket, &mut *bytes, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            Ok((_, count)) => return Ok(count),
            Err(error) => return Err(error),
        }
    }
}
