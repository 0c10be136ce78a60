//! Epoll instances: what is registered with each, and which lanes it must look at.
//!
//! Every registration is also in the kernel's set, which stays the authority for FIN, RST, errors and TCP's own
//! data. A registration whose endpoint is on a link is *attached*: its readability, and its writability once it sends
//! on a lane, are answered here. An instance without attached registrations costs nothing (L7).
//!
//! Locks: an instance's lock is taken before an endpoint's, never after.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};

use libc::epoll_event;
use shunt_abi::reason::Reason;

use crate::endpoint::{Endpoint, EndpointRef};
use crate::links::Link;
use crate::lock::{Guard, Lock};
use crate::table::{self, Entry};
use crate::waiter::Slot;
use crate::{attach, errno, real};

const MAX: usize = 65536;
/// Events that a lane can answer.
pub(crate) const IN: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
pub(crate) const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
const EDGE: u32 = libc::EPOLLET as u32;
const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
/// Reported whether asked for or not.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;

/// One epoll instance of this process.
pub(crate) struct Epoll {
    index: u32,
    generation: AtomicU32,
    /// Attached registrations, or a doorbell in the kernel's set: either way calls must look here.
    active: AtomicU32,
    inner: Lock<Inner>,
}

/// A name for an instance that notices when the slot has been used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EpollRef {
    index: u32,
    generation: u32,
}

impl EpollRef {
    /// As a number below 2^56.
    pub(crate) fn pack(self) -> u64 {
        u64::from(self.index) | u64::from(self.generation) << 24
    }

    pub(crate) fn unpack(word: u64) -> EpollRef {
        EpollRef { index: word as u32 & 0xff_ffff, generation: (word >> 24) as u32 }
    }

    #[inline]
    pub(crate) fn resolve(self) -> Option<&'static Epoll> {
        let epoll = SLAB.get(self.index as usize)?.load(Acquire);
        // SAFETY: instances are never freed.
        let epoll = unsafe { epoll.as_ref() }?;
        (epoll.generation.load(Acquire) == self.generation).then_some(epoll)
    }
}

static SLAB: [AtomicPtr<Epoll>; MAX] = [const { AtomicPtr::new(std::ptr::null_mut()) }; MAX];
static FREE: Lock<(Vec<u32>, u32)> = Lock::new((Vec::new(), 0));

/// What an instance keeps under its lock.
#[derive(Default)]
pub(crate) struct Inner {
    fd: RawFd,
    pub(crate) slot: Option<Slot>,
    marker: u64,
    nested: bool,
    registrations: HashMap<RawFd, Registration>,
    by_data: HashMap<u64, RawFd>,
    links: Vec<(&'static Link, u32)>,
    /// Descriptors to look at in the next wait: marked by a peer, newly armed, or level-triggered and ready.
    pending: VecDeque<RawFd>,
    /// Threads asleep in the kernel on this instance.
    pub(crate) sleepers: u32,
    /// Attached registrations that another waiter is woken for.
    secondary: u32,
    /// When the kernel was last asked, and how often it was not asked since.
    pub(crate) asked_at: u64,
    pub(crate) unasked: u32,
}

struct Registration {
    events: u32,
    data: u64,
    /// What the kernel's set holds. While attached that may be more than `events` wants, see [`Inner::shortcut`].
    kernel_events: u32,
    disarmed: bool,
    /// Removed by the program, but not yet from the kernel's set.
    deleted: bool,
    pending: bool,
    attached: Option<EndpointRef>,
    primary: bool,
}

/// Tracks a new instance; beyond 65,536 of them they stay unknown, and their sockets on TCP.
pub(crate) fn track(fd: RawFd) {
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
    *epoll.inner.lock() = Inner { fd, marker, ..Inner::default() };
    let name = EpollRef { index, generation: epoll.generation.load(Acquire) };
    table::replace(fd, Entry::Epoll(name));
}

/// The user data of the doorbell: an address of ours, which no program has a reason to use.
fn marker_of(epoll: &Epoll) -> u64 {
    std::ptr::from_ref(epoll) as u64 ^ 0xd00b_e110_0000_0001
}

fn all() -> impl Iterator<Item = &'static Epoll> {
    let made = FREE.lock().1 as usize;
    // SAFETY: instances are never freed.
    SLAB[..made].iter().filter_map(|epoll| unsafe { epoll.load(Acquire).as_ref() })
}

