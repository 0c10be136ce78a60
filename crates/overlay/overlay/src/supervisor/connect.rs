//! connect, and the program's first request for its result.
//!
//! For a blocking socket, the supervisor waits with the program and replaces the socket before
//! connect returns. For a non-blocking one it waits for at most `hold-ms`. If the connection is not
//! established by then, connect returns EINPROGRESS. The socket is replaced when the program asks
//! for the result, by SO_ERROR or a second connect. docs/overlay-protocol.md has the messages.
//!
//! ```text
//! connect ──► Connect ──► Go ──► overlay SYN ──► Begun ──► Moment ──► Commit ──► replace, Taken
//!               │                                  │
//!               └► Stay, Deny                      └► EINPROGRESS, Moment at SO_ERROR
//! ```
//!
//! For a service's address the router answers Start instead of Go, and gets Started after the overlay
//! SYN.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
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
use super::deadline::{Deadline, GRACE, Wait};
use super::link::{Conversation, Received};
use super::record::{Reply, Slot};
use super::replace::Place;
use super::rings::Rings;
use super::{Call, NEVER, Supervisor, is_nonblocking, is_ready, is_ready_now, process};
use crate::message::{Answer, Request};
use crate::policy::Denial;
use crate::reason::Reason;

/// The time after which a program is taken to never ask for the result. Until then the supervisor's
/// descriptor keeps the socket open, even if the program closes it.
const FORGOTTEN: Duration = Duration::from_secs(3);
/// The age of a call up to which Commit needs no acknowledgement. The other router keeps a promise
/// for at least a second, and made it after the call began. So a Commit that is sent this early
/// arrives in time.
const FRESH: Duration = Duration::from_millis(500);
/// The time without an acknowledgement after which the other host is taken to be down, or its
/// router to have been stopped while it withdrew its promise.
const SILENT: Duration = Duration::from_secs(3);
/// The largest number of non-blocking connects under way.
const PENDING: usize = 4096;

/// Non-blocking connects under way, by the cookies of their sockets.
#[derive(Debug, Default)]
pub(super) struct Pending {
    attempts: Mutex<HashMap<u64, Attempt>>,
    count: AtomicUsize,
}

/// A connect under way. Fields drop in order: the conversation ends before the descriptors are
/// closed.
#[derive(Debug)]
struct Attempt {
    conversation: Conversation,
    /// The router is to know when the overlay's SYN has been sent.
    starts: bool,
    /// The program's socket.
    socket: OwnedFd,
    /// The host connection, once there is one.
    given: Option<OwnedFd>,
    begun: Instant,
    rings: Arc<Rings>,
    /// The answer to the call, if the socket is replaced meanwhile and this process is killed.
    reply: Reply,
}

