//! A supervisor: it is shown the calls of a program that make connections, and has them made as before, or on the host network.
//!
//! One thread at a time takes what is shown, and lets go at once what is nothing to it. If a call may have to wait, that thread stays with
//! it, and another one takes what is shown (`crew`). A call that has been shown is always answered: by what it would have been without a
//! supervisor, if in doubt.

mod accept;
mod address;
mod connect;
mod crew;
mod guarded;
mod link;
mod process;
mod replace;
mod rings;

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use shunt_sys::seccomp::{Listener, Notification, Watched};
use shunt_sys::{Errno, apart, identity, limits, other, tcp};

use accept::Strays;
use address::Address;
use connect::Pending;
use crew::Crew;
use link::Link;
use rings::Rings;

/// What is shown.
pub(crate) const CALLS: [Watched; 6] = [
    Watched { number: libc::SYS_connect, only_if: &[] },
    Watched { number: libc::SYS_accept, only_if: &[] },
    Watched { number: libc::SYS_accept4, only_if: &[] },
    Watched { number: libc::SYS_listen, only_if: &[] },
    Watched {
        number: libc::SYS_getsockopt,
        only_if: &[(1, libc::SOL_SOCKET as u32), (2, libc::SO_ERROR as u32)],
    },
    Watched { number: libc::SYS_io_uring_setup, only_if: &[] },
];

/// The place of no router: none has an empty name. Its program stays on the overlay.
pub(crate) const NO_ROUTER: &str = "";

/// A call needs little.
const STACK: usize = 256 * 1024;
/// How often the router, and what has been forgotten, is looked after.
const TICK: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub(crate) struct Supervisor {
    link: Link,
    pending: Pending,
    strays: Strays,
    /// Listening sockets that the router has been shown, by their cookies.
    shown: Mutex<HashSet<u64>>,
    /// Connections may be accepted where nobody sees that: by an io_uring, or by a call for which there was no thread.
    is_blind: AtomicBool,
    rings: Arc<Rings>,
    crew: Crew,
}

/// A call, and what answers it.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    listener: Arc<Listener>,
    notification: Notification,
}

/// What the process of a supervisor begins with: it ends with the last process that it serves, and not by signals for others.
pub(crate) fn begin_life() {
    apart::ignore_endings();
    let _ = rustix::process::setsid();
    // A connection takes some descriptors for a moment; what the program may have is its own affair.
    let _ = limits::raise_descriptors();
}

/// Nothing of what root may is kept but what it takes to look at processes of any user.
pub(crate) fn drop_privileges() -> Result<(), Errno> {
    let kept = CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)
}

impl Supervisor {
    /// `guards`: its program is under the filter for programs that are not trusted.
    pub(crate) fn new(router: &Path, guards: bool) -> Supervisor {
        Supervisor {
            link: Link::new(router, guards),
            pending: Pending::default(),
            strays: Strays::default(),
            shown: Mutex::default(),
            is_blind: AtomicBool::new(false),
            rings: Arc::default(),
            crew: Crew::default(),
        }
    }

    pub(crate) fn has_router(&self) -> bool {
        self.link.is_up()
    }

    /// Until nobody is left under the filter.
    pub(crate) fn serve(self, listener: Listener) {
        self.run(&Arc::new(listener), None);
    }

    /// The same, when somebody has made a call already.
    pub(crate) fn serve_from(self, first: Call) {
        self.run(&first.listener.clone(), Some(first));
    }

    fn run(self, listener: &Arc<Listener>, first: Option<Call>) {
        listener.hand_over();
        let supervisor = Arc::new(self);
        let keeper = supervisor.clone();
        // A router that hangs must not keep calls waiting.
        let kept = std::thread::Builder::new().stack_size(STACK).spawn(move || keeper.keep());
        if kept.is_err() {
            supervisor.link.hang_up();
        }
        supervisor.work(listener, first);
        supervisor.crew.await_end();
    }