/// A socket that has just connected may have been registered before.
pub(crate) fn adopt_registrations(endpoint: &Endpoint, fd: RawFd) {
    for epoll in all() {
        if epoll.inner.lock().registrations.contains_key(&fd) {
            endpoint.epolls.lock().push(epoll.name());
        }
    }
}

/// Attaches an endpoint in every set that has it.
pub(crate) fn attach_everywhere(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().attach(epoll, endpoint);
    }
}

/// An endpoint has left its link but stays registered.
pub(crate) fn detach_everywhere(endpoint: &Endpoint, link: &'static Link) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().detach(epoll, endpoint, link);
    }
}

/// An endpoint is being closed: the kernel has dropped its registrations.
pub(crate) fn forget_everywhere(endpoint: &Endpoint, link: Option<&'static Link>) {
    let fd = endpoint.fd.load(Relaxed);
    for epoll in sets_of(endpoint) {
        let mut inner = epoll.inner.lock();
        if let Some(link) = link {
            inner.detach(epoll, endpoint, link);
        }
        // The number may be in use again already: only what is still this endpoint's goes.
        if inner.registrations.get(&fd).is_some_and(|registration| registration.attached.is_none())
            && table::endpoint(fd).is_none_or(|other| std::ptr::eq(other, endpoint))
        {
            inner.registrations.remove(&fd);
        }
    }
}

/// What the program has removed from its sets goes from the kernel's too: before the socket is shared or closed.
pub(crate) fn bury_everywhere(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().bury(epoll, endpoint.fd.load(Relaxed), Some(endpoint));
    }
}

/// Brings the kernel's sets up to date after a direction changed its road.
pub(crate) fn refresh(endpoint: &Endpoint) {
    for epoll in sets_of(endpoint) {
        epoll.inner.lock().refresh(endpoint);
    }
}

/// Nobody looks at `link` any more.
pub(crate) fn drop_link(link: &'static Link) {
    for epoll in all() {
        epoll.inner.lock().links.retain(|(other, _)| !std::ptr::eq(*other, link));
    }
}

fn sets_of(endpoint: &Endpoint) -> Vec<&'static Epoll> {
    endpoint.epolls.lock().iter().filter_map(|name| name.resolve()).collect()
}

/// A forked child shares its parent's instances, but has no lanes.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn after_fork_in_child() {
    // SAFETY: the caller's promise.
    unsafe { FREE.reset() };
    for epoll in all() {
        // SAFETY: the caller's promise.
        unsafe { epoll.inner.reset() };
        let mut inner = epoll.inner.lock();
        inner.slot = None;
        inner.sleepers = 0;
        inner.links.clear();
    }
}

impl Epoll {
    /// Whether calls must look here at all.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Acquire) != 0
    }

    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_, Inner> {
        self.inner.lock()
    }

    fn name(&self) -> EpollRef {
        EpollRef { index: self.index, generation: self.generation.load(Acquire) }
    }

    /// The last descriptor of the instance is closed.
    pub(crate) fn close(&self) {
        let mut inner = self.inner.lock();
        let slot = inner.slot.take();
        for registration in inner.registrations.values() {
            if let Some(endpoint) = registration.attached.and_then(EndpointRef::resolve)
                && let Some(slot) = slot
            {
                endpoint.unclaim(slot);
            }
        }
        *inner = Inner::default();
        drop(inner);
        if let Some(slot) = slot {
            slot.give_back();
        }
        self.active.store(0, Release);
        self.generation.fetch_add(1, AcqRel);
        FREE.lock().0.push(self.index);
    }

    /// The instance is itself watched: its sockets go back to TCP, and later ones never leave it.
    pub(crate) fn set_nested(&self) {
        let endpoints: Vec<_> = {
            let mut inner = self.inner.lock();
            if inner.nested {
                return;
            }
            inner.nested = true;
            inner.registrations.keys().filter_map(|fd| table::endpoint(*fd)).collect()
        };
        for endpoint in endpoints {
            attach::bar(endpoint, Reason::NestedEpoll);
        }
    }

    /// `epoll_ctl` for a TCP socket. Returns what the kernel does.
    ///
    /// # Safety
    /// `event` must be what the program passed to epoll_ctl.
    pub(crate) unsafe fn control(&self, operation: i32, fd: RawFd, event: *mut epoll_event) -> i32 {
        let endpoint = table::endpoint(fd);
        let mut bar = None;
        let result = {
            let mut inner = self.inner.lock();
            // SAFETY: the caller's promise.
            if let Some(errno) = unsafe { inner.shortcut(operation, fd, endpoint, event) } {
                errno::set(if errno == 0 { errno::get() } else { errno });
                return if errno == 0 { 0 } else { -1 };
            }
            inner.bury(self, fd, endpoint);
            if operation == libc::EPOLL_CTL_DEL || event.is_null() {
                // SAFETY: the caller's promise.
                let result = unsafe { real::epoll_ctl(inner.fd, operation, fd, event) };
                if result == 0 {
                    inner.remove(self, fd, endpoint);
                }
                result
            } else {
                // SAFETY: not null, and the program's promise to the kernel.
                let wanted = unsafe { std::ptr::read_unaligned(event) };
                let kernel_events = kernel_events(endpoint, wanted.events);
                let mut passed = epoll_event { events: kernel_events, u64: wanted.u64 };
                // SAFETY: an event of our own.
                let result = unsafe { real::epoll_ctl(inner.fd, operation, fd, &mut passed) };
                if result == 0 {
                    bar = inner.put(self, operation, fd, endpoint, wanted, kernel_events);
                }
                result
            }
        };
        if let (Some(reason), Some(endpoint)) = (bar, endpoint) {
            attach::bar(endpoint, reason);
        }
        result
    }
}

