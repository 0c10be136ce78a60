//! Epoll instances: what is registered with each, and which lanes it must look at.
//!
//! Every registration is also in the kernel's set, which stays the authority for FIN, RST, errors and TCP's own
//! data. A registration whose endpoint is on a link is *attached*: its readability, and its writability once it sends
//! on a lane, are answered here. An instance without attached registrations costs nothing (L7).
//!
//! What a program gives as user data may be the same for several descriptors, ours or not. So the kernel's set holds a
//! *token* of ours in its place for what is answered here, and an event is the registration's that has its token. One that
//! is for a single event has a token from the beginning: the kernel disarms it, and only the event says that it has.
//!
//! Locks: an instance's lock is taken before an endpoint's, never after.

mod answer;
mod answered;
mod bell;
mod duplicates;
mod ghost;
mod held;
mod line;
mod listing;
mod names;
mod nested;
mod patience;
mod records;
mod registration;
mod report;
mod shared;
mod watched;

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::*};

use libc::epoll_event;
use rustix::net::sockopt::socket_acceptconn;
use shunt_abi::reason::Reason;

use crate::base::above::Above;
use crate::base::lock::{Guard, Lock};
use crate::base::names::{EndpointRef, EpollRef};
use crate::base::private::borrow;
use crate::base::table::{self, Entry};
use crate::base::waiter::Slot;
use crate::base::{errno, process, real};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::family::{self, Holders};
use crate::socket::links::{Link, Pin};
use answered::{Answered, Count};
use bell::Bell;
use duplicates::Duplicates;
use ghost::Ghost;
use held::Held;
use line::{Line, Place};
use names::{Name, Names};
pub(crate) use nested::{has_lamps, show_lanes};
pub(crate) use patience::{DEGRADED_NANOS, Patience, until_known};
use records::Records;
use registration::Passed;
pub(crate) use shared::{
    be_born, change_program, forget_child, hand_on, is_set, is_shared, list_unknown, pass_beyond, share,
    stay, take_in,
};
use watched::Watched;

const MAX: usize = 65536;
/// Events that a lane can answer.
pub(crate) const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
pub(crate) const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
const URGENT: u32 = libc::EPOLLPRI as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// The peer sends no more.
const FINISHED: u32 = libc::EPOLLRDHUP as u32;
/// Reported whether asked for or not.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// How a connection is to leave its lanes because of a set that it is in.
#[derive(Clone, Copy)]
pub(crate) enum Leaving {
    GoBack,
    GiveBackAtOnce,
    Bar,
    BarReading,
}

/// Has it leave them, for a reason. No lock is held.
pub(crate) static LEAVE: Above<(&'static Endpoint, Leaving, Reason)> = Above::new();

/// One epoll instance of this process.
pub(crate) struct Epoll {
    index: u32,
    generation: AtomicU32,
    /// Attached registrations, a doorbell in the kernel's set, or other processes that have it too: calls must look here.
    active: AtomicU32,
    /// The kernel's set holds tokens, or has.
    has_tokens: AtomicBool,
    /// Which processes have it.
    holders: Holders,
    inner: Lock<Inner>,
}

impl EpollRef {
    /// The instance, if this still is its name.
    #[inline]
    pub(crate) fn resolve(self) -> Option<&'static Epoll> {
        let epoll = SLAB.get(self.index() as usize)?.load(Acquire);
        // SAFETY: instances are never freed.
        let epoll = unsafe { epoll.as_ref() }?;
        (epoll.generation.load(Acquire) == self.generation()).then_some(epoll)
    }
}

/// The epoll instance behind `fd`, if it is one that we saw being made.
#[inline]
pub(crate) fn behind(fd: RawFd) -> Option<&'static Epoll> {
    match table::look_up(fd) {
        Entry::Epoll(name) => name.resolve(),
        _ => None,
    }
}

static SLAB: [AtomicPtr<Epoll>; MAX] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX];
static FREE: Lock<(Vec<u32>, u32)> = Lock::new((Vec::new(), 0));

