//! The host connections that a router has promised and this supervisor holds, by the cookie of the
//! overlay connection. They outlive the router: the next one continues.
//!
//! ```text
//! router:      Hold ──► Promise to the client's router ──► Take, or another answer
//! supervisor:  holds a duplicate ────────────────────────► closes it
//!                 └─ the router has ended ──► orphaned ──► shown to the next router
//! ```
//!
//! A new router can be that of an update, for which the supervisor lets its keeper kill it. So it
//! leaves the orphaned connections to its successor before, as messages in a socket of the record.
//!
//! An orphaned connection is decided without a router when it cannot be committed any more, or when
//! none comes in [`ORPHANED`]. After that time it is closed in any case: a successor may have one that
//! its predecessor has delivered meanwhile, and the program's close is to end that one.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair, sockopt};
use shunt_sys::{Errno, tcp};

use crate::message::{self, Answer, Held};

/// The time that an orphaned connection waits for another router. No call waits for that.
pub(super) const ORPHANED: Duration = Duration::from_secs(10);
/// The largest number of connections that are held. Of others the router makes no promise that
/// outlives it.
const MOST: usize = 4096;
/// The buffer for the messages to a successor. The kernel may give less.
const BUFFER: usize = 4 << 20;

/// A promised host connection.
#[derive(Debug)]
pub(super) struct HeldConnection {
    pub(super) held: Held,
    socket: OwnedFd,
    /// When the router that has promised it was seen to have ended.
    orphaned: OnceLock<Instant>,
}

/// All promised host connections.
#[derive(Debug, Default)]
pub(super) struct HeldConnections(HashMap<u64, Arc<HeldConnection>>);

impl HeldConnections {
    /// Handles a message of the router that is no answer. Returns `false` for another one.
    pub(super) fn handle(&mut self, message: Answer, socket: Option<OwnedFd>) -> bool {
        match (message, socket) {
            (Answer::Hold { cookie, held }, Some(socket)) => {
                if self.0.len() >= MOST {
                    self.0.retain(|_, it| !it.is_over());
                }
                if self.0.len() < MOST {
                    self.0
                        .insert(cookie, Arc::new(HeldConnection { held, socket, orphaned: OnceLock::new() }));
                }
                true
            }
            (Answer::Release { cookie }, None) => {
                self.0.remove(&cookie);
                true
            }
            _ => false,
        }
    }

    pub(super) fn has(&self, cookie: u64) -> bool {
        self.0.contains_key(&cookie)
    }

    /// Notes that the router of all has ended.
    pub(super) fn orphan(&mut self) {
        for it in self.0.values() {
            it.orphaned.get_or_init(Instant::now);
        }
    }

    /// Closes orphaned connections for which no router has come in time.
    pub(super) fn forget_old(&mut self) {
        self.0.retain(|_, it| it.orphaned.get().is_none_or(|since| since.elapsed() < ORPHANED));
    }

    /// Returns a connection whose router has ended.
    pub(super) fn orphaned(&self, cookie: u64) -> Option<Arc<HeldConnection>> {
        self.0.get(&cookie).filter(|it| it.orphaned.get().is_some()).cloned()
    }

    pub(super) fn get(&self, cookie: u64) -> Option<Arc<HeldConnection>> {
        self.0.get(&cookie).cloned()
    }

    /// Closes a connection, unless the caller still has it.
    pub(super) fn remove(&mut self, cookie: u64) {
        self.0.remove(&cookie);
    }

    /// Leaves all connections in a socket, from which a successor receives them. `None` if there are
    /// none.
    pub(super) fn leave(&self) -> Option<OwnedFd> {
        if self.0.is_empty() {
            return None;
        }
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let (near, far) = socketpair(AddressFamily::UNIX, kind, flags, None).ok()?;
        let _ = sockopt::set_socket_send_buffer_size(&near, BUFFER);
        for (cookie, it) in &self.0 {
            let message = Answer::Hold { cookie: *cookie, held: it.held };
            let _ = message::send(&near, &message, Some(it.as_fd()));
        }
        Some(far)
    }
}

impl HeldConnection {
    /// Returns `true` if the connection has ended before anything arrived, so that no Commit will.
    pub(super) fn is_over(&self) -> bool {
        match recv(&self.socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((count, _)) => count == 0,
            Err(error) => error != Errno::AGAIN && error != Errno::INTR,
        }
    }

    /// Resets the connection: the program gets the overlay connection.
    pub(super) fn abort(&self) {
        let _ = tcp::abort(&self.socket);
    }
}

impl AsFd for HeldConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    const HOST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7450);

    fn hold(cookie: u64) -> Answer {
        Answer::Hold {
            cookie,
            held: Held { key: [7; 32], version: 7, origin: (1, 2), host: (HOST, HOST), source: None },
        }
    }

    #[test]
    fn a_connection_is_held_until_it_is_released_or_taken() {
        let mut all = HeldConnections::default();
        let ((mut near, far), (_other, other_far)) = (pair(), pair());
        assert!(all.handle(hold(1), Some(far.into())) && all.handle(hold(2), Some(other_far.into())));
        assert!(all.has(1) && all.has(2) && !all.has(3));
        assert!(all.orphaned(1).is_none(), "its router runs");
        assert!(all.handle(Answer::Release { cookie: 2 }, None));
        assert!(!all.has(2));
        all.orphan();
        let left = all.leave().unwrap();
        let mut all = HeldConnections::default();
        let (message, socket) = message::receive::<Answer>(&left).unwrap();
        assert!(all.handle(message, socket) && message::receive::<Answer>(&left).is_err());
        all.orphan();
        let taken = all.orphaned(1).unwrap();
        assert!(!taken.is_over());
        near.write_all(b"commit").unwrap();
        drop(near.shutdown(std::net::Shutdown::Write));
        while !tcp::received(&*taken).is_ok_and(|count| count >= 6) {}
        assert!(!taken.is_over(), "what has arrived may be the Commit");
        taken.abort();
        assert!(near.read(&mut [0; 1]).is_err(), "it was reset");
        for other in [Answer::Stay, hold(1), Answer::Take] {
            assert!(!all.handle(other, None));
        }
    }

    #[test]
    fn a_connection_that_ends_without_a_byte_is_over() {
        let mut all = HeldConnections::default();
        let (near, far) = pair();
        assert!(all.handle(hold(1), Some(far.into())));
        drop(near);
        let held = all.get(1).unwrap();
        all.remove(1);
        assert!(!all.has(1));
        while !held.is_over() {}
    }
}
