//! Echo servers, which send back every whole message.

use std::collections::HashMap;
use std::io::{Read, Write};

use anyhow::{Context, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use rustix::fd::AsFd;

use super::Server;
use super::socket::{Listener, Socket, serve, unless_blocked};

/// Serves with a thread for each connection.
pub(super) fn blocking(server: &Server) -> Result<()> {
    let size = server.size;
    serve(&server.at, server.nodelay, move |mut socket| {
        let mut message = vec![0; size];
        // The client may also close in the middle of a message.
        while socket.read_exact(&mut message).is_ok() && socket.write_all(&message).is_ok() {}
    })
}

/// Serves with one thread and a level-triggered epoll instance.
pub(super) fn epoll(server: &Server) -> Result<()> {
    let listener = Listener::bind(&server.at)?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    let stdin = std::io::stdin();
    let add = |fd: rustix::fd::BorrowedFd<'_>, key| epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, key));
    add(stdin.as_fd(), STDIN)?;
    add(listener.as_fd(), LISTENER)?;
    let mut conversations = HashMap::new();
    let mut events = [EpollEvent::empty(); 64];
    let mut buffer = vec![0; server.size.max(64 * 1024)];
    loop {
        let count = epoll.wait(&mut events, EpollTimeout::NONE)?;
        for event in &events[..count] {
            match event.data() {
                STDIN => return Ok(()),
                LISTENER => {
                    let mut socket = listener.accept(server.nodelay).context("accepting")?;
                    socket.watch(&epoll, EpollFlags::EPOLLIN)?;
                    conversations.insert(socket.key(), Conversation::new(socket, server.size));
                }
                key => {
                    let conversation: &mut Conversation =
                        conversations.get_mut(&key).context("an event of a socket that is known")?;
                    if conversation.advance(&mut buffer).unwrap_or(false) {
                        let answers = conversation.answering;
                        let wanted = if answers { EpollFlags::EPOLLOUT } else { EpollFlags::EPOLLIN };
                        conversation.socket.watch(&epoll, wanted)?;
                    } else {
                        conversations.remove(&key);
                    }
                }
            }
        }
    }
}

const STDIN: u64 = u64::MAX;
const LISTENER: u64 = u64::MAX - 1;

struct Conversation {
    socket: Socket,
    size: usize,
    /// The received part of a message, or the bytes that are not sent back yet.
    kept: Vec<u8>,
    sent: usize,
    /// True if `kept` holds bytes to send back.
    answering: bool,
}

impl Conversation {
    fn new(socket: Socket, size: usize) -> Conversation {
        Conversation { socket, size, kept: Vec::new(), sent: 0, answering: false }
    }

    /// Handles an event. Returns false if the connection has ended.
    fn advance(&mut self, buffer: &mut [u8]) -> Result<bool> {
        if self.answering && !self.answer()? {
            return Ok(true);
        }
        let Some(count) = unless_blocked(self.socket.read(buffer))? else { return Ok(true) };
        if count == 0 {
            return Ok(false);
        }
        if self.kept.is_empty() {
            // Send whole messages directly, without a copy, as servers usually do.
            let whole = count - count % self.size;
            let sent = unless_blocked(self.socket.write(&buffer[..whole]))?.unwrap_or(0);
            self.answering = sent < whole;
            self.kept.extend_from_slice(&buffer[sent..if self.answering { whole } else { count }]);
            debug_assert!(
                !self.answering || whole == count,
                "a client has no more than whole messages under way"
            );
        } else {
            self.kept.extend_from_slice(&buffer[..count]);
            self.answering = self.kept.len().is_multiple_of(self.size);
            if self.answering {
                self.answer()?;
            }
        }
        Ok(true)
    }

    /// Sends the kept bytes. Returns true if all are sent.
    fn answer(&mut self) -> Result<bool> {
        while self.sent < self.kept.len() {
            let Some(count) = unless_blocked(self.socket.write(&self.kept[self.sent..]))? else {
                return Ok(false);
            };
            self.sent += count;
        }
        self.kept.clear();
        self.sent = 0;
        self.answering = false;
        Ok(true)
    }
}