/// What an instance keeps under its lock.
#[derive(Default)]
pub(crate) struct Inner {
    fd: RawFd,
    /// Whom lanes wake.
    bell: Bell,
    marker: u64,
    /// What is ours has been taken out of the kernel's set for an exec.
    hidden: bool,
    /// Another process has it too, or has had it: see [`shared`].
    shared: bool,
    /// When it may next be asked who else has it: see [`Inner::unshare`].
    ask_holders_at: u64,
    /// How often it had been changed by all of them when the records were last true.
    seen_changes: u32,
    /// It is itself watched: see [`nested`].
    nested: bool,
    /// By the number in the kernel's set, or by a negative one if that has been [closed](freeze_everywhere).
    registrations: Records<Registration>,
    names: Names,
    /// Of those, what lanes answer for.
    answered: Count,
    /// Connections that are registered by another number than their endpoint's.
    duplicates: Duplicates,
    /// How many registrations have been made, and how many have been [frozen](freeze_everywhere).
    made: u64,
    frozen: RawFd,
    links: Watched,
    /// The doorbell has been rung since the links at rest were last looked at.
    rung: bool,
    /// Descriptors to look at in the next wait: marked by a peer, newly armed, or level-triggered and ready.
    line: Line,
    /// Memory for the next [`report::Report`].
    owners: Vec<RawFd>,
    /// The last look found lanes with bytes that cannot be read yet.
    unread_behind: bool,
    /// Endpoints whose receivers have given bytes back, or that have been reset, found out while the lock was held.
    returned: Vec<&'static Endpoint>,
    /// The kernel must be asked too: it knows how the peer has ended.
    must_ask: bool,
    /// Registrations whose lanes had no room for what the program wants to send.
    full: Vec<RawFd>,
    /// When those were last looked at.
    looked_at_full: u64,
    /// Threads asleep in the kernel on this instance.
    pub(crate) sleepers: u32,
    /// All of them look at the lanes by themselves, every [`DEGRADED_NANOS`] or a while later.
    sleeps_are_short: bool,
    /// Connections that this process has closed, and the kernel's set goes on reporting.
    ghosts: Vec<Ghost>,
    /// What has been read of such, to be let go of outside the lock.
    laid: Vec<Pin>,
    /// Memory for what the kernel has told of behind the doorbell.
    behind: Vec<epoll_event>,
    /// When the kernel was last asked for everything, by [`crate::base::order::now`]; and whether something of a lane waits until it is again.
    asked_all: u64,
    awaits_kernel: bool,
    /// It is its turn: see [`Inner::put_off_asking`].
    kernel_is_next: bool,
    /// When the kernel was last asked, and how often it was not asked since.
    pub(crate) asked_at: u64,
    pub(crate) unasked: u32,
}

struct Registration {
    /// What has this number in the kernel's set, also if that is another's by now.
    number: RawFd,
    /// How many had been made before.
    made: u64,
    /// Whose it is. `None`: a socket's that is not connected.
    owner: Option<EndpointRef>,
    events: u32,
    data: u64,
    /// Made with EPOLLEXCLUSIVE, of which the kernel's set has not been told: see [`registration::is_exclusive`].
    exclusive: bool,
    name: Name,
    held: Held,
    /// Whether there is room is the lane's to say, as far as the kernel's set has been told.
    sends_on_lane: bool,
    place: Place,
    /// Listed in [`Inner::full`].
    full: bool,
    answered: Answered,
    /// The link for whose marks it is counted in [`Inner::links`].
    watched: Option<&'static Link>,
    /// How much had arrived when that was last asked: only more is an edge.
    arrived: u64,
    /// Whatever the next look finds is an edge: it has been armed since the last, or waits for room.
    due: bool,
    /// How many bytes TCP had received when the kernel last told of an urgent one.
    urgent_at: u64,
    /// The kernel had something to tell of it when it was last asked: the lane's word is not all.
    beside: bool,
}