    /// The life of a thread: it takes what is shown when it is its turn, until a call keeps it. `taken` is its first.
    fn work(self: &Arc<Supervisor>, listener: &Arc<Listener>, mut taken: Option<Call>) {
        while self.crew.lead() {
            while self.crew.leads() {
                match taken.take().or_else(|| Call::next(listener)) {
                    Some(call) => self.dispatch(call),
                    None => return self.crew.end(),
                }
            }
        }
    }

    /// Until the process ends.
    fn keep(&self) {
        loop {
            std::thread::sleep(TICK);
            self.pending.forget_old();
            self.strays.forget_old();
            self.link.forget_old();
            if self.link.look_after() {
                // Another router, which has been shown nothing.
                self.shown.lock().expect(NEVER).clear();
            }
        }
    }

    fn dispatch(self: &Arc<Supervisor>, call: Call) {
        if self.guards(&call) {
            return;
        }
        if !self.link.is_up() && self.strays.is_empty() {
            call.proceed();
            return;
        }
        match call.notification.number {
            libc::SYS_connect => match Address::of_connect(&call) {
                Some(address) if self.link.answers() && self.link.covers(address.to.ip()) => {
                    self.stay_with(call, move |supervisor, call| supervisor.connect(call, address));
                }
                _ => call.proceed(),
            },
            libc::SYS_getsockopt if !self.pending.is_empty() => {
                self.stay_with(call, |supervisor, call| supervisor.look(call));
            }
            libc::SYS_accept | libc::SYS_accept4 => match self.listening(&call) {
                Some((socket, cookie)) => {
                    self.show(&socket, cookie);
                    self.accept(call, socket, cookie);
                }
                None => call.proceed(),
            },
            libc::SYS_listen => self.listen(&call),
            libc::SYS_io_uring_setup => {
                self.rings.note(call.thread());
                self.go_blind();
                call.proceed();
            }
            _ => call.proceed(),
        }
    }

    /// What may have to wait; if too much does, the call is made as without a supervisor.
    fn stay_with(self: &Arc<Supervisor>, call: Call, job: impl FnOnce(&Arc<Supervisor>, &Call)) {
        if self.hand_over(&call.listener) {
            job(self, &call);
        } else {
            call.proceed();
        }
    }

    /// Whether this thread may wait: another one takes what is shown.
    fn hand_over(self: &Arc<Supervisor>, listener: &Arc<Listener>) -> bool {
        let (supervisor, listener) = (self.clone(), listener.clone());
        self.crew.hand_over(move || {
            let thread = std::thread::Builder::new().stack_size(STACK);
            thread.spawn(move || supervisor.work(&listener, None)).is_ok()
        })
    }

    /// No more connections are promised to this program.
    fn go_blind(&self) {
        if !self.is_blind.swap(true, Relaxed) {
            self.link.withdraw();
            self.shown.lock().expect(NEVER).clear();
        }
    }

    /// listen is made here, since the router can be shown the socket only afterwards.
    fn listen(&self, call: &Call) {
        let Some(socket) = call.socket() else { return call.proceed() };
        if guarded::is_hosts(socket.as_fd()) {
            return call.answer(Err(Errno::INVAL));
        }
        if !self.may_listen(&socket) {
            return call.proceed();
        }
        let result = rustix::net::listen(&socket, call.notification.arguments[1] as i32);
        if let (Ok(()), Ok(cookie)) = (result, sockopt::socket_cookie(&socket)) {
            self.show(&socket, cookie);
        }
        call.answer(result.map(|()| 0));
    }

