//! Epoll instances: their registrations, and the lanes that each instance must check.
//!
//! Every registration is also in the interest list of the kernel's epoll instance, the *kernel's
//! list* for short. The kernel stays the authority for FIN, RST, errors and the data that TCP
//! carries. A registration whose endpoint is on a link is *attached*: the shim answers whether it
//! is readable, and, once it sends on a lane, whether it is writable. An instance without attached
//! registrations costs nothing (L7).
//!
//! A program may use the same user data for several descriptors, connections or not. So the
//! kernel's list holds a *token* of the shim in place of the user data of each registration that is
//! answered here. An event with a token belongs to the registration that has it. An EPOLLONESHOT
//! registration has a token from the beginning, since only its event shows that the kernel has
//! disarmed it.
//!
//! A peer *marks* a connection by setting its ready bit in the waiter of the instance. What
//! follows, with the functions that do it:
//!
//! ```text
//! sender                                 a thread in epoll_wait
//! publishes bytes in the lane
//! sets the connection's ready bit
//! rings the doorbell, if it sleeps --->  the kernel reports the doorbell
//!                                        take_marks: puts marked registrations into the queue
//!                                        look_at_pending: checks their lanes, adds their events
//!                                        take_over: adds the kernel's events
//! ```
//!
//! Locks: an instance's lock is taken before an endpoint's, never after.

mod answer;
mod answered;
mod attachment;
mod before_sleep;
mod closed_while_registered;
mod due;
mod duplicates;
mod exposure;
mod freezing;
mod kernel_interest;
mod kernel_list;
mod kernel_query;
mod lane_events;
mod listing;
mod names;
mod nested;
mod ready_queue;
mod records;
mod registration;
mod registrations;
mod report;
mod room;
mod shared;
mod sleep_bound;
mod sleeps;
#[cfg(test)]
mod tables;
mod wakeup;
mod watched;

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::*};

use libc::epoll_event;
use shunt_abi::reason::Reason;

use crate::base::lock::{Guard, Lock};
use crate::base::names::{EndpointRef, EpollRef};
use crate::base::private::{PrivateFd, borrow};
use crate::base::rank;
use crate::base::table::{self, Entry};
use crate::base::upcall::Upcall;
use crate::base::waiter::Slot;
use crate::base::{code, errno, process, real};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::links::Link;
use crate::socket::sharing::{self, Holders};
use answered::Answered;
use closed_while_registered::ClosedWhileRegistered;
use exposure::Exposure;
use kernel_interest::KernelInterest;
use kernel_list::KernelList;
use kernel_query::KernelQueries;
pub(crate) use kernel_query::{Checked, Choice};
use names::Name;
pub(crate) use nested::{has_level_proxies, show_lanes};
use ready_queue::{Position, ReadyQueue};
use registrations::Registrations;
use report::Memory;
pub(crate) use report::Report;
use room::RoomWaits;
pub(crate) use shared::{
    be_born, change_program, forget_child, hand_on, is_instance, is_shared, learn_of_running, list_unknown,
    pass_beyond, share, stay, take_in, take_in_of_running,
};
pub(crate) use sleep_bound::{DEGRADED_NANOS, SleepBound, until_known};
use sleeps::Sleeps;
use wakeup::Wakeup;
use watched::Watched;

const MAX: usize = 65536;
/// Events that a lane can answer.
pub(crate) const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
pub(crate) const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
const URGENT: u32 = libc::EPOLLPRI as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// The peer has finished sending.
const FINISHED: u32 = libc::EPOLLRDHUP as u32;
/// Reported whether asked for or not.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// How a connection leaves its lanes because of an instance that it is registered with.
#[derive(Clone, Copy)]
pub(crate) enum Leaving {
    GoBack,
    GiveBackAtOnce,
    Bar,
    BarReading,
}

/// Has a connection leave its lanes, for a reason. The caller must hold no lock.
pub(crate) static LEAVE: Upcall<(&'static Endpoint, Leaving, Reason)> = Upcall::new();

/// One epoll instance of this process.
pub(crate) struct Epoll {
    index: u32,
    generation: AtomicU32,
    /// Counts the reasons why calls must check this instance: attached registrations, a doorbell in
    /// the kernel's list, sharing with other processes, and sockets that were closed while
    /// registered.
    active: AtomicU32,
    /// The kernel's list holds tokens, or has held some.
    has_tokens: AtomicBool,
    /// The processes that have this instance.
    holders: Holders,
    inner: Lock<Inner, { rank::EPOLL }>,
}

impl EpollRef {
    /// Returns the instance, if this still is its name.
    #[inline]
    pub(crate) fn resolve(self) -> Option<&'static Epoll> {
        let epoll = SLAB.get(self.index() as usize)?.load(Acquire);
        // SAFETY: instances are never freed.
        let epoll = unsafe { epoll.as_ref() }?;
        (epoll.generation.load(Acquire) == self.generation()).then_some(epoll)
    }
}