/// What the kernel's set must hold: TCP's send buffer is empty while a lane is used, so EPOLLOUT is ours then.
fn kernel_events(endpoint: Option<&Endpoint>, wanted: u32) -> u32 {
    match endpoint {
        Some(endpoint) if endpoint.is_attached() && endpoint.tx.lock().tx.on_lane() => wanted & !OUT,
        _ => wanted,
    }
}

impl Inner {
    /// `epoll_ctl` for a level-triggered registration of an attached socket, without the kernel where its set holds
    /// enough already. What it holds too much is taken out when it first reports it. `None`: not such a case; else
    /// an errno, or 0.
    ///
    /// # Safety
    /// `event` must be what the program passed to epoll_ctl.
    unsafe fn shortcut(
        &mut self,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        event: *mut epoll_event,
    ) -> Option<i32> {
        let registration = self.registrations.get_mut(&fd)?;
        let endpoint = endpoint?;
        let plain = |events: u32| events & (EDGE | ONE_SHOT | EXCLUSIVE) == 0;
        if registration.attached != Some(endpoint.reference()) || !plain(registration.events) {
            return None;
        }
        match operation {
            libc::EPOLL_CTL_DEL | libc::EPOLL_CTL_MOD if registration.deleted => return Some(libc::ENOENT),
            libc::EPOLL_CTL_ADD if !registration.deleted => return Some(libc::EEXIST),
            libc::EPOLL_CTL_DEL => {
                registration.deleted = true;
                return Some(0);
            }
            libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD if !event.is_null() => {}
            _ => return None,
        }
        // SAFETY: not null, and the program's promise to the kernel.
        let wanted = unsafe { std::ptr::read_unaligned(event) };
        let needed = kernel_events(Some(endpoint), wanted.events);
        if !plain(wanted.events)
            || wanted.u64 != registration.data
            || needed & !registration.kernel_events != 0
        {
            return None;
        }
        registration.events = wanted.events;
        registration.deleted = false;
        self.mark_pending(fd);
        Some(0)
    }

    /// Takes a registration out of the kernel's set that the program removed before.
    fn bury(&mut self, epoll: &Epoll, fd: RawFd, endpoint: Option<&Endpoint>) {
        if self.registrations.get(&fd).is_some_and(|registration| registration.deleted) {
            self.remove(epoll, fd, endpoint);
        }
    }

    fn put(
        &mut self,
        epoll: &Epoll,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        wanted: epoll_event,
        kernel_events: u32,
    ) -> Option<Reason> {
        if operation == libc::EPOLL_CTL_MOD
            && let Some(registration) = self.registrations.get_mut(&fd)
        {
            if registration.attached.is_some() && registration.data != wanted.u64 {
                self.by_data.remove(&registration.data);
                self.by_data.insert(wanted.u64, fd);
            }
            registration.events = wanted.events;
            registration.data = wanted.u64;
            registration.kernel_events = kernel_events;
            registration.disarmed = false;
            if registration.attached.is_some() {
                self.mark_pending(fd);
            }
            return None;
        }
        let registration = Registration {
            events: wanted.events,
            data: wanted.u64,
            kernel_events,
            disarmed: false,
            deleted: false,
            pending: false,
            attached: None,
            primary: false,
        };
        self.registrations.insert(fd, registration);
        let endpoint = endpoint?;
        endpoint.epolls.lock().push(epoll.name());
        if self.nested {
            return Some(Reason::NestedEpoll);
        }
        if wanted.events & EXCLUSIVE != 0 {
            return Some(Reason::ExclusiveEpoll);
        }
        if endpoint.fd.load(Relaxed) != fd {
            return Some(Reason::UnknownEpoll);
        }
        if endpoint.is_attached() {
            return self.attach(epoll, endpoint);
        }
        None
    }

