//! The supervisor. Its seccomp listener reports the calls of a program that make connections. It
//! lets the kernel make them unchanged, or answers them with a connection on the host network.
//!
//! ```text
//! program: connect() ──► kernel ──► listener ──► supervisor ◄──► router
//!                                                proceed, or answer
//! ```
//!
//! One thread at a time reads the listener. It lets all calls proceed immediately that do not
//! concern the overlay. If a call may have to wait, the thread stays with it, and another thread
//! takes over the listener (`workers`). Every reported call is answered. In doubt the kernel makes
//! it as if there were no supervisor.

mod accept;
mod address;
mod connect;
mod deadline;
mod guarded;
mod held;
mod link;
mod listeners;
mod process;
mod record;
mod recover;
mod replace;
mod rings;
mod undelivered;
mod workers;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use rustix::process::{Signal, getpid, kill_process};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use shunt_sys::keeper::{self, Successor};
use shunt_sys::seccomp::{Listener, Notification, Watched};
use shunt_sys::{Errno, daemonize, identity, limits, other, tcp};

use address::Address;
use connect::Pending;
use link::Link;
use listeners::Listeners;
use record::Slot;
use rings::Rings;
use undelivered::Undelivered;
use workers::Workers;

pub(crate) use record::Record;
pub use recover::supervise_on;

/// The calls that the filter reports.
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

/// A path at which no router can listen. A supervisor with it leaves its program on the overlay.
pub(crate) const NO_ROUTER: &str = "";

/// The stack size of a thread, in bytes. A call needs little stack.
const STACK: usize = 256 * 1024;
/// The interval at which the router is checked and old entries are removed.
const TICK: Duration = Duration::from_secs(1);

/// The supervisor of a program.
#[derive(Debug)]
pub(crate) struct Supervisor {
    /// The state that outlives this process, if it is killed.
    record: Arc<Record>,
    link: Link,
    pending: Pending,
    undelivered: Undelivered,
    /// The listening sockets that the router knows, or is to know when there is one again.
    listeners: Listeners,
    /// Set when the program may accept connections unseen: by an io_uring, or by a call for which
    /// there was no thread.
    is_blind: AtomicBool,
    rings: Arc<Rings>,
    workers: Workers,
}

/// A reported call, and the listener that answers it.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    listener: Arc<Listener>,
    notification: Notification,
    /// The place in which the call outlives this process.
    slot: Option<Arc<Slot>>,
}

/// Prepares the process of a supervisor: it ends with the last process that it serves, and ignores
/// signals that are meant for others.
pub(crate) fn begin_life() {
    daemonize::ignore_endings();
    let _ = rustix::process::setsid();
    // A connection takes several descriptors for a moment. The program's own limit is not changed.
    let _ = limits::raise_descriptors();
}

/// Drops all capabilities except those for inspecting processes of any user.
pub(crate) fn drop_privileges() -> Result<(), Errno> {
    let kept = CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH;
    // Also after an exec by root.
    set_no_new_privs(true)?;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets)
}

impl Supervisor {
    /// Creates a supervisor. `guards`: its program is under the filter for programs that are not
    /// trusted.
    pub(crate) fn new(record: Record, router: &Path, guards: bool) -> Supervisor {
        let record = Arc::new(record);
        Supervisor::over(record.clone(), Link::new(record, router, guards))
    }

    fn over(record: Arc<Record>, link: Link) -> Supervisor {
        Supervisor {
            link,
            pending: Pending::default(),
            undelivered: Undelivered::default(),
            listeners: Listeners::new(record.clone()),
            is_blind: AtomicBool::new(record.is_blind()),
            rings: Arc::new(Rings::new(record.clone())),
            workers: Workers::default(),
            record,
        }
    }

    pub(crate) fn has_router(&self) -> bool {
        self.link.is_up()
    }

    /// Serves until no process is left under the filter.
    pub(crate) fn serve(self, listener: Listener) {
        Arc::new(self).run(&Arc::new(listener), None);
    }

    /// Serves as [`Supervisor::serve`] does, beginning with a call that was received already.
    pub(crate) fn serve_from(self, first: Call) {
        Arc::new(self).run(&first.listener.clone(), Some(first));
    }