/// Returns the epoll instance behind `fd`, if the shim tracks it.
#[inline]
pub(crate) fn behind(fd: RawFd) -> Option<&'static Epoll> {
    match table::look_up(fd) {
        Entry::Epoll(name) => name.resolve(),
        _ => None,
    }
}

static SLAB: [AtomicPtr<Epoll>; MAX] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX];
static FREE: Lock<(Vec<u32>, u32), { rank::EPOLL_LIST }> = Lock::new((Vec::new(), 0));

/// The state of an instance, under its lock.
#[derive(Default)]
pub(crate) struct Inner {
    list: KernelList,
    /// The waiter that lanes wake.
    wakeup: Wakeup,
    /// Other processes that have the instance, and whether it is watched or hidden: see [`shared`]
    /// and [`nested`].
    exposure: Exposure,
    registrations: Registrations,
    links: Watched,
    /// The doorbell has been rung since the links at rest were last checked.
    rung: bool,
    /// The ready queue: registrations that a peer has marked, that were newly armed, or that are
    /// level-triggered and ready.
    ready: ReadyQueue,
    /// Endpoints whose receivers have returned bytes, or that have been reset. They were found
    /// while the lock was held, and are handled outside it.
    returned: Vec<&'static Endpoint>,
    /// Registrations whose lanes have no room for the bytes that the program wants to send.
    room: RoomWaits,
    /// Threads that sleep in the kernel on this instance.
    sleeps: Sleeps,
    /// Threads that may still wait in the kernel since before `shunt attach` entered the program.
    /// No hook sees what the kernel reports to them.
    native_waits: Vec<i32>,
    /// Sockets that this process has closed, and that the kernel goes on reporting.
    closed: ClosedWhileRegistered,
    /// The kernel alone answers, for good, and there are no records: see [`end`].
    has_ended: bool,
    /// Memory of the last report, for the next one.
    memory: Memory,
    /// When waits query the kernel.
    pub(crate) queries: KernelQueries,
}

struct Registration {
    /// The fd in the kernel's list, even if that fd names another file by now.
    number: RawFd,
    /// How many registrations of the instance had been made before.
    made: u64,
    /// The connection. `None` for a socket that is not connected.
    owner: Option<EndpointRef>,
    events: u32,
    data: u64,
    /// Made with EPOLLEXCLUSIVE, without which the kernel's list has it: see
    /// `registration::is_exclusive`.
    exclusive: bool,
    name: Name,
    interest: KernelInterest,
    /// The lane answers whether there is room, and the events in the kernel's list have been chosen
    /// for that.
    sends_on_lane: bool,
    position: Position,
    /// Listed in [`Inner::room`].
    full: bool,
    answered: Answered,
    /// The link whose marks are checked for it: it is counted there in [`Inner::links`].
    watched: Option<&'static Link>,
    /// A measure of what had arrived at the last check: only more is an edge.
    arrived: u64,
    /// The next check reports whatever it finds as an edge: the registration was armed since the
    /// last one, or waits for room.
    due: bool,
    /// How many bytes TCP had received when the kernel last reported urgent data.
    urgent_at: u64,
    /// The kernel had an event for it when it was last queried, so the lane's answer is not
    /// complete.
    beside: bool,
}

/// Tracks a new instance. Beyond 65,536 instances, or beyond the table, they stay unknown and their
/// sockets on TCP.
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
    epoll.holders.begin(sharing::strays());
    *epoll.inner.lock() = Inner { list: KernelList { fd, marker }, ..Inner::default() };
    let name = EpollRef::new(index, epoll.generation.load(Acquire));
    table::replace(fd, Entry::Epoll(name));
}

/// Returns the user data of the doorbell: an address of the shim's, which no program has a reason
/// to use.
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

/// Assigns the registrations of a socket that has just connected, and was registered before, to its
/// endpoint. Returns why one of the instances cannot have it on a lane.
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