    fn remove(&mut self, epoll: &Epoll, fd: RawFd, endpoint: Option<&Endpoint>) {
        if let Some(endpoint) = endpoint {
            let at = endpoint.rx.lock().at;
            if let Some(at) = at {
                self.detach(epoll, endpoint, at.link);
            }
            let name = epoll.name();
            endpoint.epolls.lock().retain(|other| *other != name);
        }
        self.registrations.remove(&fd);
    }

    /// From now on the registration of `endpoint` is answered here.
    fn attach(&mut self, epoll: &Epoll, endpoint: &Endpoint) -> Option<Reason> {
        let fd = endpoint.fd.load(Relaxed);
        let at = endpoint.rx.lock().at?;
        if self.registrations.get(&fd)?.attached.is_some() {
            return None;
        }
        let data = self.registrations.get(&fd)?.data;
        if self.by_data.contains_key(&data) || data == self.marker {
            // Two sockets with the same user data: an event of the kernel's could not be told apart.
            return Some(Reason::UnknownEpoll);
        }
        self.by_data.insert(data, fd);
        if self.slot.is_none() {
            self.slot = Slot::take();
        }
        let mut primary = false;
        if let Some(slot) = self.slot {
            slot.register();
            self.put_doorbell(epoll, slot);
            primary = endpoint.claim(slot) || endpoint.owner() == Some(slot);
            if primary {
                at.incoming().0.set_rx_waiter(Some(slot.0));
            }
        }
        if let Some(registration) = self.registrations.get_mut(&fd) {
            registration.attached = Some(endpoint.reference());
            registration.primary = primary;
        }
        self.secondary += u32::from(!primary);
        match self.links.iter_mut().find(|(link, _)| std::ptr::eq(*link, at.link)) {
            Some((_, uses)) => *uses += 1,
            None => self.links.push((at.link, 1)),
        }
        epoll.active.fetch_add(1, AcqRel);
        self.mark_pending(fd);
        self.refresh(endpoint);
        // Whoever sleeps on this instance went to sleep without looking at this lane.
        if let Some(slot) = self.slot {
            slot.ring();
        }
        None
    }

    fn detach(&mut self, epoll: &Epoll, endpoint: &Endpoint, link: &'static Link) {
        let fd = endpoint.fd.load(Relaxed);
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        if registration.attached != Some(endpoint.reference()) {
            return;
        }
        registration.attached = None;
        let (data, primary) = (registration.data, registration.primary);
        self.by_data.remove(&data);
        self.secondary -= u32::from(!primary);
        if primary && let Some(slot) = self.slot {
            endpoint.unclaim(slot);
        }
        if let Some(index) = self.links.iter().position(|(other, _)| std::ptr::eq(*other, link)) {
            self.links[index].1 -= 1;
            if self.links[index].1 == 0 {
                self.links.swap_remove(index);
            }
        }
        epoll.active.fetch_sub(1, AcqRel);
        self.settle(epoll, fd, endpoint);
    }

    /// Makes the kernel's set exactly what the program asked for.
    fn settle(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        if registration.deleted {
            self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
            self.registrations.remove(&fd);
            let name = epoll.name();
            endpoint.epolls.lock().retain(|other| *other != name);
        } else if registration.kernel_events != registration.events && !registration.disarmed {
            self.set_kernel_events(fd, endpoint);
        }
    }

