//! connect, and the program's first look at what has become of it.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use shunt_sys::tcp::Opener;
use shunt_sys::{Errno, options, tcp};

use super::address::Address;
use super::link::{Conversation, GRACE, Heard};
use super::replace::Place;
use super::rings::Rings;
use super::{Call, NEVER, Supervisor, is_nonblocking, is_ready, is_ready_now, process};
use crate::message::{Answer, Request};
use crate::policy::Denial;
use crate::reason::Reason;

/// A program that has not looked for so long has forgotten its socket, or never looks. Until then the socket lives on if the program
/// closes it.
const FORGOTTEN: Duration = Duration::from_secs(3);
/// The other router keeps a promise for a second at least, and has made none before the call began: what is said so soon gets there
/// before it is taken back.
const FRESH: Duration = Duration::from_millis(500);
/// A host that has acknowledged nothing for so long is not there, or its router has been stopped while it took its promise back.
const SILENT: Duration = Duration::from_secs(3);
/// So many connections may be under way that do not block.
const PENDING: usize = 4096;

/// Connections under way whose programs do not wait, by the cookies of their sockets.
#[derive(Debug, Default)]
pub(super) struct Pending {
    attempts: Mutex<HashMap<u64, Attempt>>,
    count: AtomicUsize,
}

/// It ends with its conversation, and what is behind that is closed afterwards.
#[derive(Debug)]
struct Attempt {
    conversation: Conversation,
    /// The program's.
    socket: OwnedFd,
    /// The host connection, once there is one.
    given: Option<OwnedFd>,
    begun: Instant,
    rings: Arc<Rings>,
}

/// What the router says of a connection that is to be made.
enum Asked {
    Go(Conversation),
    Stay,
    Denied(Denial),
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    pub(super) fn forget_old(&self) {
        let is_old = |_: &u64, attempt: &mut Attempt| attempt.begun.elapsed() >= FORGOTTEN;
        let old: Vec<_> = self.change(|attempts| attempts.extract_if(is_old).collect());
        let begun = Instant::now();
        for (_, attempt) in old {
            // Each waits for the router to be done with it, but not all of them for one that hangs.
            if begun.elapsed() >= GRACE {
                attempt.conversation.give_up();
            }
        }
    }

    fn add(&self, cookie: u64, attempt: Attempt) {
        self.change(|attempts| {
            if attempts.len() < PENDING {
                attempts.insert(cookie, attempt);
            }
        });
    }

    /// The attempt of that socket, if it has come to an end.
    fn take_ended(&self, cookie: u64) -> Option<Attempt> {
        self.change(|attempts| {
            let attempt = attempts.get(&cookie)?;
            if !is_ready_now(&attempt.socket, PollFlags::OUT) {
                return None;
            }
            attempts.remove(&cookie)
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut HashMap<u64, Attempt>) -> T) -> T {
        let mut attempts = self.attempts.lock().expect(NEVER);
        let result = change(&mut attempts);
        self.count.store(attempts.len(), Relaxed);
        result
    }
}

impl Supervisor {
    /// connect to an address of the overlay.
    pub(super) fn connect(self: &Arc<Supervisor>, call: &Call, address: Address) {
        let Some(socket) = call.socket() else { return call.proceed() };
        if !is_plain(&socket) {
            // It may be the second call, by which a program learns what has become of the first.
            return self.look_at(call, socket);
        }
        let conversation = match self.ask(call, &socket, address) {
            Asked::Go(conversation) => conversation,
            Asked::Stay => {
                drop(socket);
                return call.proceed();
            }
            // At once, also for a program that does not wait: it would be told nothing else later.
            Asked::Denied(denial) => {
                drop(socket);
                return call.answer(Err(denial.error()));
            }
        };
        if !call.waits() {
            return;
        }
        let (begun, rings) = (Instant::now(), self.rings.clone());
        let attempt = Attempt { conversation, socket, given: None, begun, rings };
        if is_nonblocking(&attempt.socket) {
            self.begin(call, attempt, address);
        } else {
            see_through(call, attempt, address);
        }
    }