/// Forgets a socket that is not connected, whose fd is about to be closed or no longer tracked. If
/// another fd names the socket, the kernel goes on reporting it as the program registered it.
pub(crate) fn release(fd: RawFd) {
    for epoll in all() {
        let mut inner = epoll.inner.lock();
        if inner.registrations.contains_key(&fd) {
            inner.restore(fd);
            inner.forget(fd);
        }
    }
}

/// Attaches an endpoint in every instance that has it. Returns why one of them cannot have it on a
/// lane.
pub(crate) fn attach_everywhere(endpoint: &Endpoint) -> Option<Reason> {
    let refusals = instances_of(endpoint).into_iter().map(|epoll| epoll.inner.lock().attach(epoll, endpoint));
    refusals.fold(None, Option::or)
}

/// Detaches an endpoint that has left its link but stays registered.
pub(crate) fn detach_everywhere(endpoint: &Endpoint) {
    for epoll in instances_of(endpoint) {
        epoll.inner.lock().detach(epoll, endpoint);
    }
}

/// Removes the shim's doorbells and tokens from every kernel's list for now. Another program may
/// inherit the instances and must not find these there, or the shim steps aside for good.
pub(crate) fn hide() {
    for epoll in all() {
        epoll.inner.lock().hide();
    }
}

/// Ends the work for every instance, while threads may wait there: see `program/sandbox.rs`.
pub(crate) fn end() {
    for epoll in all() {
        epoll.inner.lock().end(epoll);
    }
}

/// Leaves every instance to the kernel alone from now on.
pub(crate) fn surrender() {
    for epoll in all() {
        epoll.inner.lock().surrender(epoll);
    }
}

/// Forgets an endpoint that is being closed, since the kernel has dropped its registrations.
pub(crate) fn forget_everywhere(endpoint: &Endpoint) {
    for epoll in instances_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.detach(epoll, endpoint);
        for fd in inner.registrations.numbers_of(endpoint) {
            // The fd may be in use again already, so only the endpoint's own registration is
            // removed.
            if inner.registrations.is_of(fd, endpoint) {
                inner.forget(fd);
            }
        }
    }
}

/// Removes registrations from the kernel's lists that the program has removed before. Called before
/// the socket is shared or closed.
pub(crate) fn bury_everywhere(endpoint: &Endpoint) {
    for epoll in instances_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.registrations.numbers_of(endpoint).for_each(|fd| inner.bury(epoll, fd));
    }
}

/// Makes way for the waiter `slot`, which the endpoint's bytes are to wake. An instance gives up
/// the endpoint's marks if the program has removed the endpoint from it, though not from the
/// kernel's list. The caller must hold no lock.
pub(crate) fn make_way(endpoint: &Endpoint, slot: Option<Slot>) {
    if endpoint.owner().is_some_and(|owner| slot != Some(owner)) {
        bury_everywhere(endpoint);
    }
}

/// Gives the endpoint's marks, which no waiter gets any more, to an instance that has checked it in
/// each wait until now.
fn pass_marks_on(endpoint: &Endpoint) {
    if endpoint.is_attached() && endpoint.owner().is_none() {
        instances_of(endpoint).into_iter().any(|epoll| epoll.inner.lock().gain_marks(endpoint));
    }
}

/// Removes an endpoint from every kernel's list. Its last descriptor is about to be closed, and the
/// shim does something else with the socket first.
pub(crate) fn remove_everywhere(endpoint: &Endpoint) {
    for epoll in instances_of(endpoint) {
        let inner = epoll.inner.lock();
        inner
            .registrations
            .numbers_of(endpoint)
            .for_each(|fd| _ = inner.list.change(libc::EPOLL_CTL_DEL, fd, 0, 0));
    }
}

/// Removes a socket, of which `fd` is the last descriptor, from the kernel's lists that have it by
/// descriptors that were closed before. The kernel finds such a registration only by its fd, so
/// a duplicate of the socket gets that fd for the moment. Returns `false` if the fd names another
/// file now.
#[cold]
pub(crate) fn remove_closed(fd: RawFd) -> bool {
    let Ok(file) = rustix::fs::fstat(borrow(fd)) else { return false };
    let mut are_removed = true;
    for epoll in all() {
        // Closed after the lock is released.
        let mut duplicates = Vec::new();
        let inner = epoll.inner.lock();
        if !inner.list.is_open() {
            continue;
        }
        let listed = listing::of(process::pid() as u32, inner.list.fd).unwrap_or_default();
        for one in listed.iter().filter(|one| one.inode == file.st_ino && one.fd != fd) {
            let duplicate = PrivateFd::duplicate_to(fd, one.fd);
            are_removed &= duplicate.is_some() && inner.list.change(libc::EPOLL_CTL_DEL, one.fd, 0, 0);
            duplicates.extend(duplicate);
        }
    }
    are_removed
}

