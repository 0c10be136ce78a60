//! accept and accept4.
//!
//! The supervisor accepts the connection itself and asks the router about it. It then gives the
//! program the host connection (Take), the overlay connection (Stay), or resets it and waits for
//! another (Deny).

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{SocketFlags, accept_with};
use shunt_sys::Errno;

use super::address::{Address, Peer};
use super::link::Received;
use super::process::{self, Signal};
use super::replace::liken;
use super::{Call, NEVER, Supervisor, is_nonblocking, is_ready, is_ready_now};
use crate::message::{Answer, Request};

/// The time for which an undelivered connection is kept.
const FORGOTTEN: Duration = Duration::from_secs(60);
/// The time in which another thread that a signal has woken takes it, unless it gets no processor.
const TAKEN: Duration = Duration::from_millis(2);
/// The largest number of undelivered connections that are kept.
const STRAYS: usize = 256;

/// Connections that were accepted and could not be delivered, because their call had ended, by the
/// cookies of their listening sockets. The next call gets them.
#[derive(Debug, Default)]
pub(super) struct Strays(Mutex<HashMap<u64, Vec<(Accepted, Instant)>>>);

/// An accepted connection.
#[derive(Debug)]
struct Accepted {
    socket: OwnedFd,
    peer: Peer,
}

impl Strays {
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().expect(NEVER).is_empty()
    }

    pub(super) fn forget_old(&self) {
        self.0.lock().expect(NEVER).retain(|_, strays| {
            strays.retain(|(_, since)| since.elapsed() < FORGOTTEN);
            !strays.is_empty()
        });
    }

    fn keep(&self, listener: u64, accepted: Accepted) {
        let mut strays = self.0.lock().expect(NEVER);
        if strays.values().map(Vec::len).sum::<usize>() < STRAYS {
            strays.entry(listener).or_default().push((accepted, Instant::now()));
        }
    }

    fn take(&self, listener: u64) -> Option<Accepted> {
        let mut strays = self.0.lock().expect(NEVER);
        let of_listener = strays.get_mut(&listener)?;
        let accepted = (!of_listener.is_empty()).then(|| of_listener.remove(0).0);
        if of_listener.is_empty() {
            strays.remove(&listener);
        }
        accepted
    }
}

/// The flags of accept4, its fourth argument.
#[derive(Clone, Copy, Debug)]
struct Flags {
    nonblocking: bool,
    close_on_exec: bool,
}

impl Flags {
    /// Reads the flags. Returns `None` for invalid ones, for which the kernel has the right error.
    fn of(call: &Call) -> Option<Flags> {
        let given = match call.notification.number {
            libc::SYS_accept4 => call.notification.arguments[3] as i32,
            _ => 0,
        };
        let known = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        (given & !known == 0).then_some(Flags {
            nonblocking: given & libc::SOCK_NONBLOCK != 0,
            close_on_exec: given & libc::SOCK_CLOEXEC != 0,
        })
    }
}

/// A call of accept on a socket that may accept connections of the overlay.
#[derive(Debug)]
struct Accepting {
    listener: OwnedFd,
    /// The cookie of the listening socket.
    cookie: u64,
    flags: Flags,
}

impl Supervisor {
    /// Handles accept on a socket that may accept connections of the overlay.
    pub(super) fn accept(self: &Arc<Supervisor>, call: Call, listener: OwnedFd, cookie: u64) {
        let Some(flags) = Flags::of(&call) else { return call.proceed() };
        if let Some(stray) = self.strays.take(cookie) {
            return self.deliver(&call, stray, flags, cookie);
        }
        let accepting = Accepting { listener, cookie, flags };
        let listener = &accepting.listener;
        if is_nonblocking(listener) || is_ready_now(listener, PollFlags::IN) {
            match attempt(listener, flags) {
                Ok(None) => self.wait_apart(&call, &accepting),
                Ok(Some(accepted)) => self.settle(&call, &accepting, accepted),
                Err(error) => call.answer(Err(error)),
            }
        } else {
            self.wait_apart(&call, &accepting);
        }
    }

    /// Waits for a connection, after another thread took over the listener. If there is none, the
    /// kernel makes the call, and a connection is accepted unseen.
    fn wait_apart(self: &Arc<Supervisor>, call: &Call, accepting: &Accepting) {
        if self.hand_over(&call.listener) {
            self.wait(call, accepting);
        } else {
            self.go_blind();
            call.proceed();
        }
    }