    /// getsockopt for SO_ERROR.
    pub(super) fn look(&self, call: &Call) {
        match call.socket() {
            Some(socket) => self.look_at(call, socket),
            None => call.proceed(),
        }
    }

    fn look_at(&self, call: &Call, socket: OwnedFd) {
        let cookie = sockopt::socket_cookie(&socket).ok();
        drop(socket);
        match cookie.and_then(|cookie| self.pending.take_ended(cookie)) {
            Some(attempt) => seize(call, attempt),
            None => call.proceed(),
        }
    }

    /// Whether the peer would take it.
    fn ask(&self, call: &Call, socket: &OwnedFd, address: Address) -> Asked {
        let from = Address::of_socket(socket).map(|own| own.ip()).filter(|own| !own.is_unspecified());
        let Some(conversation) = self.link.begin(&Request::Connect { to: address.to, from }, socket) else {
            return Asked::Stay;
        };
        match conversation.hear(|| call.waits()) {
            Heard::Answer(Answer::Go, _) => return Asked::Go(conversation),
            Heard::Answer(Answer::Deny(denial), _) => return Asked::Denied(denial),
            Heard::Late => self.link.let_rest(),
            _ => {}
        }
        Asked::Stay
    }

    /// For a program that does not wait. It may send as soon as it sees that it can, without having looked: so if that does not take long
    /// it is told that the connection is under way when the host connection is in its place.
    fn begin(&self, call: &Call, mut attempt: Attempt, address: Address) {
        let Ok(cookie) = sockopt::socket_cookie(&attempt.socket) else { return attempt.leave(call, None) };
        match address.connect(&attempt.socket) {
            Ok(()) | Err(Errno::INPROGRESS) if is_soon_there(call, &attempt, self.link.hold()) => {
                let error = settle(call, &mut attempt).err().unwrap_or(Errno::INPROGRESS);
                attempt.leave(call, Some(error));
            }
            Ok(()) | Err(Errno::INPROGRESS) => {
                // Before the program can look.
                if let Some(own) = Address::of_socket(&attempt.socket)
                    && attempt.conversation.say(&Request::Begun { local: own, waits: false }, None)
                {
                    self.pending.add(cookie, attempt);
                }
                call.answer(Err(Errno::INPROGRESS));
            }
            Err(error) => attempt.leave(call, Some(error)),
        }
    }
}

impl Attempt {
    /// The program goes on, and has its socket for itself. None: the kernel makes the call.
    fn leave(self, call: &Call, error: Option<Errno>) {
        drop(self);
        match error {
            None => call.proceed(),
            Some(error) => call.answer(Err(error)),
        }
    }
}

/// A TCP socket that connect would connect.
fn is_plain(socket: &OwnedFd) -> bool {
    let is_plain = || {
        let flags = fcntl_getfl(socket)?;
        let is_fresh = tcp::state(socket)? == tcp::CLOSE;
        let by_events = flags.intersects(OFlags::from_bits_retain(libc::O_ASYNC as u32));
        Ok::<_, Errno>(is_fresh && !by_events && !options::connects_with_data(socket)?)
    };
    is_plain().unwrap_or(false)
}

/// For a program that waits.
fn see_through(call: &Call, mut attempt: Attempt, address: Address) {
    let socket = &attempt.socket;
    match start(socket, address) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        // As the program's own call would have ended.
        Err(error) => return attempt.leave(call, Some(error)),
    }
    let limit = sockopt::socket_timeout(socket, Timeout::Send).ok().flatten();
    while !is_ready(socket, PollFlags::OUT) {
        if !call.waits() {
            return;
        }
        if limit.is_some_and(|limit| attempt.begun.elapsed() >= limit) {
            return attempt.leave(call, Some(Errno::INPROGRESS));
        }
        if process::has_signal(call.thread()) {
            // The kernel finds the connection under way, and is interrupted.
            return attempt.leave(call, None);
        }
    }
    let settled = settle(call, &mut attempt);
    attempt.leave(call, settled.err());
}