/// Tracks a new instance; beyond 65,536 of them, or the table, they stay unknown, and their sockets on TCP.
pub(crate) fn track(fd: RawFd) {
    if !table::has_place_for(fd) {
        return;
    }
    process::note_use();
    let index = {
        let mut free = FREE.lock();
        match free.0.pop() {
            Some(index) => index,
            None if (free.1 as usize) < MAX => {
                let index = free.1;
                let epoll = Epoll {
                    index,
                    generation: AtomicU32::new(0),
                    active: AtomicU32::new(0),
                    has_tokens: AtomicBool::new(false),
                    holders: Holders::default(),
                    inner: Lock::new(Inner::default()),
                };
                SLAB[index as usize].store(Box::into_raw(Box::new(epoll)), Release);
                free.1 += 1;
                index
            }
            None => return,
        }
    };
    // SAFETY: the slot was filled above or earlier, and instances are never freed.
    let Some(epoll) = (unsafe { SLAB[index as usize].load(Acquire).as_ref() }) else { return };
    let marker = marker_of(epoll);
    epoll.holders.begin(family::strays());
    *epoll.inner.lock() = Inner { fd, marker, ..Inner::default() };
    let name = EpollRef::new(index, epoll.generation.load(Acquire));
    table::replace(fd, Entry::Epoll(name));
}

/// The user data of the doorbell: an address of ours, which no program has a reason to use.
fn marker_of(epoll: &Epoll) -> u64 {
    std::ptr::from_ref(epoll) as u64 ^ 0xd00b_e110_0000_0001
}

fn all() -> impl Iterator<Item = &'static Epoll> {
    let made = FREE.lock().1 as usize;
    some(0, made)
}

fn some(first: usize, end: usize) -> impl Iterator<Item = &'static Epoll> {
    // SAFETY: instances are never freed.
    SLAB[first..end].iter().filter_map(|epoll| unsafe { epoll.load(Acquire).as_ref() })
}

/// A socket that has just connected may have been registered before. Says why one of the sets cannot have it on a lane.
pub(crate) fn adopt_registrations(endpoint: &Endpoint, fd: RawFd) -> Option<Reason> {
    let mut against = None;
    for epoll in all() {
        let mut inner = epoll.inner.lock();
        if let Some(one) = inner.registrations.get_mut(&fd).filter(|one| one.owner.is_none()) {
            one.owner = Some(endpoint.reference());
            endpoint.epolls.lock().push(epoll.name());
            let events = one.events;
            against = against.or(inner.objection(events));
        }
    }
    against
}

/// The number of a socket that is not connected is about to be closed, or such a socket ceases to be known. Whoever has it under
/// another number keeps it in the kernel's sets, as the program has registered it.
pub(crate) fn release(fd: RawFd) {
    for epoll in all() {
        let mut inner = epoll.inner.lock();
        if inner.registrations.contains_key(&fd) {
            inner.restore(fd);
            inner.forget(fd);
        }
    }
}

/// Attaches an endpoint in every set that has it; says why one of them cannot have it on a lane.
pub(crate) fn attach_everywhere(endpoint: &Endpoint) -> Option<Reason> {
    let refusals = sets_of(endpoint).into_iter().map(|epoll| epoll.inner.lock().attach(epoll, endpoint));
    refusals.fold(None, Option::or)
}

/// An endpoint has left its link but stays registered.
pub(crate) fn detach_everywhere(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().detach(epoll, endpoint);
    }
}

/// Every instance is the kernel's alone for now: another program may inherit it, and must not meet what is ours there, or
/// we leave it for good.
pub(crate) fn hide() {
    for epoll in all() {
        epoll.inner.lock().hide();
    }
}

/// Every instance is the kernel's alone from now on.
pub(crate) fn surrender() {
    for epoll in all() {
        epoll.inner.lock().surrender(epoll);
    }
}

/// An endpoint is being closed: the kernel has dropped its registrations.
pub(crate) fn forget_everywhere(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.detach(epoll, endpoint);
        for fd in inner.numbers_of(endpoint) {
            // The number may be in use again already: only what is this endpoint's goes.
            if inner.is_of(fd, endpoint) {
                inner.forget(fd);
            }
        }
    }
}

/// What the program has removed from its sets goes from the kernel's too: before the socket is shared or closed.
pub(crate) fn bury_everywhere(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.numbers_of(endpoint).for_each(|fd| inner.bury(epoll, fd));
    }
}

/// The waiter `slot` is about to be the one that is woken for the bytes of the endpoint. A set that the program has removed it from,
/// and that the kernel's set still has, makes way. No lock is held.
pub(crate) fn make_way(endpoint: &Endpoint, slot: Option<Slot>) {
    if endpoint.owner().is_some_and(|owner| slot != Some(owner)) {
        bury_everywhere(endpoint);
    }
}