/// Gives the kernel's lists the program's own registrations of an endpoint. Its last descriptor in
/// this process is about to be closed, but another process holds the socket, so the kernel goes on
/// reporting it.
pub(crate) fn leave_everywhere(endpoint: &Endpoint) {
    for epoll in instances_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.registrations.numbers_of(endpoint).for_each(|fd| inner.leave(fd));
        inner.closed.keep(epoll, endpoint);
    }
}

/// Prepares for the endpoint to use another fd, while its registrations keep theirs.
pub(crate) fn renumber_everywhere(endpoint: &Endpoint) {
    for epoll in instances_of(endpoint) {
        epoll.inner.lock().registrations.note_number(endpoint.fd(), endpoint);
    }
}

/// Returns whether an instance has the endpoint by this fd.
pub(crate) fn has_by_number(endpoint: &Endpoint, fd: RawFd) -> bool {
    instances_of(endpoint)
        .into_iter()
        .any(|epoll| epoll.inner.lock().registrations.has_by_number(fd, endpoint))
}

/// Freezes the registrations of an endpoint's fd that is about to be closed, while the socket is
/// not. The kernel's lists keep them, and no call can change them before the socket has that fd
/// again.
pub(crate) fn freeze_everywhere(endpoint: &Endpoint, fd: RawFd) {
    for epoll in instances_of(endpoint) {
        epoll.inner.lock().freeze(epoll, fd, endpoint);
    }
}

/// Thaws the registrations of an fd that the endpoint has again, if it had it before.
pub(crate) fn thaw_everywhere(endpoint: &Endpoint, fd: RawFd) {
    for epoll in instances_of(endpoint) {
        epoll.inner.lock().thaw(epoll, fd, endpoint);
    }
}

/// Updates the kernel's lists after a direction has changed its transport.
pub(crate) fn refresh(endpoint: &Endpoint) {
    for epoll in instances_of(endpoint) {
        epoll.inner.lock().refresh(endpoint);
    }
}

/// Notes that a lane of `endpoint` has no room. Instances that wait for room must find out whether
/// that lasts.
pub(crate) fn watch_for_space(endpoint: &Endpoint) {
    for epoll in instances_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.registrations.numbers_of(endpoint).for_each(|fd| inner.watch_for_space(fd, endpoint));
    }
}

/// Has every instance stop checking `link`.
pub(crate) fn drop_link(link: &'static Link) {
    for epoll in all() {
        epoll.inner.lock().links.forget(link);
    }
}

/// Has the next wait report `events` of an endpoint again, as an edge too. The program has done
/// something after which TCP notifies its waiters again.
pub(crate) fn tell_again(endpoint: &Endpoint, events: u32) {
    for epoll in instances_of(endpoint) {
        let mut inner = epoll.inner.lock();
        inner.registrations.numbers_of(endpoint).for_each(|fd| inner.tell_again(fd, events));
    }
}

/// Notes that an urgent byte has been read on its own. The kernel no longer reports its arrival, so
/// an edge-triggered registration would miss other bytes in a lane.
pub(crate) fn note_urgent_read(endpoint: &Endpoint) {
    for epoll in instances_of(endpoint) {
        epoll.inner.lock().note_urgent_read(endpoint);
    }
}

/// Returns each instance that has the endpoint, once. The endpoint lists an instance for each of
/// its registrations.
fn instances_of(endpoint: &Endpoint) -> Vec<&'static Epoll> {
    let listed = endpoint.epolls.lock();
    let is_first = |(place, name): &(usize, &EpollRef)| !listed[..*place].contains(name);
    listed.iter().enumerate().filter(is_first).filter_map(|(_, name)| name.resolve()).collect()
}

/// Takes the locks of every instance, and the global ones, while the process forks. They are taken
/// before those of endpoints.
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

/// Releases these locks, in both processes.
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

/// Frees the locks of every instance in a child whose fork no hook has seen.
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

/// Adjusts the instances in a forked child, which shares its parent's but has no lanes.
pub(crate) fn after_fork_in_child() {
    for epoll in shared::in_use() {
        let mut inner = epoll.inner.lock();
        inner.begin_sharing(epoll);
        let Registrations { records, answered, .. } = &mut inner.registrations;
        for one in records.values_mut() {
            one.answered.lose_marks(answered);
            one.watched = None;
        }
        inner.wakeup = Wakeup::NoWaiter;
        inner.sleeps.forget();
        inner.links = Watched::default();
    }
    nested::forget_level_proxies();
    names::part_tokens();
}