/// The router's answer about a connection to be made.
enum Asked {
    Go {
        conversation: Conversation,
        /// The router is to know when the overlay's SYN has been sent.
        starts: bool,
    },
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
        // The drop of each attempt waits for the router. If that has stopped, only the first wait.
        let deadline = Deadline::after(GRACE);
        for (_, mut attempt) in old {
            attempt.conversation.wait_until(deadline);
        }
    }

    fn add(&self, cookie: u64, attempt: Attempt) {
        self.change(|attempts| {
            if attempts.len() < PENDING {
                attempts.insert(cookie, attempt);
            }
        });
    }

    /// Takes the attempt of that socket if its connect has completed or failed.
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
    /// Handles connect to an address of the overlay.
    pub(super) fn connect(self: &Arc<Supervisor>, call: &Call, address: Address) {
        let Some(socket) = call.socket() else { return call.proceed() };
        if !is_plain(&socket) {
            // It may be the second call, with which a program asks for the result of the first.
            return self.look_at(call, socket);
        }
        let (conversation, starts) = match self.ask(call, &socket, address) {
            Asked::Go { conversation, starts } => (conversation, starts),
            Asked::Stay => {
                drop(socket);
                return call.proceed();
            }
            // A non-blocking program gets the error immediately too, since it would get no other
            // one later.
            Asked::Denied(denial) => {
                drop(socket);
                return call.answer(Err(denial.error()));
            }
        };
        if !call.waits() {
            return;
        }
        let (begun, rings) = (Instant::now(), self.rings.clone());
        let is_nonblocking = is_nonblocking(&socket);
        let reply = if is_nonblocking { Reply::InProgress } else { Reply::Connected };
        let attempt = Attempt { conversation, starts, socket, given: None, begun, rings, reply };
        if is_nonblocking {
            self.begin(call, attempt, address);
        } else {
            see_through(call, attempt, address);
        }
    }

    /// Handles getsockopt for SO_ERROR.
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

    /// Asks the router if the peer would take the connection.
    fn ask(&self, call: &Call, socket: &OwnedFd, address: Address) -> Asked {
        let from = Address::of_socket(socket).map(|own| own.ip()).filter(|own| !own.is_unspecified());
        let request = Request::Connect { to: address.to, from, starts: true };
        let Some(conversation) = self.link.begin(&request, &[socket.as_fd()], Wait::Connect, None) else {
            return Asked::Stay;
        };
        match conversation.receive(|| call.waits()) {
            Received::Answer(Answer::Go, _) => return Asked::Go { conversation, starts: false },
            Received::Answer(Answer::Start, _) => return Asked::Go { conversation, starts: true },
            Received::Answer(Answer::Deny(denial), _) => return Asked::Denied(denial),
            Received::Late => self.link.let_rest(),
            _ => {}
        }
        Asked::Stay
    }

    /// Handles a non-blocking connect. The program may send as soon as the socket is writable,
    /// without asking for the result. So if the set-up is fast, EINPROGRESS is returned only after
    /// the socket was replaced.
    fn begin(&self, call: &Call, mut attempt: Attempt, address: Address) {
        let Ok(cookie) = sockopt::socket_cookie(&attempt.socket) else { return attempt.leave(call, None) };
        call.record(Slot::begins);
        let connected = address.connect(&attempt.socket);
        attempt.has_started(connected);
        match connected {
            Ok(()) | Err(Errno::INPROGRESS) if is_soon_there(call, &attempt, self.link.hold()) => {
                let error = settle(call, &mut attempt).err().unwrap_or(Errno::INPROGRESS);
                attempt.leave(call, Some(error));
            }
            Ok(()) | Err(Errno::INPROGRESS) => {
                // Sent before the program can ask for the result.
                if let Some(own) = Address::of_socket(&attempt.socket)
                    && attempt.conversation.send(&Request::Begun { local: own, waits: false }, None)
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
    /// Reports to the router that the overlay's SYN has been sent, if it waits for that.
    fn has_started(&self, connected: Result<(), Errno>) {
        if self.starts
            && matches!(connected, Ok(()) | Err(Errno::INPROGRESS))
            && let Some(local) = Address::of_socket(&self.socket)
        {
            self.conversation.send(&Request::Started { local }, None);
        }
    }

    /// Ends the attempt and answers the call. With `None` the kernel makes the call.
    fn leave(self, call: &Call, error: Option<Errno>) {
        drop(self);
        match error {
            None => call.proceed(),
            Some(error) => call.answer(Err(error)),
        }
    }
}

/// Returns `true` for an unconnected TCP socket that connect would connect in the ordinary way.
fn is_plain(socket: &OwnedFd) -> bool {
    let is_plain = || {
        let flags = fcntl_getfl(socket)?;
        let is_fresh = tcp::state(socket)? == tcp::CLOSE;
        let by_events = flags.intersects(OFlags::from_bits_retain(libc::O_ASYNC as u32));
        Ok::<_, Errno>(is_fresh && !by_events && !options::connects_with_data(socket)?)
    };
    is_plain().unwrap_or(false)
}

/// Handles a blocking connect.
fn see_through(call: &Call, mut attempt: Attempt, address: Address) {
    let socket = &attempt.socket;
    let started = start(call, socket, address);
    attempt.has_started(started);
    match started {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        // The program's own call would have returned this error.
        Err(error) => return attempt.leave(call, Some(error)),
    }
    let limit = sockopt::socket_timeout(socket, Timeout::Send).ok().flatten();
    while !is_ready(socket, PollFlags::OUT) {
        if !call.waits() {
            return;
        }
        if limit.is_some_and(|limit| attempt.begun.elapsed() >= limit) {
            attempt.conversation.wait_anew();
            return attempt.leave(call, Some(Errno::INPROGRESS));
        }
        if process::has_signal(call.thread()) {
            attempt.conversation.wait_anew();
            // The kernel finds the connect under way, and the signal interrupts the call.
            return attempt.leave(call, None);
        }
    }
    let settled = settle(call, &mut attempt);
    attempt.leave(call, settled.err());
}

/// Waits until the connection is established, for a time that the program does not notice.
fn is_soon_there(call: &Call, attempt: &Attempt, hold: Duration) -> bool {
    let deadline = Instant::now() + hold;
    while Instant::now() < deadline && call.waits() && !process::has_signal(call.thread()) {
        if is_ready(&attempt.socket, PollFlags::OUT) {
            return tcp::state(&attempt.socket) == Ok(tcp::ESTABLISHED);
        }
    }
    false
}

/// Reports the result of the connect to the router, while the program waits. The router offers the
/// connection while this thread looks for the program's descriptors.
fn settle(call: &Call, attempt: &mut Attempt) -> Result<(), Errno> {
    attempt.conversation.wait_anew();
    if let Some(local) = Address::of_socket(&attempt.socket) {
        attempt.conversation.send(&Request::Begun { local, waits: true }, None);
    }
    replace(call, attempt)
}

/// Starts to connect a blocking socket. The file is shared with the program, so its non-blocking
/// flag is set only for this moment.
fn start(call: &Call, socket: &OwnedFd, address: Address) -> Result<(), Errno> {
    call.record(|slot| slot.set_nonblocking(true));
    let nonblocking = Nonblocking::set(socket)?;
    let connected = address.connect(socket);
    drop(nonblocking);
    call.record(|slot| slot.set_nonblocking(false));
    connected
}

/// The non-blocking flag of a program's file, which is cleared on drop, also when this thread
/// panics. The other flags are left as the program has them by then.
struct Nonblocking<'a>(&'a OwnedFd);

impl Nonblocking<'_> {
    fn set(socket: &OwnedFd) -> Result<Nonblocking<'_>, Errno> {
        fcntl_setfl(socket, fcntl_getfl(socket)? | OFlags::NONBLOCK)?;
        Ok(Nonblocking(socket))
    }
}