/// Nobody may be woken for the bytes of the endpoint any more: a set that has looked for them by itself until now is from now on.
fn pass_marks_on(endpoint: &Endpoint) {
    if endpoint.is_attached() && endpoint.owner().is_none() {
        sets_of(endpoint).into_iter().any(|epoll| epoll.inner.lock().gain_marks(endpoint));
    }
}

/// The last descriptor is about to be closed, and something else happens to the socket first.
pub(crate) fn remove_everywhere(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        let inner = epoll.inner.lock();
        inner.numbers_of(endpoint).for_each(|fd| inner.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0));
    }
}

/// The last descriptor of this process is about to be closed, but another holds the socket: the kernel's sets go on reporting
/// it, and as the program has registered it.
pub(crate) fn leave_everywhere(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.numbers_of(endpoint).for_each(|fd| inner.leave(fd));
        inner.add_ghost(epoll, endpoint);
    }
}

/// The endpoint is about to go by another number, but its registrations by the ones that they have.
pub(crate) fn renumber_everywhere(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().note_number(endpoint.fd.load(Relaxed), endpoint);
    }
}

/// Whether a set has the endpoint by this number.
pub(crate) fn has_by_number(endpoint: &Endpoint, fd: RawFd) -> bool {
    sets_of(endpoint).into_iter().any(|epoll| epoll.inner.lock().has_by_number(fd, endpoint))
}

/// A number of the endpoint's is about to be closed, and the socket is not. The kernel's sets keep what is registered under that
/// number, and nobody can change it before the socket has the number again.
pub(crate) fn freeze_everywhere(endpoint: &Endpoint, fd: RawFd) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().freeze(epoll, fd, endpoint);
    }
}

/// The endpoint has another number, which may be one that it had before.
pub(crate) fn thaw_everywhere(endpoint: &Endpoint, fd: RawFd) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().thaw(epoll, fd, endpoint);
    }
}

/// Brings the kernel's sets up to date after a direction changed its road.
pub(crate) fn refresh(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().refresh(endpoint);
    }
}

/// A lane of `endpoint` has no room: whoever waits for some must find out if that stays so.
pub(crate) fn watch_for_space(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.numbers_of(endpoint).for_each(|fd| inner.watch_for_space(fd, endpoint));
    }
}

/// Nobody looks at `link` any more.
pub(crate) fn drop_link(link: &'static Link) {
    for epoll in all() {
        epoll.inner.lock().links.forget(link);
    }
}

/// The program has done something that makes TCP tell its waiters of one of `events` anew, for their edges.
pub(crate) fn tell_again(endpoint: &Endpoint, events: u32) {
    for epoll in sets_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.numbers_of(endpoint).for_each(|fd| inner.tell_again(fd, events));
    }
}

/// An urgent byte has been read on its own. Of its arrival the kernel tells nobody any more, who may have other bytes in a lane.
pub(crate) fn note_urgent_read(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().note_urgent_read(endpoint);
    }
}

/// Each set that has it, once: it is listed for each of its registrations.
fn sets_of(endpoint: &Endpoint) -> Vec<&'static Epoll> {
    let listed = endpoint.epolls.lock();
    let is_first = |(place, name): &(usize, &EpollRef)| !listed[..*place].contains(name);
    listed.iter().enumerate().filter(is_first).filter_map(|(_, name)| name.resolve()).collect()
}

/// Takes the locks of every instance, and what there is one of, while the process is copied: before those of endpoints.
pub(crate) fn hold_locks() {
    shared::TAKING_IN.hold();
    let mut held = 0;
    loop {
        // As in `endpoint::hold_locks`.
        FREE.hold();
        // SAFETY: taken above.
        let made = unsafe { FREE.value().1 } as usize;
        if made == held {
            return;
        }
        // SAFETY: taken above.
        unsafe { FREE.release() };
        some(held, made).for_each(|epoll| epoll.inner.hold());
        held = made;
    }
}