    fn run(self: &Arc<Supervisor>, listener: &Arc<Listener>, first: Option<Call>) {
        listener.hand_over();
        let supervisor = self.clone();
        self.record.set_listener(listener);
        let kept = listener.clone();
        // This thread notices a router that hangs, so that calls do not wait for it.
        let kept = std::thread::Builder::new().stack_size(STACK).spawn(move || supervisor.keep(&kept));
        if kept.is_err() {
            self.link.hang_up();
        }
        let slot = self.record.claim();
        let first = first.map(|call| {
            slot.iter().for_each(|slot| slot.store(&call.notification));
            Call { slot: slot.clone(), ..call }
        });
        self.work(listener, slot, first);
        self.workers.await_end();
        self.record.set_over();
    }

    /// Runs a thread: it reads the listener whenever it leads, until a call keeps it. `taken` is
    /// its first call.
    fn work(
        self: &Arc<Supervisor>,
        listener: &Arc<Listener>,
        slot: Option<Arc<Slot>>,
        mut taken: Option<Call>,
    ) {
        while self.workers.lead() {
            while self.workers.leads() {
                match taken.take().or_else(|| Call::next(listener, slot.as_ref())) {
                    Some(call) => self.dispatch(call),
                    None => return self.workers.end(),
                }
            }
        }
    }

    /// Runs the periodic work until the process ends.
    fn keep(&self, listener: &Listener) {
        let arguments = recover::arguments(&self.record);
        let successor = Successor::of_this_program(arguments).inspect_err(|error| {
            tracing::warn!(%error, "this supervisor has no successor if it is killed");
        });
        let mut keeper = None;
        loop {
            self.record.beat();
            if let Ok(successor) = &successor
                && keeper.is_none_or(keeper::has_ended)
            {
                self.record.set_program(successor.own());
                // Calls that guard the host must not be made unchecked.
                let listener = Some(listener).filter(|_| !self.link.guards());
                keeper = successor.start_keeper(self.record.signs(), listener).ok();
            }
            self.link.await_suspicion(TICK);
            self.record.beat();
            self.pending.forget_old();
            self.undelivered.forget_old();
            self.link.forget_old();
            self.record.beat();
            // A router that is started again may be an update's, and the supervisor is updated too.
            let update = || {
                if keeper.is_some() && successor.as_ref().is_ok_and(Successor::is_another) {
                    self.link.leave_held();
                    let _ = kill_process(getpid(), Signal::KILL);
                }
            };
            self.link.look_after(update, || self.listeners.find(|socket| self.may_listen(socket)));
        }
    }