/// Whether the connection is there within a time in which its program notices nothing else.
fn is_soon_there(call: &Call, attempt: &Attempt, hold: Duration) -> bool {
    let deadline = Instant::now() + hold;
    while Instant::now() < deadline && call.waits() && !process::has_signal(call.thread()) {
        if is_ready(&attempt.socket, PollFlags::OUT) {
            return tcp::state(&attempt.socket) == Ok(tcp::ESTABLISHED);
        }
    }
    false
}

/// The connection has been made, or has failed, and its program waits. The router offers it, while it is looked where the program has it.
fn settle(call: &Call, attempt: &mut Attempt) -> Result<(), Errno> {
    if let Some(local) = Address::of_socket(&attempt.socket) {
        attempt.conversation.say(&Request::Begun { local, waits: true }, None);
    }
    replace(call, attempt)
}

/// Begins to connect a socket whose file blocks. It is the program's file too, so it does not block for no longer than that takes.
fn start(socket: &OwnedFd, address: Address) -> Result<(), Errno> {
    let flags = fcntl_getfl(socket)?;
    fcntl_setfl(socket, flags | OFlags::NONBLOCK)?;
    let connected = address.connect(socket);
    fcntl_setfl(socket, flags)?;
    connected
}

/// The connection has been made, or has failed: now it takes the host network, or stays. The kernel makes the call, which says what it
/// would have said, on whichever socket is there.
fn seize(call: &Call, mut attempt: Attempt) {
    let replaced = replace(call, &mut attempt);
    attempt.leave(call, replaced.err());
}

/// Whether the program can go on; it has the host connection, if there is one.
fn replace(call: &Call, attempt: &mut Attempt) -> Result<(), Errno> {
    let Attempt { conversation, socket, given, begun, rings } = attempt;
    let socket = &*socket;
    if tcp::state(socket) != Ok(tcp::ESTABLISHED) {
        return Ok(());
    }
    let place = match Place::find(call, socket, rings) {
        Ok(place) => place,
        Err(reason) => {
            conversation.say(&Request::Stay(reason), None);
            return Ok(());
        }
    };
    if !conversation.say(&Request::Moment, None) {
        return Ok(());
    }
    let Heard::Answer(Answer::Commit(last), Some(connection)) = conversation.hear(|| call.waits()) else {
        return Ok(());
    };
    let connection = given.insert(connection);
    if let Err(reason) = commit(call, (socket, *begun), connection, &last) {
        conversation.say(&Request::Stay(reason), None);
        return Ok(());
    }
    // The other end has the host connection from here on, whatever happens.
    let taken = place.take(call, socket, connection);
    conversation.say(&Request::Taken, None);
    taken.map_err(|_| Errno::CONNRESET)
}

/// Says the last word on the host connection. That is the one moment at which both ends change over, or neither does: if the other router
/// has given up waiting it hears nothing, and has reset the connection or is about to; if not it hears this, however long that takes.
fn commit(
    call: &Call,
    (socket, begun): (&OwnedFd, Instant),
    connection: &OwnedFd,
    last: &[u8],
) -> Result<(), Reason> {
    if tcp::sent(socket, Opener::Us) != Ok(Some(0)) {
        return Err(Reason::Used);
    }
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let is_open = recv(connection, &mut [0; 1], flags).err() == Some(Errno::AGAIN);
    let said = is_open && send(connection, last, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) == Ok(last.len());
    let heard = said && (begun.elapsed() < FRESH || is_heard(connection, || call.waits()));
    if heard { Ok(()) } else { Err(Reason::Late) }
}

/// Whether what was said has got to the other host. Its kernel says so, or resets the connection.
fn is_heard(connection: &OwnedFd, goes_on: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + SILENT;
    let mut pause = Duration::from_micros(50);
    loop {
        match tcp::is_acknowledged(connection) {
            Ok(Some(is_so)) => return is_so,
            Ok(None) if Instant::now() < deadline && goes_on() => {}
            _ => return false,
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(Duration::from_millis(5));
    }
}