impl Drop for Nonblocking<'_> {
    fn drop(&mut self) {
        let cleared = fcntl_getfl(self.0).and_then(|flags| fcntl_setfl(self.0, flags - OFlags::NONBLOCK));
        if let Err(error) = cleared {
            tracing::error!(%error, "a socket of a program stays non-blocking");
        }
    }
}

/// Replaces the socket, if possible, when the program asks for the result. Then the kernel makes
/// the call, on whichever socket the descriptor refers to now.
fn seize(call: &Call, mut attempt: Attempt) {
    attempt.conversation.wait_anew();
    attempt.reply = Reply::Proceed;
    let replaced = replace(call, &mut attempt);
    attempt.leave(call, replaced.err());
}

/// Puts the host connection in the place of the socket, if there is one. An error means that the
/// program must not continue with its socket.
fn replace(call: &Call, attempt: &mut Attempt) -> Result<(), Errno> {
    let Attempt { conversation, socket, given, begun, rings, reply, starts: _ } = attempt;
    let socket = &*socket;
    if tcp::state(socket) != Ok(tcp::ESTABLISHED) {
        return Ok(());
    }
    let place = match Place::find(call, socket, rings) {
        Ok(place) => place,
        Err(reason) => {
            conversation.send(&Request::Stay(reason), None);
            return Ok(());
        }
    };
    if !conversation.send(&Request::Moment, None) {
        return Ok(());
    }
    let Received::Answer(Answer::Commit(last), Some(connection)) = conversation.receive(|| call.waits())
    else {
        return Ok(());
    };
    let connection = given.insert(connection);
    let Some(before) = tcp::sent(&*connection, Opener::Us).ok().flatten() else {
        conversation.send(&Request::Stay(Reason::Late), None);
        return Ok(());
    };
    call.record(|slot| slot.commits((connection, before), conversation.socket(), *reply));
    if let Err(reason) = commit(call, (socket, *begun), connection, &last) {
        call.record(|slot| slot.commits_not());
        conversation.send(&Request::Stay(reason), None);
        return Ok(());
    }
    // From here on the other end has the host connection in any case.
    resets_no_more(socket);
    let taken = place.take(call, socket, connection);
    conversation.send(&Request::Taken, None);
    // Its descriptors are closed before the call is answered.
    call.record(|slot| if taken.is_ok() { slot.taken() } else { slot.commits_not() });
    taken.map_err(|_| Errno::CONNRESET)
}

/// Sends Commit on the host connection. Its arrival is the one moment at which both ends change
/// over. If the other router has given up, Commit is not received, and the connection has been
/// reset or will be. Otherwise Commit is received, however long that takes.
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
    let sent = is_open && send(connection, last, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) == Ok(last.len());
    let received = sent && (begun.elapsed() < FRESH || is_acknowledged(connection, || call.waits()));
    if received { Ok(()) } else { Err(Reason::Late) }
}

/// Lets the close of the overlay connection be no reset, after the Commit. The server's program may
/// accept it much later, and the router, which keeps it open until then, may be killed meanwhile.
pub(super) fn resets_no_more(socket: &OwnedFd) {
    let _ = sockopt::set_socket_linger(socket, None);
}

/// Waits for the acknowledgement of Commit. Returns `true` if it has arrived, and `false` if the
/// other host has reset the connection or is silent.
pub(super) fn is_acknowledged(connection: &OwnedFd, goes_on: impl Fn() -> bool) -> bool {
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

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use rustix::net::{AddressFamily, SocketType, socket};

    use super::*;

    #[test]
    fn a_file_is_blocking_again_whatever_happens_meanwhile() {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        let before = fcntl_getfl(&socket).unwrap();
        let failed = catch_unwind(AssertUnwindSafe(|| {
            let _nonblocking = Nonblocking::set(&socket).unwrap();
            // The program changes another flag.
            fcntl_setfl(&socket, fcntl_getfl(&socket).unwrap() | OFlags::APPEND).unwrap();
            panic!("as a thread of the supervisor might");
        }));
        assert!(failed.is_err());
        assert_eq!(fcntl_getfl(&socket).unwrap(), before | OFlags::APPEND);
    }
}
