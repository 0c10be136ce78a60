//! The supervisor's end of its conversations with the router. The router is another's process, and may be anything: nothing here waits
//! for it without an end.

use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use shunt_sys::{Errno, seqpacket};

use super::NEVER;
use crate::message::{self, Answer, MessageError, Request, VERSION, Welcome};

/// Beyond what the router may take, for a machine that is busy.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// As long as this, beyond all that, a router that does nothing is taken for one that is busy, when its answer may be the only way to a
/// connection.
const ACCEPTED: Duration = Duration::from_secs(10);

/// So many conversations are kept open for the next connections.
const KEPT: usize = 4;
/// For so long: the router closes them later.
const FRESH: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(crate) struct Link {
    router: PathBuf,
    /// Its program is under the filter for programs that are not trusted.
    guards: bool,
    /// Conversations that have come to their end, and can begin anew.
    kept: Arc<Kept>,
    /// The conversation that lasts.
    standing: Mutex<Option<Standing>>,
    /// The router has not answered in time: no connection of the program's waits for it.
    rests: AtomicBool,
}

/// With the moments of their ends.
type Kept = Mutex<Vec<(OwnedFd, Instant)>>;

#[derive(Debug)]
struct Standing {
    socket: OwnedFd,
    welcome: Welcome,
}

impl Link {
    /// Whether its program is under the filter for programs that are not trusted.
    pub(super) fn guards(&self) -> bool {
        self.guards
    }

    pub(super) fn new(router: &Path, guards: bool) -> Link {
        let link = Link {
            router: router.to_owned(),
            guards,
            kept: Arc::default(),
            standing: Mutex::new(None),
            rests: AtomicBool::new(false),
        };
        *link.standing() = link.greet();
        link
    }

    pub(super) fn is_up(&self) -> bool {
        self.standing().is_some()
    }

    /// Whether an address is the overlay's.
    pub(super) fn covers(&self, address: IpAddr) -> bool {
        self.standing().as_ref().is_some_and(|it| it.welcome.prefixes.iter().any(|it| it.contains(&address)))
    }

    /// Whether a connection of the program's is worth a question to it.
    pub(super) fn answers(&self) -> bool {
        !self.rests.load(Relaxed)
    }

    /// It is asked nothing for a while about connections of the program's. What it has promised for the program's listening sockets
    /// holds, so accepted ones are shown to it.
    pub(super) fn let_rest(&self) {
        self.rests.store(true, Relaxed);
    }

    /// How long connect waits for a program that does not block.
    pub(super) fn hold(&self) -> Duration {
        let hold = self.standing().as_ref().map_or(0, |it| it.welcome.hold_ms);
        Duration::from_millis(hold)
    }

    /// Notices that the router has gone, or has come; waits for one that hangs. True: it is another than before.
    pub(super) fn look_after(&self) -> bool {
        let stands = self.standing().as_ref().is_some_and(|it| {
            matches!(message::receive::<Answer>(&it.socket), Err(MessageError::Kernel(Errno::AGAIN)))
        });
        if stands {
            if !self.answers() && self.greet().is_some() {
                self.rests.store(false, Relaxed);
            }
            return false;
        }
        // Gone, or it says what a router does not say unasked.
        self.hang_up();
        let standing = self.greet();
        let is_there = standing.is_some();
        self.rests.store(false, Relaxed);
        *self.standing() = standing;
        is_there
    }

    /// Closes conversations that nobody has needed again.
    pub(super) fn forget_old(&self) {
        self.kept().retain(|(_, since)| since.elapsed() < FRESH);
    }

    /// Shows a listening socket; whether that got there.
    pub(super) fn show(&self, socket: &OwnedFd) -> bool {
        let standing = self.standing();
        let Some(it) = &*standing else { return false };
        message::send(&it.socket, &Request::Listen, Some(socket.as_fd())).is_ok()
    }

    /// No listening socket that was shown is supervised any more.
    pub(super) fn withdraw(&self) {
        let mut standing = self.standing();
        if standing.as_ref().is_some_and(|it| message::send(&it.socket, &Request::Withdraw, None).is_err()) {
            *standing = None;
        }
    }

    /// About one connection: the first words of a conversation. None: there is no router that listens.
    pub(super) fn begin(&self, request: &Request, shown: &OwnedFd) -> Option<Conversation> {
        let (ask, patience) = {
            let standing = self.standing();
            let welcome = &standing.as_ref()?.welcome;
            (Duration::from_millis(welcome.ask_ms), Duration::from_millis(welcome.patience_ms))
        };
        // It dials and asks; or promises, and waits; or the other router waits for that.
        let limit = 2 * (ask + patience) + 2 * GRACE;
        // The client may have it already, and then nothing else is right.
        let limit = if matches!(request, Request::Accepted { .. }) { limit + ACCEPTED } else { limit };
        loop {
            let kept = self.kept().pop().map(|(socket, _)| socket);
            let is_kept = kept.is_some();
            let socket = kept.or_else(|| self.dial())?;
            let conversation = Conversation {
                socket: Some(socket),
                limit,
                is_over: AtomicBool::new(false),
                is_late: AtomicBool::new(false),
                kept: self.kept.clone(),
            };
            if conversation.say(request, Some(shown)) {
                return Some(conversation);
            }
            // The router has closed it since, which costs nothing but another attempt.
            if !is_kept {
                return None;
            }
        }
    }