impl Epoll {
    /// Returns whether calls must check this instance at all.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Acquire) != 0
    }

    /// Returns whether the kernel's events must be [translated](Inner::take_over).
    #[inline]
    pub(crate) fn must_translate(&self) -> bool {
        self.is_active() || self.has_tokens.load(Acquire)
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, Inner, { rank::EPOLL }> {
        self.inner.lock()
    }

    /// Returns the instance's name, which is valid as long as it is open.
    pub(crate) fn name(&self) -> EpollRef {
        EpollRef::new(self.index, self.generation.load(Acquire))
    }

    /// Notes that the program calls the instance by this fd. Code that calls past the shim may have
    /// closed the one that was known, so the shim goes on by this one.
    #[inline]
    pub(crate) fn note_call_by(&self, fd: RawFd) {
        if code::may_have_bypassed() {
            self.renumber(fd);
        }
    }

    /// Changes the fd of the instance.
    #[cold]
    pub(crate) fn renumber(&self, fd: RawFd) {
        self.inner.lock().list.fd = fd;
    }

    /// Ends the instance, whose last descriptor is being closed.
    pub(crate) fn close(&self) {
        sharing::let_go(self);
        let mut inner = self.inner.lock();
        let slot = inner.slot();
        for registration in inner.registrations.values() {
            if let Some(endpoint) = registration.endpoint()
                && let Some(slot) = slot
            {
                endpoint.unclaim(slot);
            }
        }
        // A thread that sleeps on it, or is about to, goes on with the program's own registrations
        // and learns of the kernel's events alone.
        inner.hide();
        inner.unregister_wakeup(self);
        let watched: Vec<_> = match inner.sleeps.has_some() {
            false => Vec::new(),
            true => inner.registrations.values().filter_map(Registration::endpoint).collect(),
        };
        let list = KernelList { fd: -1, marker: 0 };
        let closed = std::mem::replace(&mut *inner, Inner { list, ..Inner::default() });
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

    /// Carries out `epoll_ctl` for a TCP socket, and returns what the kernel would return.
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
            if inner.has_ended() {
                // SAFETY: the program's own call.
                return unsafe { real::epoll_ctl(inner.list.fd, operation, fd, event) };
            }
            if inner.exposure.is_shared() {
                // SAFETY: the program's own call.
                let result = unsafe { real::epoll_ctl(inner.list.fd, operation, fd, event) };
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
            inner.register_again(fd);
            let result = if operation == libc::EPOLL_CTL_DEL || event.is_null() {
                // SAFETY: the caller's promise.
                let result = unsafe { real::epoll_ctl(inner.list.fd, operation, fd, event) };
                if result == 0 {
                    inner.remove(self, fd);
                }
                result
            } else {
                // SAFETY: not null, and the program's promise to the kernel.
                let wanted = unsafe { std::ptr::read_unaligned(event) };
                let (result, objection) = inner.add_or_change(self, operation, fd, endpoint, wanted);
                bar = objection;
                result
            };
            if result != 0 {
                inner.unregister(fd);
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

    /// Notes an `epoll_ctl` that the kernel has carried out on an instance which was just [taken
    /// in](take_in).
    ///
    /// # Safety
    /// As for [`control`](Self::control).
    pub(crate) unsafe fn note_control(&self, operation: i32, fd: RawFd, event: *mut epoll_event) {
        let endpoint = endpoint::behind(fd);
        {
            let mut inner = self.inner.lock();
            if inner.has_ended() {
                return;
            }
            // SAFETY: the caller's promise.
            unsafe { inner.note_control(self, operation, fd, endpoint, event) };
        }
        if let Some(endpoint) = endpoint.filter(|_| operation == libc::EPOLL_CTL_ADD) {
            self.keep_off_lanes(endpoint);
        }
    }

    /// Has a connection leave its lanes that is added to a shared instance, where lanes wake no
    /// thread. If a thread sleeps there and does not check the lanes by itself, TCP must bring it
    /// what they hold.
    fn keep_off_lanes(&self, endpoint: &'static Endpoint) {
        let must_be_woken = self.inner.lock().sleeps.has_long();
        let how = if must_be_woken { Leaving::GiveBackAtOnce } else { Leaving::GoBack };
        LEAVE.call((endpoint, how, Reason::Shared));
    }
}