    fn set_kernel_events(&mut self, fd: RawFd, endpoint: &Endpoint) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        registration.kernel_events = kernel_events(Some(endpoint), registration.events);
        let (events, data) = (registration.kernel_events, registration.data);
        self.change_kernel(libc::EPOLL_CTL_MOD, fd, events, data);
    }

    /// A change of our own to the kernel's set. If the registration has vanished it fails and changes nothing.
    fn change_kernel(&self, operation: i32, fd: RawFd, events: u32, data: u64) {
        let before = errno::get();
        let mut event = epoll_event { events, u64: data };
        // SAFETY: an event of our own.
        unsafe { real::epoll_ctl(self.fd, operation, fd, &mut event) };
        errno::set(before);
    }

    /// Puts the doorbell into the kernel's set, edge-triggered: it is never drained. The instance stays active
    /// afterwards, since the kernel will report the marker.
    fn put_doorbell(&mut self, epoll: &Epoll, slot: Slot) {
        let mut event = epoll_event { events: libc::EPOLLIN as u32 | EDGE, u64: self.marker };
        // SAFETY: an event of our own. Adding it twice fails with EEXIST, which is as good.
        let result = unsafe { real::epoll_ctl(self.fd, libc::EPOLL_CTL_ADD, slot.doorbell(), &mut event) };
        if result == 0 {
            epoll.active.fetch_add(1, AcqRel);
        }
    }

    fn refresh(&mut self, endpoint: &Endpoint) {
        let fd = endpoint.fd.load(Relaxed);
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        let wanted = kernel_events(Some(endpoint), registration.events);
        let enough = wanted & !registration.kernel_events == 0;
        let too_much = registration.kernel_events & OUT & !wanted != 0;
        if (enough && !too_much) || registration.disarmed || registration.deleted {
            return;
        }
        self.set_kernel_events(fd, endpoint);
        // What the kernel no longer answers, the next look must.
        self.mark_pending(fd);
    }

    fn mark_pending(&mut self, fd: RawFd) {
        if let Some(registration) = self.registrations.get_mut(&fd)
            && !registration.pending
        {
            registration.pending = true;
            self.pending.push_back(fd);
        }
    }

    /// Whether a look is worth while: cheap, for spinning and before a sleep.
    pub(crate) fn has_marks(&self) -> bool {
        let Some(slot) = self.slot else { return false };
        self.links.iter().any(|(link, _)| link.view().waiter(link.side, slot.0).peek_ready() != 0)
    }

    /// The lanes' answer: fills `events` with what is ready and returns how many.
    pub(crate) fn collect(&mut self, events: &mut [epoll_event]) -> usize {
        if let Some(slot) = self.slot {
            for index in 0..self.links.len() {
                let link = self.links[index].0;
                let mut marks = link.view().waiter(link.side, slot.0).take_ready();
                while marks != 0 {
                    let conn = marks.trailing_zeros() as usize;
                    marks &= marks - 1;
                    if let Some(endpoint) = link.endpoint(conn).and_then(EndpointRef::resolve) {
                        self.mark_pending(endpoint.fd.load(Relaxed));
                    }
                }
            }
        }
        self.look_at_pending(events)
    }

    /// Looks at everything attached, marked or not: for instances that nobody can wake.
    pub(crate) fn mark_all(&mut self) {
        let attached: Vec<RawFd> = self.by_data.values().copied().collect();
        attached.into_iter().for_each(|fd| self.mark_pending(fd));
    }

    fn look_at_pending(&mut self, events: &mut [epoll_event]) -> usize {
        let mut found = 0;
        for _ in 0..self.pending.len() {
            if found == events.len() {
                break;
            }
            let Some(fd) = self.pending.pop_front() else { break };
            let slot = self.slot;
            let Some(registration) = self.registrations.get_mut(&fd) else { continue };
            registration.pending = false;
            let Some(endpoint) = registration.attached.and_then(EndpointRef::resolve) else { continue };
            if registration.disarmed || registration.deleted {
                continue;
            }
            let reported = judge(endpoint, fd, registration.events, slot);
            if reported != 0 {
                events[found] = epoll_event { events: reported, u64: registration.data };
                found += 1;
                if registration.events & ONE_SHOT != 0 {
                    registration.disarmed = true;
                } else if registration.events & EDGE == 0 {
                    registration.pending = true;
                    self.pending.push_back(fd);
                }
            }
        }
        found
    }

    /// Takes the kernel's events in `events[..count]` over: drops the doorbell's, adds what lanes say to a socket's, and
    /// merges them with the `before` events that are in the array already. Returns the new number in all.
    pub(crate) fn take_over(&mut self, events: &mut [epoll_event], before: usize, count: usize) -> usize {
        let mut kept = before;
        for index in before..before + count {
            let mut event = events[index];
            let data = event.u64;
            if data == self.marker {
                continue;
            }
            let ours = self.by_data.get(&data).copied();
            if let Some(fd) = ours {
                // TCP may end here and the lane begin: the next look must not wait for another mark.
                self.mark_pending(fd);
            }
            if let Some(fd) = ours
                && let Some(registration) = self.registrations.get_mut(&fd)
                && let Some(endpoint) = registration.attached.and_then(EndpointRef::resolve)
            {
                if registration.disarmed {
                    continue;
                }
                if registration.deleted {
                    registration.kernel_events = 0;
                    self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
                    continue;
                }
                endpoint.rx.lock().rx.note_tcp_news();
                let mut reported = translate(endpoint, event.events);
                if attach::reset_if_lost(endpoint, fd) {
                    reported |= IN | OUT | ALWAYS | libc::EPOLLRDHUP as u32;
                }
                event.events = reported & (registration.events | ALWAYS);
                if event.events == 0 {
                    // The kernel's set holds more than is wanted, and would report it for ever.
                    self.set_kernel_events(fd, endpoint);
                    continue;
                }
                if let Some(same) = events[..before].iter_mut().find(|earlier| { earlier.u64 } == data) {
                    same.events |= event.events;
                    continue;
                }
                if registration.events & ONE_SHOT != 0 {
                    registration.disarmed = true;
                }
            }
            events[kept] = event;
            kept += 1;
        }
        kept
    }

    /// How long a sleep may last at most, beside what the program wants, and whether that is for want of a doorbell.
    pub(crate) fn patience(&mut self) -> Option<u64> {
        if self.by_data.is_empty() {
            return None;
        }
        let Some(slot) = self.slot.filter(|_| self.secondary == 0) else { return Some(DEGRADED_NANOS) };
        slot.register();
        let known = self.links.iter().all(|(link, _)| link.view().is_known(link.side.other(), slot.0));
        if !known {
            return Some(DEGRADED_NANOS);
        }
        let waits_for_space = self.by_data.values().any(|fd| {
            self.registrations.get(fd).is_some_and(|registration| {
                registration.events & OUT != 0
                    && !registration.disarmed
                    && registration
                        .attached
                        .and_then(EndpointRef::resolve)
                        .is_some_and(|endpoint| endpoint.tx.lock().full_since.is_some())
            })
        });
        waits_for_space.then_some(crate::ops::send::STALL_NANOS)
    }

    /// Announces a sleep on every link; the caller looks once more afterwards.
    pub(crate) fn announce_sleep(&mut self) {
        self.sleepers += 1;
        self.each_waiter(|waiter| waiter.announce_sleep());
    }

    /// The sleep is over. Others that still sleep must be woken for what comes.
    pub(crate) fn awake(&mut self) {
        self.sleepers -= 1;
        if self.sleepers == 0 {
            self.each_waiter(|waiter| waiter.awake());
        } else {
            self.each_waiter(|waiter| waiter.announce_sleep());
        }
    }

    fn each_waiter(&self, act: impl Fn(&shunt_ring::WaiterLine)) {
        if let Some(slot) = self.slot {
            for (link, _) in &self.links {
                act(link.view().waiter(link.side, slot.0));
            }
        }
    }

    /// Senders whose receiver does not read go back to TCP.
    pub(crate) fn stalled(&mut self) -> Vec<&'static Endpoint> {
        let attached = self.by_data.values().filter_map(|fd| self.registrations.get(fd)?.attached?.resolve());
        attached.filter(|endpoint| crate::ops::send::has_stalled(endpoint)).collect()
    }
}

/// The longest sleep of a waiter that its peers cannot wake.
pub(crate) const DEGRADED_NANOS: u64 = 1_000_000;

/// Which events the lanes of a registration answer with.
fn judge(endpoint: &Endpoint, fd: RawFd, wanted: u32, slot: Option<Slot>) -> u32 {
    let mut events = 0;
    if wanted & IN != 0 && crate::ops::receive::is_readable(endpoint, fd) {
        events |= IN;
    }
    if wanted & OUT != 0 && crate::ops::send::writability(endpoint, slot) == Some(true) {
        events |= OUT;
    }
    events & wanted
}

/// The kernel's events for an attached socket, with EPOLLOUT as the lane has it.
fn translate(endpoint: &Endpoint, events: u32) -> u32 {
    if events & OUT != 0 && endpoint.tx.lock().tx.on_lane() { events & !OUT } else { events }
}