    /// Waits for a connection in a blocking call. In a non-blocking one, tries until no connection
    /// is left.
    fn wait(self: &Arc<Supervisor>, call: &Call, accepting: &Accepting) {
        let Accepting { listener, flags, .. } = accepting;
        let begun = Instant::now();
        let limit = sockopt::socket_timeout(listener, Timeout::Recv).ok().flatten();
        loop {
            if is_nonblocking(listener) || is_ready(listener, PollFlags::IN) {
                match attempt(listener, *flags) {
                    Ok(Some(accepted)) => {
                        if self.claim(call, accepting, accepted) {
                            return;
                        }
                    }
                    Ok(None) => {}
                    Err(error) => return call.answer(Err(error)),
                }
            }
            if !call.waits() {
                return;
            }
            if limit.is_some_and(|limit| begun.elapsed() >= limit) {
                return call.answer(Err(Errno::AGAIN));
            }
            match self.interrupted(call) {
                Signal::None => {}
                Signal::Surely => return call.interrupt(limit.is_none()),
                // The kernel decides. It may accept a connection instead, which is unseen then.
                Signal::Perhaps => return call.proceed(),
            }
        }
    }

    /// Checks for a signal of the caller. If another thread may take the signal, gives it a moment
    /// to.
    fn interrupted(&self, call: &Call) -> Signal {
        match process::signal(call.thread()) {
            Signal::Perhaps => {
                std::thread::sleep(TAKEN);
                process::signal(call.thread())
            }
            found => found,
        }
    }

    /// Delivers an accepted connection. Asks the router first if it is one of the overlay, after
    /// another thread took over the listener.
    fn settle(self: &Arc<Supervisor>, call: &Call, accepting: &Accepting, accepted: Accepted) {
        let is_ours = self.link.covers(accepted.peer.address.ip());
        if !is_ours {
            return self.deliver(call, accepted, accepting.flags, accepting.cookie);
        }
        // Even if there is no other thread, ask: the connection may have been promised.
        self.hand_over(&call.listener);
        if !self.claim(call, accepting, accepted) {
            self.wait_apart(call, accepting);
        }
    }

    /// Asks the router if a host connection replaces the accepted one, and delivers the result.
    /// Returns `false` if the policy denies the connection, so that the call waits for another one.
    fn claim(&self, call: &Call, accepting: &Accepting, mut accepted: Accepted) -> bool {
        let remote = accepted.peer.address;
        if self.link.covers(remote.ip())
            && let Some(local) = Address::of_socket(&accepted.socket)
            && let Some(conversation) =
                self.link.begin(&Request::Accepted { local, remote }, &accepted.socket)
        {
            match conversation.receive(|| true) {
                Received::Answer(Answer::Take, Some(connection)) => {
                    // The client has the host connection already, so an error here is ignored.
                    let _ = liken(&accepted.socket, &connection);
                    let overlay = std::mem::replace(&mut accepted.socket, connection);
                    drop(conversation);
                    // The close must not wait for the old peer to acknowledge, because the program
                    // waits.
                    let _ = sockopt::set_socket_linger(&overlay, None);
                }
                Received::Answer(Answer::Deny(_), _) => {
                    drop(conversation);
                    // Make the close a reset.
                    let _ = sockopt::set_socket_linger(&accepted.socket, Some(Duration::ZERO));
                    return false;
                }
                Received::Late => self.link.hang_up(),
                _ => {}
            }
        }
        self.deliver(call, accepted, accepting.flags, accepting.cookie);
        true
    }

    fn deliver(&self, call: &Call, accepted: Accepted, flags: Flags, cookie: u64) {
        if let Err(error) = accepted.peer.report(call) {
            if call.waits() {
                // The kernel closes the connection in this case too.
                return call.answer(Err(error));
            }
            return self.strays.keep(cookie, accepted);
        }
        let id = call.notification.id;
        match call.listener.give(id, accepted.socket.as_fd(), flags.close_on_exec) {
            Ok(number) => {
                drop(accepted);
                call.answer(Ok(number));
            }
            Err(error) => {
                // The process has no free descriptor, or was killed.
                self.strays.keep(cookie, accepted);
                call.answer(Err(error));
            }
        }
    }
}

/// Accepts a connection. Only one thread at a time polls and accepts, so that accept never blocks.
/// Returns `None` if another process was faster.
fn attempt(listener: &OwnedFd, flags: Flags) -> Result<Option<Accepted>, Errno> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().expect(NEVER);
    if !is_nonblocking(listener) && !is_ready_now(listener, PollFlags::IN) {
        return Ok(None);
    }
    let mut wanted = SocketFlags::CLOEXEC;
    wanted.set(SocketFlags::NONBLOCK, flags.nonblocking);
    let socket = accept_with(listener, wanted)?;
    // The connection was reset meanwhile. The program could not have read its address either.
    let peer = Peer::of(&socket).ok_or(Errno::CONNABORTED)?;
    Ok(Some(Accepted { socket, peer }))
}