    /// The socket that accept is called on, if it listens for the overlay.
    fn listening(&self, call: &Call) -> Option<(OwnedFd, u64)> {
        let socket = match other::descriptor(call.thread(), call.number()) {
            Ok(socket) if call.waits() => socket,
            // A program that has become another user's, or hides from everybody; or nothing more can be had here.
            Err(error) if error != Errno::BADF && call.waits() => {
                self.go_blind();
                return None;
            }
            _ => return None,
        };
        let is_ours = self.may_listen(&socket) && tcp::state(&socket) == Ok(tcp::LISTEN);
        let cookie = is_ours.then(|| sockopt::socket_cookie(&socket).ok()).flatten()?;
        Some((socket, cookie))
    }

    /// A TCP socket whose address, if it has one, is the overlay's or any.
    fn may_listen(&self, socket: &OwnedFd) -> bool {
        let is_tcp = identity::shown(socket).is_ok_and(|shown| !shown.bound_device);
        is_tcp
            && Address::of_socket(socket)
                .is_some_and(|address| address.ip().is_unspecified() || self.link.covers(address.ip()))
    }

    fn show(&self, socket: &OwnedFd, cookie: u64) {
        let mut shown = self.shown.lock().expect(NEVER);
        if !self.is_blind.load(Relaxed) && !shown.contains(&cookie) && self.link.show(socket) {
            shown.insert(cookie);
        }
    }
}

impl Call {
    /// The next one. None: nobody is left under the filter.
    pub(crate) fn next(listener: &Arc<Listener>) -> Option<Call> {
        loop {
            let mut polled = [PollFd::new(&**listener, PollFlags::IN)];
            if poll(&mut polled, None).is_err() {
                continue;
            }
            if polled[0].revents().contains(PollFlags::HUP) {
                return None;
            }
            match listener.next() {
                Ok(notification) => return Some(Call { listener: listener.clone(), notification }),
                // Its thread has died, or was interrupted before it was taken.
                Err(Errno::NOENT | Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }

    fn number(&self) -> i32 {
        self.notification.arguments[0] as i32
    }

    pub(crate) fn thread(&self) -> u32 {
        self.notification.thread
    }

    /// The descriptor that is its first argument, if it is still the caller's.
    fn socket(&self) -> Option<OwnedFd> {
        let socket = other::descriptor(self.thread(), self.number()).ok()?;
        self.waits().then_some(socket)
    }

    pub(crate) fn waits(&self) -> bool {
        self.listener.waits(self.notification.id)
    }

    /// It is nothing to a supervisor of the overlay, whatever it is.
    pub(crate) fn let_be(&self) {
        match guarded::Job::of(self) {
            Some(job) => self.answer(job.answer(self)),
            None => self.proceed(),
        }
    }

    /// As the kernel ends a call that a signal interrupts: the caller never sees this number, since it handles the signal first, or the
    /// call begins anew. Only for a thread that is marked to have one.
    fn interrupt(&self, may_restart: bool) {
        const ERESTARTSYS: i32 = 512;
        self.answer(Err(if may_restart { Errno::from_raw_os_error(ERESTARTSYS) } else { Errno::INTR }));
    }

    /// Nobody is left to be told if that fails.
    fn proceed(&self) {
        let _ = self.listener.proceed(self.notification.id);
    }

    fn answer(&self, result: Result<i64, Errno>) {
        let _ = self.listener.answer(self.notification.id, result);
    }
}

/// Whether a descriptor's file does not block.
fn is_nonblocking(socket: &OwnedFd) -> bool {
    rustix::fs::fcntl_getfl(socket).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Waits until `socket` is ready, no longer than a slice of time in which a caller may notice a signal. EINTR is an ordinary slice.
fn is_ready(socket: impl AsFd, events: PollFlags) -> bool {
    const SLICE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    let mut polled = [PollFd::new(&socket, events)];
    poll(&mut polled, Some(&SLICE)).is_ok_and(|ready| ready > 0)
}

/// Whether it is so now.
fn is_ready_now(socket: impl AsFd, events: PollFlags) -> bool {
    let mut polled = [PollFd::new(&socket, events)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

const NEVER: &str = "nobody panics while it is locked";