/// In both processes.
///
/// # Safety
/// After [`hold_locks`], on the same thread.
pub(crate) unsafe fn release_locks() {
    // SAFETY: the caller's promise.
    unsafe {
        some(0, FREE.value().1 as usize).for_each(|epoll| epoll.inner.release());
        FREE.release();
        shared::TAKING_IN.release();
    }
}

/// Frees the locks of every instance in a child that nobody announced.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn reset_locks() {
    // SAFETY: the caller's promise.
    unsafe {
        FREE.reset();
        shared::TAKING_IN.reset();
    }
    for epoll in all() {
        // SAFETY: the caller's promise.
        unsafe { epoll.inner.reset() };
    }
}

/// A forked child shares its parent's instances, but has no lanes.
pub(crate) fn after_fork_in_child() {
    for epoll in shared::in_use() {
        let mut inner = epoll.inner.lock();
        inner.begin_sharing(epoll);
        let Inner { registrations, answered, .. } = &mut *inner;
        for one in registrations.values_mut() {
            one.answered.lose_marks(answered);
            one.watched = None;
        }
        inner.bell = Bell::Nobody;
        inner.sleepers = 0;
        inner.links = Watched::default();
    }
    nested::forget_lamps();
    names::part_tokens();
}

impl Inner {
    /// The kernel's set.
    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }
}

