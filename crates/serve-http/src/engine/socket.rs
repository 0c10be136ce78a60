//! A non-blocking socket in an edge-triggered epoll instance, and the pipes for `splice`.
//!
//! epoll reports a change once, so a socket remembers whether it may be read from and written to.
//! A read that returns less than it could shows that nothing is left, unless the peer has ended:
//! then the end is reported by the next read.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use crate::cache::StoredBody;
use crate::cache::held::Held;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

/// A socket with its readiness.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) fd: OwnedFd,
    pub(crate) is_readable: bool,
    pub(crate) is_writable: bool,
    /// The peer has ended its direction, or the connection is broken.
    pub(crate) has_ended: bool,
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    Bytes(usize),
    Nothing,
    End,
    Failed,
}

/// The connection is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

/// What epoll reports of a socket.
pub(crate) const INTEREST: EventFlags =
    EventFlags::IN.union(EventFlags::OUT).union(EventFlags::RDHUP).union(EventFlags::ET);

impl Socket {
    pub(crate) fn new(fd: OwnedFd, is_writable: bool) -> Socket {
        Socket { fd, is_readable: false, is_writable, has_ended: false }
    }

    /// Takes an event of epoll.
    pub(crate) fn note(&mut self, flags: EventFlags) {
        let broken = EventFlags::HUP | EventFlags::ERR;
        self.is_readable |= flags.intersects(EventFlags::IN | EventFlags::RDHUP | broken);
        self.is_writable |= flags.intersects(EventFlags::OUT | broken);
        self.has_ended |= flags.intersects(EventFlags::RDHUP | broken);
    }

    /// Reads once.
    pub(crate) fn receive(&mut self, into: &mut [u8]) -> Received {
        if !self.is_readable {
            return Received::Nothing;
        }
        let room = into.len();
        loop {
            match rustix::net::recv(&self.fd, &mut *into, RecvFlags::empty()) {
                Ok((_, 0)) => return Received::End,
                Ok((_, count)) => {
                    self.is_readable = count == room || self.has_ended;
                    return Received::Bytes(count);
                }
                Err(Errno::AGAIN) => {
                    self.is_readable = false;
                    return Received::Nothing;
                }
                Err(Errno::INTR) => {}
                Err(_) => return Received::Failed,
            }
        }
    }

    /// Sends as much as the kernel takes.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        let mut sent = 0;
        while self.is_writable && sent < bytes.len() {
            match rustix::net::send(&self.fd, &bytes[sent..], SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::AGAIN) => self.is_writable = false,
                Err(Errno::INTR) => {}
                Err(_) => return Err(Broken),
            }
        }
        Ok(sent)
    }

    /// Moves bytes into a pipe that is empty.
    pub(crate) fn splice_to(&mut self, pipe: &mut Pipe, most: u64) -> Received {
        if !self.is_readable {
            return Received::Nothing;
        }
        let most = usize::try_from(most).unwrap_or(usize::MAX).min(PIPE);
        match splice(&self.fd, None, &pipe.write, None, most, FLAGS) {
            Ok(0) => Received::End,
            Ok(count) => {
                pipe.filled += count;
                Received::Bytes(count)
            }
            Err(Errno::AGAIN | Errno::INTR) => {
                self.is_readable = false;
                Received::Nothing
            }
            Err(_) => Received::Failed,
        }
    }

    /// Moves a pipe's bytes to the socket, as much as the kernel takes.
    pub(crate) fn splice_from(&mut self, pipe: &mut Pipe) -> Result<usize, Broken> {
        let before = pipe.filled;
        while self.is_writable && pipe.filled > 0 {
            match splice(&pipe.read, None, &self.fd, None, pipe.filled, FLAGS) {
                Ok(0) => return Err(Broken),
                Ok(count) => pipe.filled -= count,
                Err(Errno::AGAIN) => self.is_writable = false,
                Err(Errno::INTR) => {}
                Err(_) => return Err(Broken),
            }
        }
        Ok(before - pipe.filled)
    }

    /// Ends this direction.
    pub(crate) fn shut_down(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
    }

    /// Makes the connection end with a reset, so that the peer does not take a part for the whole.
    pub(crate) fn reset_on_close(&self) {
        let _ = rustix::net::sockopt::set_socket_linger(&self.fd, Some(std::time::Duration::ZERO));
    }

    /// Returns true if nothing has arrived, not even the end.
    pub(crate) fn is_quiet(&self) -> bool {
        let mut byte = [0];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        rustix::net::recv(&self.fd, &mut byte, flags) == Err(Errno::AGAIN)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

const FLAGS: SpliceFlags = SpliceFlags::NONBLOCK.union(SpliceFlags::MOVE);
/// Bytes of a pipe.
const PIPE: usize = 1 << 20;

/// A pipe that carries a body from one socket to the other, inside the kernel.
#[derive(Debug)]
pub(crate) struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    pub(crate) filled: usize,
}

