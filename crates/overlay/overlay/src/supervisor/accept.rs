//! accept and accept4.
//!
//! The supervisor accepts the connection itself and asks the router about it. It then gives the
//! program the host connection (Take), the overlay connection (Stay), or resets it and waits for
//! another (Deny).
//!
//! ```text
//! accepted ──► asked ──► answered ──────────────► delivered, or reset
//!                │                                    ▲
//!                ├► late ──► not promised ────────────┤
//!                │    └────► promised: parked ──► undelivered
//!                └► the router has ended ──► held: parked, and shown to the next router
//! ```
//!
//! If the router is late, only a promised connection has to await it: its client may have the host
//! connection already. It is *parked*, and the call accepts other connections meanwhile. When it is
//! decided, the next call gets it, and a program that waits for the listening socket is woken
//! (`undelivered`).

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::fstat;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SocketFlags, accept_with, recv};
use shunt_sys::Errno;

use super::address::{Address, Peer};
use super::deadline::{Deadline, Wait};
use super::held::{HeldConnection, ORPHANED};
use super::link::{Conversation, Received};
use super::process::{self, Signal};
use super::record::Entry;
use super::replace::liken;
use super::undelivered::Place;
use super::{Call, NEVER, STACK, Supervisor, is_nonblocking, is_ready, is_ready_now};
use crate::message::{Answer, Request};

/// The time in which another thread that a signal has woken takes it, unless it gets no processor.
const TAKEN: Duration = Duration::from_millis(2);
/// The interval at which an orphaned connection is shown to a router that may have come.
const AGAIN: Duration = Duration::from_millis(20);

/// An accepted connection.
#[derive(Debug)]
pub(super) struct Accepted {
    /// Removed before the socket is closed, whose fd another thread may get then.
    pub(super) entry: Entry,
    pub(super) socket: OwnedFd,
    pub(super) peer: Peer,
}