impl Epoll {
    /// Whether calls must look here at all.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Acquire) != 0
    }

    /// Whether what the kernel reports must be [taken over](Inner::take_over).
    #[inline]
    pub(crate) fn must_translate(&self) -> bool {
        self.is_active() || self.has_tokens.load(Acquire)
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, Inner> {
        self.inner.lock()
    }

    /// Its name as long as it is open.
    pub(crate) fn name(&self) -> EpollRef {
        EpollRef::new(self.index, self.generation.load(Acquire))
    }

    /// It goes by another number from now on.
    pub(crate) fn renumber(&self, fd: RawFd) {
        self.inner.lock().fd = fd;
    }

    /// The last descriptor of the instance is closed.
    pub(crate) fn close(&self) {
        family::let_go(self);
        let mut inner = self.inner.lock();
        let slot = inner.slot();
        for registration in inner.registrations.values() {
            if let Some(endpoint) = registration.endpoint()
                && let Some(slot) = slot
            {
                endpoint.unclaim(slot);
            }
        }
        // A thread that sleeps on it, or has just been about to, goes on with what the program itself has put there, and hears
        // of the kernel alone.
        inner.hide();
        inner.take_bell_out(self);
        let watched: Vec<_> = match inner.sleepers {
            0 => Vec::new(),
            _ => inner.registrations.values().filter_map(Registration::endpoint).collect(),
        };
        let closed = std::mem::replace(&mut *inner, Inner { fd: -1, ..Inner::default() });
        drop(inner);
        drop(closed);
        if let Some(slot) = slot {
            slot.give_back();
        }
        self.active.store(0, Release);
        self.has_tokens.store(false, Release);
        self.generation.fetch_add(1, AcqRel);
        FREE.lock().0.push(self.index);
        watched
            .into_iter()
            .for_each(|endpoint| LEAVE.call((endpoint, Leaving::BarReading, Reason::EpollClosed)));
    }

    /// `epoll_ctl` for a TCP socket. Returns what the kernel does.
    ///
    /// # Safety
    /// `event` must be what the program passed to epoll_ctl.
    pub(crate) unsafe fn control(&self, operation: i32, fd: RawFd, event: *mut epoll_event) -> i32 {
        let endpoint = endpoint::behind(fd);
        let mut bar = None;
        let is_own = self.inner.lock().unshare(self);
        if operation == libc::EPOLL_CTL_ADD
            && let Some(endpoint) = endpoint.filter(|endpoint| endpoint.is_attached() && !is_own)
        {
            self.keep_off_lanes(endpoint);
        }
        if operation == libc::EPOLL_CTL_ADD
            && let Some(endpoint) = endpoint
        {
            let slot = self.inner.lock().slot();
            make_way(endpoint, slot);
        }
        let result = {
            let mut inner = self.inner.lock();
            if inner.shared {
                // SAFETY: the program's own call.
                let result = unsafe { real::epoll_ctl(inner.fd, operation, fd, event) };
                if result == 0 {
                    // SAFETY: the caller's promise.
                    unsafe { inner.note_control(self, operation, fd, endpoint, event) };
                }
                return result;
            }
            // SAFETY: the caller's promise.
            if let Some(errno) = unsafe { inner.shortcut(operation, fd, endpoint, event) } {
                errno::set(if errno == 0 { errno::get() } else { errno });
                return if errno == 0 { 0 } else { -1 };
            }
            inner.bury(self, fd);
            inner.reinstate(fd);
            let result = if operation == libc::EPOLL_CTL_DEL || event.is_null() {
                // SAFETY: the caller's promise.
                let result = unsafe { real::epoll_ctl(inner.fd, operation, fd, event) };
                if result == 0 {
                    inner.remove(self, fd);
                }
                result
            } else {
                // SAFETY: not null, and the program's promise to the kernel.
                let mut wanted = unsafe { std::ptr::read_unaligned(event) };
                // One that lanes do not answer for yet, though the endpoint may be on its way there, is the kernel's, as is one
                // that they never will.
                let known = inner.registrations.get(&fd).filter(|_| operation == libc::EPOLL_CTL_MOD);
                let exclusive = registration::is_exclusive(operation, wanted.events)
                    && (endpoint.is_some() || socket_acceptconn(borrow(fd)) == Ok(false));
                if exclusive {
                    wanted.events &= !EXCLUSIVE;
                } else if known.is_some_and(|one| one.exclusive) {
                    // With this the kernel refuses the change, as it does natively.
                    wanted.events |= EXCLUSIVE;
                }
                let objection = inner.objection(wanted.events);
                let is_ours = known.map_or(objection.is_none(), |one| one.answered.is_by_lanes());
                let answering = endpoint.filter(|_| is_ours);
                let passed = Passed {
                    events: registration::kernel_events(answering, wanted.events),
                    name: inner.name_for(self, operation, fd, endpoint, wanted.events),
                };
                let mut event = epoll_event { events: passed.events, u64: passed.name.in_set(wanted.u64) };
                // SAFETY: an event of our own.
                let result = unsafe { real::epoll_ctl(inner.fd, operation, fd, &mut event) };
                if result == 0 {
                    let events = passed.events;
                    bar = inner.put(self, operation, fd, endpoint, wanted, passed);
                    if let Some(one) = inner.registrations.get_mut(&fd).filter(|_| exclusive) {
                        one.exclusive = true;
                    }
                    if bar.is_some() && events != wanted.events {
                        // It is the kernel's to answer, all of it.
                        inner.change_kernel(libc::EPOLL_CTL_MOD, fd, wanted.events, event.u64);
                    }
                }
                result
            };
            if result != 0 {
                inner.withdraw(fd);
            }
            result
        };
        if let (Some(reason), Some(endpoint)) = (bar, endpoint::behind(fd)) {
            LEAVE.call((endpoint, Leaving::Bar, reason));
        }
        if operation == libc::EPOLL_CTL_DEL
            && result == 0
            && let Some(endpoint) = endpoint
        {
            pass_marks_on(endpoint);
        }
        result
    }

    /// The same of a set that has just been [taken in](take_in), which the kernel has done.
    ///
    /// # Safety
    /// As above.
    pub(crate) unsafe fn note_control(&self, operation: i32, fd: RawFd, event: *mut epoll_event) {
        let endpoint = endpoint::behind(fd);
        // SAFETY: the caller's promise.
        unsafe { self.inner.lock().note_control(self, operation, fd, endpoint, event) };
        if let Some(endpoint) = endpoint.filter(|_| operation == libc::EPOLL_CTL_ADD) {
            self.keep_off_lanes(endpoint);
        }
    }

    /// A connection comes into a set that is not this process's alone. Lanes wake nobody there, so whoever sleeps, and does not look
    /// by itself, is to be told by TCP of what lies in one.
    fn keep_off_lanes(&self, endpoint: &'static Endpoint) {
        let must_be_told = {
            let inner = self.inner.lock();
            inner.sleepers > 0 && !inner.sleeps_are_short
        };
        let how = if must_be_told { Leaving::GiveBackAtOnce } else { Leaving::GoBack };
        LEAVE.call((endpoint, how, Reason::Shared));
    }
}