    /// A router that does not answer is none, until it does.
    pub(super) fn hang_up(&self) {
        *self.standing() = None;
        self.kept().clear();
    }

    fn dial(&self) -> Option<OwnedFd> {
        let deadline = Instant::now() + GRACE;
        loop {
            match seqpacket::connect(self.router.as_os_str().as_bytes()) {
                // More have begun at once than the router's queue holds: it comes to them.
                Err(Errno::AGAIN) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                dialled => return dialled.ok(),
            }
        }
    }

    fn greet(&self) -> Option<Standing> {
        let socket = self.dial()?;
        let shown = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).ok()?;
        message::send(
            &socket,
            &Request::Hello { version: VERSION, guards: self.guards },
            Some(shown.as_fd()),
        )
        .ok()?;
        match receive(&socket, GRACE, || true) {
            Heard::Answer(Answer::Welcome(welcome), _) => Some(Standing { socket, welcome }),
            _ => None,
        }
    }

    fn kept(&self) -> MutexGuard<'_, Vec<(OwnedFd, Instant)>> {
        self.kept.lock().expect(NEVER)
    }

    fn standing(&self) -> MutexGuard<'_, Option<Standing>> {
        self.standing.lock().expect(NEVER)
    }
}

/// What has come of waiting for an answer.
#[derive(Debug)]
pub(super) enum Heard {
    Answer(Answer, Option<OwnedFd>),
    /// The router has gone, or says nothing that it could.
    Nothing,
    /// It takes too long.
    Late,
}

/// About one connection. Its end comes before what has been shown or given is closed here: so the router, whom nobody may hold up, never
/// closes the last descriptor of a program's socket, which a program can have take long.
#[derive(Debug)]
pub(super) struct Conversation {
    /// Until its end.
    socket: Option<OwnedFd>,
    limit: Duration,
    /// The router has said all that it has to say.
    is_over: AtomicBool,
    /// It does not say it in time.
    is_late: AtomicBool,
    /// Where it is kept after its end.
    kept: Arc<Kept>,
}

impl Conversation {
    /// Whether it got there.
    pub(super) fn say(&self, request: &Request, socket: Option<&OwnedFd>) -> bool {
        let shown = socket.map(AsFd::as_fd);
        self.socket.as_ref().is_some_and(|to| message::send(to, request, shown).is_ok())
    }

    /// The answer, as long as `goes_on`.
    pub(super) fn hear(&self, goes_on: impl Fn() -> bool) -> Heard {
        let Some(socket) = &self.socket else { return Heard::Nothing };
        let heard = receive(socket, self.limit, goes_on);
        match heard {
            Heard::Answer(Answer::Commit(_) | Answer::Take | Answer::Stay | Answer::Deny(_), _) => {
                self.is_over.store(true, Relaxed);
            }
            Heard::Late => self.is_late.store(true, Relaxed),
            _ => {}
        }
        heard
    }

    /// The router is not waited for.
    pub(super) fn give_up(&self) {
        self.is_late.store(true, Relaxed);
    }

    /// Nothing more is said. Whether the next connection can be talked about.
    fn ends_well(&self, socket: &OwnedFd) -> bool {
        if self.is_late.load(Relaxed) || !self.is_over.load(Relaxed) && !self.say(&Request::Done, None) {
            return false;
        }
        loop {
            match receive(socket, GRACE, || true) {
                Heard::Answer(Answer::Done, _) => return true,
                Heard::Answer(..) => {}
                Heard::Nothing | Heard::Late => return false,
            }
        }
    }
}

/// Waits until the router has closed what it was shown and what it gave: only then is the program's close of its descriptor the end of the
/// connection, and of the events that epoll reports of it.
impl Drop for Conversation {
    fn drop(&mut self) {
        let ends_well = self.socket.as_ref().is_some_and(|socket| self.ends_well(socket));
        let Some(socket) = self.socket.take().filter(|_| ends_well) else { return };
        let mut kept = self.kept.lock().expect(NEVER);
        if kept.len() < KEPT {
            kept.push((socket, Instant::now()));
        }
    }
}

fn receive(socket: &OwnedFd, limit: Duration, goes_on: impl Fn() -> bool) -> Heard {
    const SLICE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let deadline = Instant::now() + limit;
    loop {
        match message::receive(socket) {
            Ok((answer, descriptor)) => return Heard::Answer(answer, descriptor),
            Err(MessageError::Kernel(Errno::AGAIN)) => {}
            Err(_) => return Heard::Nothing,
        }
        if !goes_on() {
            return Heard::Nothing;
        }
        if Instant::now() >= deadline {
            return Heard::Late;
        }
        // A signal is an ordinary slice.
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&SLICE));
    }
}