/// A promised connection that awaits the router's answer.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) accepted: Accepted,
    pub(super) place: Place,
    /// `None` if the router could not be asked yet.
    pub(super) conversation: Option<Conversation>,
    /// The host connection, if the router that had promised it has ended.
    pub(super) orphan: Option<Arc<HeldConnection>>,
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
        if let Some(stray) = self.undelivered.take(cookie) {
            return self.deliver(&call, stray, flags, cookie);
        }
        let accepting = Accepting { listener, cookie, flags };
        let listener = &accepting.listener;
        if is_nonblocking(listener) || is_ready_now(listener, PollFlags::IN) {
            match self.attempt(listener, cookie, flags) {
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
            if let Some(decided) = self.undelivered.take(accepting.cookie) {
                return self.deliver(call, decided, *flags, accepting.cookie);
            }
            if is_nonblocking(listener) || is_ready(listener, PollFlags::IN) {
                match self.attempt(listener, accepting.cookie, *flags) {
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
    /// Returns `false` if the call is to wait for another connection: the policy denies this one,
    /// or it is parked.
    fn claim(self: &Arc<Supervisor>, call: &Call, accepting: &Accepting, accepted: Accepted) -> bool {
        let remote = accepted.peer.address;
        let names = (Address::of_socket(&accepted.socket), sockopt::socket_cookie(&accepted.socket));
        let (true, (Some(local), Ok(cookie))) = (self.link.covers(remote.ip()), names) else {
            self.deliver(call, accepted, accepting.flags, accepting.cookie);
            return true;
        };
        // In this order: a router that comes after the check has another number, and does not answer.
        let router = self.link.router();
        if let Some(orphan) = self.link.orphaned(cookie) {
            self.park(accepting, local, accepted, (None, Some(orphan)));
            return false;
        }
        let may_be_promised = || self.link.may_be_promised(cookie);
        if !self.link.answers() && !may_be_promised() {
            self.deliver(call, accepted, accepting.flags, accepting.cookie);
            return true;
        }
        let Some(conversation) = self.ask_about(&accepted, local, router, None, Wait::Accept) else {
            let orphan = self.link.held_for(cookie);
            if orphan.is_some() || may_be_promised() {
                self.park(accepting, local, accepted, (None, orphan));
                return false;
            }
            self.deliver(call, accepted, accepting.flags, accepting.cookie);
            return true;
        };
        accepted.entry.set_asked();
        let mut received = conversation.receive(|| true);
        if matches!(received, Received::Late) {
            self.link.suspect();
            // In this order: the router makes no promise from now on, or its mark is seen.
            conversation.withdraw();
            if may_be_promised() {
                self.park(accepting, local, accepted, (Some(conversation), None));
                return false;
            }
            // The router removes a mark only after its answer.
            received = conversation.receive(|| true);
        }
        if matches!(received, Received::Nothing)
            && let Some(held) = self.link.held_for(cookie)
        {
            self.park(accepting, local, accepted, (None, Some(held)));
            return false;
        }
        // The program is to be the only holder.
        self.link.close_held(cookie);
        match decide(accepted, conversation, received) {
            Some(accepted) => {
                self.deliver(call, accepted, accepting.flags, accepting.cookie);
                true
            }
            None => false,
        }
    }

    /// Lets another thread await the router's answer about a promised connection. If there is no
    /// thread, the call has to wait.
    fn park(
        self: &Arc<Supervisor>,
        accepting: &Accepting,
        local: SocketAddr,
        accepted: Accepted,
        (conversation, orphan): (Option<Conversation>, Option<Arc<HeldConnection>>),
    ) {
        let place = Place::new(&accepting.listener, accepting.cookie, local);
        self.await_answer(Parked { accepted, place, conversation, orphan });
    }

    /// Lets another thread await the answer about a parked connection.
    pub(super) fn await_answer(self: &Arc<Supervisor>, parked: Parked) {
        self.undelivered.park(parked);
        let supervisor = self.clone();
        let thread = std::thread::Builder::new().stack_size(STACK);
        if thread.spawn(move || supervisor.await_router()).is_err() {
            self.await_router();
        }
    }

    /// Awaits the answer about one parked connection.
    fn await_router(&self) {
        let Some(Parked { accepted, place, conversation, orphan }) = self.undelivered.next_parked() else {
            return;
        };
        let cookie = sockopt::socket_cookie(&accepted.socket).unwrap_or(0);
        // In this order, as in `claim`.
        let router = self.link.router();
        let decided = match orphan.or_else(|| self.link.orphaned(cookie)) {
            Some(orphan) => {
                let decided = self.await_next_router(accepted, cookie, &orphan);
                // The program is to be the only holder.
                drop(orphan);
                decided
            }
            None => self.await_this_router(accepted, cookie, router, conversation),
        };
        self.undelivered.decide(place, decided);
    }

    /// Asks the router with that number about an accepted connection. `orphan` is the host connection
    /// that a former router had promised.
    fn ask_about(
        &self,
        accepted: &Accepted,
        local: SocketAddr,
        router: u64,
        orphan: Option<&HeldConnection>,
        wait: Wait,
    ) -> Option<Conversation> {
        let (remote, held) = (accepted.peer.address, orphan.map(|orphan| orphan.held));
        let request = Request::Accepted { local, remote, router, held };
        let entry = Some(&accepted.entry);
        let socket = accepted.socket.as_fd();
        match orphan {
            Some(orphan) => self.link.begin(&request, &[socket, orphan.as_fd()], wait, entry),
            None => self.link.begin(&request, &[socket], wait, entry),
        }
    }

    /// Awaits the answer of the router that has promised the connection.
    fn await_this_router(
        &self,
        accepted: Accepted,
        cookie: u64,
        router: u64,
        conversation: Option<Conversation>,
    ) -> Option<Accepted> {
        let deadline = Deadline::after(self.link.limit(Wait::Promised));
        let conversation = conversation.or_else(|| {
            let local = Address::of_socket(&accepted.socket)?;
            let conversation = self.ask_about(&accepted, local, router, None, Wait::Promised)?;
            accepted.entry.set_asked();
            Some(conversation)
        });
        let received = conversation.map(|mut conversation| {
            let received = conversation.receive_promised(deadline, || !has_bytes(&accepted.socket));
            (conversation, received)
        });
        let held = self.link.held_for(cookie);
        match (received, held) {
            (Some((conversation, Received::Late)), held) => {
                self.link.hang_up();
                held.iter().for_each(|held| held.abort());
                self.link.close_held(cookie);
                decide(accepted, conversation, Received::Late)
            }
            (None | Some((_, Received::Nothing)), Some(held)) => {
                self.await_next_router(accepted, cookie, &held)
            }
            (Some((conversation, received)), held) => {
                drop(held);
                self.link.close_held(cookie);
                decide(accepted, conversation, received)
            }
            (None, None) => Some(accepted),
        }
    }

    /// Shows a connection to the router that comes next, because the one that has promised it has
    /// ended.
    fn await_next_router(
        &self,
        accepted: Accepted,
        cookie: u64,
        orphan: &HeldConnection,
    ) -> Option<Accepted> {
        let local = Address::of_socket(&accepted.socket);
        let deadline = Deadline::after(ORPHANED);
        while let Some(local) = local
            && !deadline.has_passed()
            && !orphan.is_over()
            && !has_bytes(&accepted.socket)
        {
            let router = self.link.router();
            let asked = self.ask_about(&accepted, local, router, Some(orphan), Wait::Promised);
            if let Some(mut conversation) = asked {
                let limit = Deadline::after(self.link.limit(Wait::Promised));
                let received = conversation.receive_promised(limit, || true);
                if !matches!(received, Received::Nothing) {
                    if !matches!(received, Received::Answer(Answer::Take, Some(_))) {
                        orphan.abort();
                    }
                    self.link.close_held(cookie);
                    return decide(accepted, conversation, received);
                }
            }
            self.link.suspect();
            std::thread::sleep(AGAIN);
        }
        orphan.abort();
        self.link.close_held(cookie);
        Some(accepted)
    }

    fn deliver(&self, call: &Call, accepted: Accepted, flags: Flags, cookie: u64) {
        if let Err(error) = accepted.peer.report(call) {
            if call.waits() {
                // The kernel closes the connection in this case too.
                return call.answer(Err(error));
            }
            return self.undelivered.keep(cookie, accepted);
        }
        let id = call.notification.id;
        if let Ok(found) = fstat(&accepted.socket) {
            call.record(|slot| slot.gives(found.st_ino));
        }
        match call.listener.give(id, accepted.socket.as_fd(), flags.close_on_exec) {
            Ok(number) => {
                drop(accepted);
                call.answer(Ok(number));
            }
            Err(error) => {
                // The process has no free descriptor, or was killed.
                self.undelivered.keep(cookie, accepted);
                call.answer(Err(error));
            }
        }
    }

    /// Accepts a connection. Only one thread at a time polls and accepts, so that accept never
    /// blocks. Returns `None` if another process was faster, or the connection was made to wake the
    /// program.
    fn attempt(&self, listener: &OwnedFd, cookie: u64, flags: Flags) -> Result<Option<Accepted>, Errno> {
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().expect(NEVER);
        if !is_nonblocking(listener) && !is_ready_now(listener, PollFlags::IN) {
            return Ok(None);
        }
        let mut wanted = SocketFlags::CLOEXEC;
        wanted.set(SocketFlags::NONBLOCK, flags.nonblocking);
        self.record.set_accepting(cookie);
        let accepted = accept_with(listener, wanted).map(|socket| {
            let entry = self.record.accepted(&socket, cookie);
            (entry, socket)
        });
        self.record.set_accepting(0);
        let (entry, socket) = accepted?;
        // The connection was reset meanwhile. The program could not have read its address either.
        let peer = Peer::of(&socket).ok_or(Errno::CONNABORTED)?;
        if self.undelivered.has_woken(peer.address) {
            return Ok(None);
        }
        Ok(Some(Accepted { entry, socket, peer }))
    }
}

/// Returns the connection that the program gets after an answer. Returns `None` if the policy
/// denies it. Without an answer the connection stays on the overlay.
pub(super) fn decide(
    mut accepted: Accepted,
    conversation: Conversation,
    received: Received,
) -> Option<Accepted> {
    match received {
        Received::Answer(Answer::Take, Some(connection)) => {
            // The client has the host connection already, so an error here is ignored.
            let _ = liken(&accepted.socket, &connection);
            let overlay = std::mem::replace(&mut accepted.socket, connection);
            accepted.entry.set(&accepted.socket);
            drop(conversation);
            // The close must not wait for the old peer to acknowledge, because the program waits.
            let _ = sockopt::set_socket_linger(&overlay, None);
        }
        Received::Answer(Answer::Deny(_), _) => {
            drop(accepted.entry);
            drop(conversation);
            // Make the close a reset.
            let _ = sockopt::set_socket_linger(&accepted.socket, Some(Duration::ZERO));
            return None;
        }
        _ => accepted.entry.set(&accepted.socket),
    }
    Some(accepted)
}

/// Returns `true` if bytes have arrived. Then the client uses the overlay, whatever was promised.
fn has_bytes(socket: &OwnedFd) -> bool {
    recv(socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok_and(|(len, _)| len > 0)
}