impl Pipe {
    /// Makes a pipe, or returns `None` if there are too many descriptors.
    pub(crate) fn new() -> Option<Pipe> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
        // Without the right to a large one, the usual size has to do.
        let _ = fcntl_setpipe_size(&write, PIPE);
        Some(Pipe { read, write, filled: 0 })
    }
}

/// The most shared bytes that are copied, to be sent in one call.
const COPIED: usize = 16 * 1024;

/// Bytes that the kernel has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Output {
    bytes: Vec<u8>,
    at: usize,
    /// Bytes behind these that others use too, and the positions of those that are left.
    shared: Option<(Arc<StoredBody>, Range<usize>)>,
    /// What counts the bytes, where there may be many.
    held: Option<Held>,
}

impl Output {
    pub(crate) fn is_empty(&self) -> bool {
        self.at == self.bytes.len() && self.shared.is_none()
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        if let Some(held) = &mut self.held {
            held.set(self.bytes.len());
        }
    }

    /// Counts the bytes that wait, and those that are added, until there are none.
    pub(crate) fn hold(&mut self, held: Held) {
        let bytes = self.bytes.len();
        self.held.get_or_insert(held).set(bytes);
    }

    pub(crate) fn clear(&mut self) {
        *self = Output::default();
    }

    /// Sends what there is, and returns true if that was anything.
    pub(crate) fn flush(&mut self, socket: &mut Socket) -> Result<bool, Broken> {
        if self.is_empty() {
            return Ok(false);
        }
        let mut sent = socket.send(&self.bytes[self.at..])?;
        self.at += sent;
        if self.at == self.bytes.len()
            && let Some((bytes, left)) = &mut self.shared
        {
            let more = socket.send(&bytes[left.clone()])?;
            (sent, left.start) = (sent + more, left.start + more);
            if left.start >= left.end {
                self.shared = None;
            }
        }
        if self.is_empty() {
            self.clear();
        }
        Ok(sent > 0)
    }

    /// Sends bytes, and then a part of shared ones.
    pub(crate) fn send_shared(
        &mut self,
        socket: &mut Socket,
        bytes: &mut Vec<u8>,
        shared: &Arc<StoredBody>,
        part: Range<usize>,
    ) -> Result<(), Broken> {
        if !self.is_empty() || part.len() <= COPIED {
            bytes.extend_from_slice(&shared[part]);
            return self.send(socket, bytes);
        }
        self.push(bytes);
        self.shared = Some((shared.clone(), part));
        self.flush(socket).map(drop)
    }

    /// Sends bytes after those that wait, and keeps what the kernel does not take.
    pub(crate) fn send(&mut self, socket: &mut Socket, bytes: &[u8]) -> Result<(), Broken> {
        let sent = if self.is_empty() { socket.send(bytes)? } else { 0 };
        self.push(&bytes[sent..]);
        Ok(())
    }
}