    fn dispatch(self: &Arc<Supervisor>, call: Call) {
        if self.guards(&call) {
            return;
        }
        let is_idle = !self.link.is_up() && self.undelivered.is_empty() && self.listeners.is_empty();
        if is_idle && call.notification.number != libc::SYS_listen {
            call.proceed();
            return;
        }
        match call.notification.number {
            libc::SYS_connect => match Address::of_connect(&call) {
                Some(address) if self.link.expects(address.to.ip()) => {
                    self.stay_with(call, move |supervisor, call| supervisor.connect(call, address));
                }
                _ => call.proceed(),
            },
            libc::SYS_getsockopt if !self.pending.is_empty() => {
                self.stay_with(call, |supervisor, call| supervisor.look(call));
            }
            libc::SYS_accept | libc::SYS_accept4 => match self.listening(&call) {
                Some((socket, cookie)) => {
                    self.show(&call, &socket, cookie);
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

    /// Handles a call that may have to wait. If there is no thread for that, the kernel makes the
    /// call.
    fn stay_with(self: &Arc<Supervisor>, call: Call, job: impl FnOnce(&Arc<Supervisor>, &Call)) {
        if self.hand_over(&call.listener) {
            job(self, &call);
        } else {
            call.proceed();
        }
    }

    /// Returns `true` if this thread may wait, because another one reads the listener.
    fn hand_over(self: &Arc<Supervisor>, listener: &Arc<Listener>) -> bool {
        let (supervisor, listener) = (self.clone(), listener.clone());
        self.workers.hand_over(move || {
            let thread = std::thread::Builder::new().stack_size(STACK);
            let work = move || supervisor.work(&listener, supervisor.record.claim(), None);
            thread.spawn(work).is_ok()
        })
    }

    /// Withdraws the program's listening sockets, so that no more connections are promised to it.
    fn go_blind(&self) {
        if !self.is_blind.swap(true, Relaxed) {
            self.record.set_blind();
            self.link.withdraw();
            self.listeners.clear();
        }
    }

    /// Makes the listen call itself, since the router must get the socket after the call.
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
            self.show(call, &socket, cookie);
        }
        call.answer(result.map(|()| 0));
    }

    /// Returns the listening socket of an accept call, if it may accept connections of the overlay.
    fn listening(&self, call: &Call) -> Option<(OwnedFd, u64)> {
        let socket = match other::descriptor(call.thread(), call.number()) {
            Ok(socket) if call.waits() => socket,
            // The process may run as another user, be undumpable, or this process has no free
            // descriptor.
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

    /// Returns `true` for a TCP socket whose local address, if any, is the overlay's or
    /// unspecified. Before the first router, each address may be the overlay's.
    fn may_listen(&self, socket: &OwnedFd) -> bool {
        let is_tcp = identity::shown(socket).is_ok_and(|shown| !shown.bound_device);
        is_tcp
            && Address::of_socket(socket)
                .is_some_and(|address| address.ip().is_unspecified() || self.link.may_cover(address.ip()))
    }

    fn show(&self, call: &Call, socket: &OwnedFd, cookie: u64) {
        if !self.is_blind.load(Relaxed) {
            self.listeners.note(cookie, (call.thread(), call.number()), || self.link.show(socket));
        }
    }
}

impl Call {
    /// Waits for the next call. `None`: no process is left under the filter.
    pub(crate) fn next(listener: &Arc<Listener>, slot: Option<&Arc<Slot>>) -> Option<Call> {
        loop {
            let mut polled = [PollFd::new(&**listener, PollFlags::IN)];
            if poll(&mut polled, None).is_err() {
                continue;
            }
            if polled[0].revents().contains(PollFlags::HUP) {
                return None;
            }
            let received = slot.map_or_else(|| listener.next(), |slot| slot.receive(listener));
            match received {
                Ok(notification) => {
                    return Some(Call { listener: listener.clone(), notification, slot: slot.cloned() });
                }
                // The thread has died, or its call was interrupted before it was received.
                Err(Errno::NOENT | Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }

    /// Notes a step of the call in the place in which it outlives this process.
    fn record(&self, note: impl FnOnce(&Slot)) {
        if let Some(slot) = &self.slot {
            note(slot);
        }
    }

    fn number(&self) -> i32 {
        self.notification.arguments[0] as i32
    }

    pub(crate) fn thread(&self) -> u32 {
        self.notification.thread
    }

    /// Returns a duplicate of the descriptor in the first argument, if the call still waits.
    fn socket(&self) -> Option<OwnedFd> {
        let socket = other::descriptor(self.thread(), self.number()).ok()?;
        self.waits().then_some(socket)
    }

    pub(crate) fn waits(&self) -> bool {
        self.listener.waits(self.notification.id)
    }

    /// Lets a call proceed that does not concern the overlay. Guarded calls are made here instead.
    pub(crate) fn let_be(&self) {
        match guarded::Job::of(self) {
            Some(job) => self.answer(job.answer(self)),
            None => self.proceed(),
        }
    }

    /// Ends the call in the way in which a signal does. The caller never sees this error: the
    /// kernel handles the signal first, and then restarts the call or returns EINTR. Only for a
    /// thread that has a signal pending.
    fn interrupt(&self, may_restart: bool) {
        const ERESTARTSYS: i32 = 512;
        self.answer(Err(if may_restart { Errno::from_raw_os_error(ERESTARTSYS) } else { Errno::INTR }));
    }

    /// An error means that the caller has ended.
    fn proceed(&self) {
        let _ = self.listener.proceed(self.notification.id);
    }

    fn answer(&self, result: Result<i64, Errno>) {
        let _ = self.listener.answer(self.notification.id, result);
    }
}

/// Returns `true` if the descriptor's file does not block.
fn is_nonblocking(socket: &OwnedFd) -> bool {
    rustix::fs::fcntl_getfl(socket).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Waits until `socket` is ready, for at most the interval at which a caller's signals are checked.
/// EINTR counts as the end of the interval.
fn is_ready(socket: impl AsFd, events: PollFlags) -> bool {
    const SLICE: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    let mut polled = [PollFd::new(&socket, events)];
    poll(&mut polled, Some(&SLICE)).is_ok_and(|ready| ready > 0)
}

/// Returns `true` if `socket` is ready now.
fn is_ready_now(socket: impl AsFd, events: PollFlags) -> bool {
    let mut polled = [PollFd::new(&socket, events)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

const NEVER: &str = "nobody panics while it is locked";
