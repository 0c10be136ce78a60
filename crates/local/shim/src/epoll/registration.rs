//! epoll_ctl, and the effect of attaching on a registration: which of its events the kernel
//! answers, and which the lanes.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::epoll_event;
use rustix::net::sockopt::socket_acceptconn;
use shunt_abi::reason::Reason;
use shunt_transport::Kernel;

use super::answer::arrived;
use super::answered::Answered;
use super::kernel_interest::KernelInterest;
use super::kernel_list::change;
use super::names::{Name, new_token};
use super::ready_queue::{Position, ReadyQueue};
use super::registrations::Registrations;
use super::report::NOBODY;
use super::room::RoomWaits;
use super::shared::PRIVATE;
use super::{EDGE, EXCLUSIVE, Epoll, FINISHED, IN, Inner, ONE_SHOT, OUT, Registration, URGENT, listing};
use crate::base::code::{self, Code};
use crate::base::names::EndpointRef;
use crate::base::private::borrow;
use crate::base::waiter::Slot;
use crate::base::{order, process, real, table};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::links::Link;
use crate::socket::outgoing::{self, Room};
use crate::socket::tcp::Tcp;

/// Returns whether the registration under this key has had another fd, which has been closed: see
/// [`super::freeze_everywhere`].
pub(super) fn is_frozen(place: RawFd) -> bool {
    place < NOBODY
}

/// The registration that the kernel is given.
pub(super) struct Passed {
    pub(super) events: u32,
    pub(super) name: Name,
}

/// Returns the events that the kernel's list must have for a registration for the events `wanted`:
///
/// - EPOLLOUT is removed while this end sends on a lane, since TCP's send buffer is empty then and
///   the shim answers. Edge-triggered registrations keep it: a wake-up reports all events that
///   hold, and may have no other one, as for urgent data that has been passed over.
/// - EPOLLOUT is added to those once this end has shut down writing. There is always room then, so
///   the kernel reports the edges that TCP makes later, as when the peer acknowledges the FIN,
///   though only a lane has bytes.
/// - EPOLLPRI is added to those that ask for bytes, since urgent data is an edge for them, too.
/// - EPOLLRDHUP is added for the death of the peer: an error that need not be requested, and that
///   first shows as the end of the stream.
pub(super) fn kernel_events(endpoint: Option<&Endpoint>, wanted: u32) -> u32 {
    let Some(endpoint) = endpoint.filter(|endpoint| endpoint.is_attached()) else { return wanted };
    let urgent = if wanted & IN != 0 { URGENT } else { 0 };
    let held = match is_told_edges(wanted) {
        true if endpoint.has_shut_writing() => wanted | urgent | OUT,
        true => wanted | urgent,
        false if sends_on_lane(endpoint) => wanted & !OUT,
        false => wanted,
    };
    if endpoint.has_peer_finished() { held } else { held | FINISHED }
}

/// Returns whether a registration is added with EPOLLEXCLUSIVE in a way that the kernel allows.
///
/// When an event comes, the kernel then wakes at least one of the instances that have the file so.
/// For connections, and sockets that may become one, the shim wakes all of them, and the kernel's
/// list has the registration without the flag. With it, the kernel would refuse every change, and
/// lanes need changes. The program's own changes are still refused. A process that may make calls
/// past the shim has nothing on lanes, and the kernel must refuse the changes itself.
pub(super) fn is_exclusive(operation: i32, events: u32) -> bool {
    const ALLOWED: i32 = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP;
    let allowed = ALLOWED as u32 | EDGE | EXCLUSIVE;
    let is_allowed = operation == libc::EPOLL_CTL_ADD && events & EXCLUSIVE != 0 && events & !allowed == 0;
    is_allowed && code::state() != Code::MayBypass
}

/// Returns whether a lane, not TCP, answers whether there is room.
fn sends_on_lane(endpoint: &Endpoint) -> bool {
    endpoint.is_attached() && endpoint.tx.lock().tx.on_lane()
}

/// Returns whether a registration reports all events that hold whenever something happens: EPOLLET
/// without EPOLLONESHOT.
pub(super) fn is_told_edges(events: u32) -> bool {
    events & (EDGE | ONE_SHOT) == EDGE
}

impl Inner {
    /// Carries out `epoll_ctl` for a level-triggered registration of an attached socket without the
    /// kernel, if its list has enough events already. Surplus events are removed when the kernel
    /// first reports them. Returns `None` if this is not such a case; else an errno, or 0.
    ///
    /// # Safety
    /// `event` must be what the program passed to epoll_ctl.
    pub(super) unsafe fn shortcut(
        &mut self,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        event: *mut epoll_event,
    ) -> Option<i32> {
        // Surplus events in the kernel's list make a watched instance ready.
        if self.exposure.is_watched() {
            return None;
        }
        let registration = self.registrations.get_mut(&fd)?;
        let endpoint = endpoint?;
        let plain = |events: u32| events & (EDGE | ONE_SHOT | EXCLUSIVE) == 0;
        let is_plain = plain(registration.events) && !registration.exclusive;
        if registration.answered.by() != Some(endpoint.reference()) || !is_plain {
            return None;
        }
        if operation == libc::EPOLL_CTL_DEL {
            // Another instance may need the marks in place of this one.
            if endpoint.epolls.lock().len() > 1 {
                return None;
            }
            return Some(if registration.interest.delete() { 0 } else { libc::ENOENT });
        }
        if !matches!(operation, libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD) || event.is_null() {
            return None;
        }
        // SAFETY: not null, and the program's promise to the kernel.
        let wanted = unsafe { std::ptr::read_unaligned(event) };
        // The kernel reports first what is wrong with such flags.
        if !plain(wanted.events) {
            return None;
        }
        match operation {
            libc::EPOLL_CTL_MOD if registration.interest.is_deleted() => return Some(libc::ENOENT),
            libc::EPOLL_CTL_ADD if !registration.interest.is_deleted() => return Some(libc::EEXIST),
            _ => {}
        }
        if !registration.interest.arm_if_enough(kernel_events(Some(endpoint), wanted.events)) {
            return None;
        }
        registration.events = wanted.events;
        registration.data = wanted.u64;
        self.mark_due(fd);
        self.wake();
        Some(0)
    }

    /// Removes a registration from the kernel's list that the program has removed before.
    pub(super) fn bury(&mut self, epoll: &Epoll, fd: RawFd) {
        if self.registrations.get(&fd).is_some_and(|registration| registration.interest.is_deleted()) {
            self.remove(epoll, fd);
            self.list.change(libc::EPOLL_CTL_DEL, fd, 0, 0);
        }
    }

    /// Returns the name that the kernel's list is to have for a registration that is added or
    /// changed.
    pub(super) fn name_for(
        &mut self,
        epoll: &Epoll,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        events: u32,
    ) -> Name {
        let known = self.registrations.get(&fd).filter(|_| operation == libc::EPOLL_CTL_MOD);
        // An unseen wait may come, which would return a token.
        if !code::is_clean() {
            return Name::Given;
        }
        match known.map(|one| one.name) {
            Some(name @ Name::Token(_)) => return name,
            // Another registration may have its data by now.
            Some(Name::Unique(_)) => return new_token(epoll),
            Some(Name::Given) | None => {}
        }
        let answered = known.is_none() && endpoint.is_some_and(Endpoint::is_attached);
        match events & EXCLUSIVE == 0 && (answered || events & ONE_SHOT != 0 && code::is_clean()) {
            true => new_token(epoll),
            false => Name::Given,
        }
    }

    /// Carries out `epoll_ctl` that adds or changes a registration for the events `wanted`. Returns
    /// the kernel's result, and why the connection cannot be on a lane.
    pub(super) fn add_or_change(
        &mut self,
        epoll: &Epoll,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        mut wanted: epoll_event,
    ) -> (i32, Option<Reason>) {
        // The kernel answers for a registration that lanes do not answer for yet, even if
        // its endpoint is being attached, and for one that they never will.
        let known = self.registrations.get(&fd).filter(|_| operation == libc::EPOLL_CTL_MOD);
        let exclusive = is_exclusive(operation, wanted.events)
            && (endpoint.is_some() || socket_acceptconn(borrow(fd)) == Ok(false));
        if exclusive {
            wanted.events &= !EXCLUSIVE;
        } else if known.is_some_and(|one| one.exclusive) {
            // With this flag the kernel refuses the change, as it does without the shim.
            wanted.events |= EXCLUSIVE;
        }
        let objection = self.objection(wanted.events);
        let is_ours = known.map_or(objection.is_none(), |one| one.answered.is_by_lanes());
        let answering = endpoint.filter(|_| is_ours);
        let passed = Passed {
            events: kernel_events(answering, wanted.events),
            name: self.name_for(epoll, operation, fd, endpoint, wanted.events),
        };
        let mut event = epoll_event { events: passed.events, u64: passed.name.in_kernel(wanted.u64) };
        // SAFETY: an event of our own.
        let result = unsafe { real::epoll_ctl(self.list.fd, operation, fd, &mut event) };
        let mut bar = None;
        if result == 0 {
            let events = passed.events;
            bar = self.put(epoll, operation, fd, endpoint, wanted, passed);
            if let Some(one) = self.registrations.get_mut(&fd).filter(|_| exclusive) {
                one.exclusive = true;
            }
            if bar.is_some() && events != wanted.events {
                // The kernel answers for all of it.
                self.list.change(libc::EPOLL_CTL_MOD, fd, wanted.events, event.u64);
                if let Some(one) = self.registrations.get_mut(&fd) {
                    one.interest.set_events(wanted.events);
                }
            }
        }
        (result, bar)
    }

    /// Records a registration that the kernel has added or changed, and attaches it if its
    /// connection is on lanes. Returns why it cannot be on a lane.
    pub(super) fn put(
        &mut self,
        epoll: &Epoll,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        wanted: epoll_event,
        passed: Passed,
    ) -> Option<Reason> {
        if endpoint.is_none() {
            table::note_registered(fd);
        }
        // Another thread may have connected it since the caller's check. Either this load sees
        // that, or the thread that has connected it finds the registration.
        let endpoint = endpoint.or_else(|| endpoint::behind(fd));
        if operation == libc::EPOLL_CTL_MOD
            && let Some(registration) = self.registrations.records.get_mut(&fd)
        {
            registration.events = wanted.events;
            registration.data = wanted.u64;
            registration.interest.arm(passed.events);
            self.registrations.names.give(&mut registration.name, fd, passed.name);
            if registration.answered.is_by_lanes() {
                self.note_sending_transport(fd, endpoint);
                self.mark_due(fd);
                self.wake();
            }
            return None;
        }
        // Drops the record of a file that was closed unseen.
        self.remove(epoll, fd);
        let registration = |made, index| Registration {
            number: fd,
            made,
            owner: endpoint.map(Endpoint::reference),
            events: wanted.events,
            data: wanted.u64,
            exclusive: false,
            name: Name::Given,
            interest: KernelInterest::Armed(passed.events),
            sends_on_lane: false,
            position: Position::of(index),
            full: false,
            answered: Answered::Kernel,
            watched: None,
            arrived: 0,
            due: true,
            urgent_at: 0,
            beside: false,
        };
        self.registrations.insert(fd, registration);
        self.registrations.name(fd, passed.name);
        let endpoint = endpoint?;
        endpoint.epolls.lock().push(epoll.name());
        self.registrations.note_new(fd, endpoint);
        let objection = self.objection(wanted.events);
        if objection.is_some() {
            if endpoint.is_attached() {
                self.drain_here(epoll, fd, endpoint);
            }
            return objection;
        }
        if endpoint.is_attached() && self.exposure.is_shared() {
            // Lanes answer for the bytes that they still hold.
            self.begin_answering(epoll, fd, endpoint, false);
        } else if endpoint.is_attached() {
            let refusal = self.attach_alone(epoll, endpoint);
            if refusal.is_some() {
                self.drain_here(epoll, fd, endpoint);
            }
            self.queue_after_kernel(fd);
            return refusal;
        }
        None
    }

    /// Puts a new registration, whose bytes were there before it, behind all events that the kernel
    /// has by now.
    fn queue_after_kernel(&mut self, fd: RawFd) {
        if let Some(one) = self.registrations.get_mut(&fd) {
            one.position.follow_kernel(order::now());
        }
    }

    /// Returns why nothing that is registered here for these events can be on a lane.
    pub(super) fn objection(&self, events: u32) -> Option<Reason> {
        let exclusive = (events & EXCLUSIVE != 0).then_some(Reason::ExclusiveEpoll);
        self.exposure.is_watched().then_some(Reason::NestedEpoll).or(exclusive)
    }

    /// Removes the registration under this fd from the instance.
    pub(super) fn remove(&mut self, epoll: &Epoll, fd: RawFd) {
        let owner = self.registrations.get(&fd).and_then(|one| one.owner);
        if let Some(endpoint) = owner.and_then(EndpointRef::resolve) {
            self.part(epoll, fd, endpoint);
            unlist(epoll, endpoint);
        }
        self.forget(fd);
    }

    /// Forgets a registration that the kernel's list does not have any more.
    pub(super) fn forget(&mut self, fd: RawFd) {
        if let Some(one) = self.registrations.remove(fd) {
            self.ready.forget(&one.position, fd);
        }
    }

    /// Has lanes answer for the registrations of `endpoint` from now on.
    pub(super) fn attach(&mut self, epoll: &Epoll, endpoint: &Endpoint) -> Option<Reason> {
        self.attach_if(epoll, endpoint, |inner| inner.unshare(epoll))
    }

    /// Does the same in an instance that is this process's alone. It never reads what the instance
    /// holds, which `attach` does for one that may be shared.
    fn attach_alone(&mut self, epoll: &Epoll, endpoint: &Endpoint) -> Option<Reason> {
        debug_assert!(!self.exposure.is_shared());
        self.attach_if(epoll, endpoint, |_| true)
    }

    fn attach_if(
        &mut self,
        epoll: &Epoll,
        endpoint: &Endpoint,
        is_alone: impl Fn(&mut Inner) -> bool,
    ) -> Option<Reason> {
        let at = endpoint.rx.lock().at?;
        let mut refusal = None;
        for fd in self.registrations.numbers_of(endpoint) {
            refusal = refusal.or(match self.is_to_attach(fd) {
                Err(reason) => Some(reason),
                Ok(false) => None,
                Ok(true) if !is_alone(self) => Some(Reason::Shared),
                Ok(true) => self.attach_one(epoll, fd, endpoint, at.link),
            });
        }
        refusal
    }

    /// Returns whether lanes are to answer for a registration that the kernel answers for, or why
    /// they must not.
    fn is_to_attach(&self, fd: RawFd) -> Result<bool, Reason> {
        let Some(known) = self.registrations.get(&fd) else { return Ok(false) };
        if known.answered.is_by_lanes() || is_frozen(fd) {
            return Ok(false);
        }
        if let Some(reason) = self.objection(known.events) {
            return Err(reason);
        }
        // Only a token would show whether its one event has been reported. It gets one when the
        // program arms it again.
        if known.events & ONE_SHOT != 0 && !known.name.is_known() {
            return Err(Reason::NewCode);
        }
        // It would get a token, which a wait that no hook sees would return (L11). A connection
        // that has not left its lane yet can be registered in such a process.
        code::objection().filter(|_| !known.name.is_known()).map_or(Ok(true), Err)
    }

    fn attach_one(
        &mut self,
        epoll: &Epoll,
        fd: RawFd,
        endpoint: &Endpoint,
        link: &'static Link,
    ) -> Option<Reason> {
        let Some(slot) = self.take_slot(epoll) else { return Some(Reason::NoWaiter) };
        let by_marks = endpoint.wait_on_in_a_set(&endpoint.rx.lock(), slot) || endpoint.owner() == Some(slot);
        self.begin_answering(epoll, fd, endpoint, by_marks);
        self.watch(fd, link);
        if self.registrations.get(&fd).is_some_and(|registration| registration.name.is_known()) {
            self.refresh_one(fd, endpoint);
        } else {
            self.registrations.name(fd, new_token(epoll));
            self.set_kernel_events(fd, Some(endpoint));
        }
        // A thread that sleeps on this instance has not checked this lane before, and may not be
        // counted.
        slot.ring();
        None
    }

    /// Has the marks of a link checked from now on, for this registration.
    fn watch(&mut self, fd: RawFd, link: &'static Link) {
        if let Some(one) = self.registrations.get_mut(&fd).filter(|one| one.watched.is_none()) {
            one.watched = Some(link);
            self.links.add(link);
        }
    }

    /// Directs the marks of the connection to this instance, whose waits have checked it by
    /// themselves. Returns `false` if the marks go to another waiter, or could find no registration
    /// here.
    pub(super) fn gain_marks(&mut self, endpoint: &Endpoint) -> bool {
        let Some(slot) = self.slot().filter(|_| !self.exposure.is_shared() && !self.exposure.is_watched())
        else {
            return false;
        };
        let is_looked_for = |one: &Registration| {
            one.answered.by() == Some(endpoint.reference())
                && !one.answered.is_by_marks()
                && !one.interest.is_deleted()
                && self.objection(one.events).is_none()
        };
        let looked_for = self.registrations.numbers_of(endpoint).filter(|fd| !is_frozen(*fd));
        let fds: Vec<RawFd> =
            looked_for.filter(|fd| self.registrations.get(fd).is_some_and(is_looked_for)).collect();
        let at = endpoint.rx.lock().at;
        let Some(at) = at.filter(|_| !fds.is_empty()) else { return false };
        if !endpoint.wait_on_in_a_set(&endpoint.rx.lock(), slot) {
            return false;
        }
        fds.iter().for_each(|fd| self.watch(*fd, at.link));
        // What has come before this gets its position by its stamp.
        self.take_marks();
        for fd in fds {
            if let Some(one) = self.registrations.records.get_mut(&fd) {
                one.answered.gain_marks(&mut self.registrations.answered);
            }
            let has_some = self.has_unqueued_event(fd);
            self.queue_for_look(fd, has_some);
        }
        self.wake();
        true
    }

    /// Directs the marks of all connections here whose marks no waiter gets.
    pub(super) fn gain_all_marks(&mut self) {
        for fd in self
            .registrations
            .attached_where(|one, endpoint| !one.answered.is_by_marks() && endpoint.owner().is_none())
        {
            let endpoint = self.registrations.get(&fd).and_then(Registration::endpoint);
            if let Some(endpoint) = endpoint {
                self.gain_marks(endpoint);
            }
        }
    }

    /// Has the threads that sleep on this instance check again, since what the program asks for has
    /// changed.
    fn wake(&self) {
        if let Some(slot) = self.slot().filter(|_| self.sleeps.has_some()) {
            slot.ring();
        }
    }

    /// Has lanes answer for a registration that cannot stay on lanes. The connection falls back, so
    /// this lasts until its lane has been drained, and until then each wait checks it by itself.
    #[cold]
    #[inline(never)]
    fn drain_here(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        self.begin_answering(epoll, fd, endpoint, false);
        // As in `attach_one`. In a shared instance no thread can be woken.
        if !self.exposure.is_shared()
            && let Some(slot) = self.take_slot(epoll)
        {
            slot.ring();
        }
    }

    /// Has lanes answer for a registration from now on. `by_marks`: the marks of its connection go
    /// to this instance.
    fn begin_answering(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint, by_marks: bool) {
        let Some(registration) = self.registrations.records.get_mut(&fd) else { return };
        if !registration.answered.begin(endpoint.reference(), by_marks, &mut self.registrations.answered) {
            return;
        }
        registration.arrived = arrived(endpoint, self.exposure.is_shared());
        epoll.active.fetch_add(1, AcqRel);
        self.note_sending_transport(fd, Some(endpoint));
        self.mark_due(fd);
    }

    /// Has lanes answer for a registration no longer.
    fn end_answering(&mut self, epoll: &Epoll, fd: RawFd) {
        if let Some(registration) = self.registrations.records.get_mut(&fd)
            && registration.answered.end(&mut self.registrations.answered)
        {
            epoll.active.fetch_sub(1, AcqRel);
        }
    }

    /// Detaches the registrations of a connection that has left its lanes.
    pub(super) fn detach(&mut self, epoll: &Epoll, endpoint: &Endpoint) {
        for fd in self.registrations.numbers_of(endpoint) {
            if self.part(epoll, fd, endpoint) {
                self.settle(epoll, fd, endpoint);
            }
        }
        self.show_lanes(epoll);
    }

    /// Has lanes answer for a registration no longer, and stops checking its link. Returns `false`
    /// if lanes did not answer for it.
    fn part(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) -> bool {
        let owner = Some(endpoint.reference());
        let known = self.registrations.get_mut(&fd).filter(|one| one.answered.by() == owner);
        let Some(registration) = known else { return false };
        let was_by_marks = registration.answered.is_by_marks();
        let watched = registration.watched.take();
        self.end_answering(epoll, fd);
        watched.into_iter().for_each(|link| self.links.remove(link));
        if was_by_marks {
            self.unclaim_unused(endpoint);
        }
        true
    }

    /// Gives up the marks of a connection, unless they find another of its registrations here.
    fn unclaim_unused(&self, endpoint: &Endpoint) {
        let owner = Some(endpoint.reference());
        let is_found = |one: &Registration| one.answered.is_by_marks() && one.answered.by() == owner;
        let is_used = self
            .registrations
            .numbers_of(endpoint)
            .any(|fd| self.registrations.get(&fd).is_some_and(is_found));
        if let Some(slot) = self.slot().filter(|_| !is_used) {
            endpoint.unclaim(slot);
        }
    }

    /// Has the kernel's list hold all events that the program asked for. Surplus ones are removed
    /// when the kernel first reports them. In a watched instance that is done now, unless the
    /// registration is edge-triggered, for which the change is an edge. If a lane has made an edge
    /// that is not reported yet, that edge is wanted: the kernel must report it from now on.
    pub(super) fn settle(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        if registration.interest.is_deleted() || is_frozen(fd) {
            self.list.change(libc::EPOLL_CTL_DEL, fd, 0, 0);
            self.forget(fd);
            unlist(epoll, endpoint);
        } else if registration.interest.is_armed() && !self.exposure.is_shared() {
            let lacks_some = registration.events & !registration.interest.events() != 0;
            let is_to_look_anew = match registration.events & EDGE {
                0 => self.exposure.is_watched(),
                _ => registration.may_tell(endpoint, false),
            };
            if lacks_some || is_to_look_anew {
                self.set_kernel_events(fd, Some(endpoint));
            }
        }
    }

    /// Sets the events of a registration in the kernel's list to those that are needed there.
    pub(super) fn set_kernel_events(&mut self, fd: RawFd, endpoint: Option<&Endpoint>) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        let (events, data) = (registration.needed_of_kernel(endpoint), registration.kernel_data());
        registration.interest.set_events(events);
        self.list.change(libc::EPOLL_CTL_MOD, fd, events, data);
        self.note_sending_transport(fd, endpoint);
    }

    /// Notes which transport the direction uses after the kernel has been given a registration, and
    /// so checks it. If the kernel's list has EPOLLOUT while a lane is used, its event belongs into
    /// one report with the lane's.
    fn note_sending_transport(&mut self, fd: RawFd, endpoint: Option<&Endpoint>) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        registration.sends_on_lane = !self.exposure.is_shared() && endpoint.is_some_and(sends_on_lane);
        let beside = registration.sends_on_lane || endpoint.is_some_and(Endpoint::has_shut_writing);
        let is_incomplete =
            beside && registration.answered.is_by_lanes() && registration.interest.events() & OUT != 0;
        self.queries.note_incomplete(is_incomplete);
    }

    /// Removes the doorbell and the tokens from the kernel's list, and has the kernel check anew
    /// what lanes have answered until now.
    pub(super) fn hide(&mut self) {
        if self.slot().is_none() && self.registrations.names.are_none() {
            return;
        }
        self.exposure.hide_for_exec();
        for (&fd, one) in
            self.registrations.iter_mut().filter(|(_, one)| one.interest == KernelInterest::Unregistered)
        {
            one.mark_disarmed(self.list.fd, fd);
        }
        if let Some((fd, _)) = self.wakeup.in_kernel() {
            self.list.change(libc::EPOLL_CTL_DEL, fd, 0, 0);
        }
        self.for_tokens(|one| {
            (if one.interest.is_disarmed() { one.events & PRIVATE } else { one.events }, one.data)
        });
    }

    /// Leaves nothing of the shim's in the kernel's list from now on, since a call that no hook
    /// sees may wait there. Lanes answer only for bytes that they still hold and that cannot be
    /// returned.
    pub(super) fn surrender(&mut self, epoll: &Epoll) {
        if self.exposure.is_shared() {
            return;
        }
        self.bury_deleted(epoll);
        let Inner { registrations: Registrations { records, names, .. }, list, .. } = self;
        for (&fd, one) in records.iter_mut() {
            if one.surrender(list.fd, fd) {
                names.give(&mut one.name, fd, Name::Given);
            }
        }
        // If a lane still holds bytes, waits through libc check it by themselves.
        self.unregister_wakeup(epoll);
        if self.registrations.answered.is_none() {
            self.let_slot_go();
        }
    }

    /// Leaves the instance to the kernel for good, and drops all records.
    pub(super) fn end(&mut self, epoll: &Epoll) {
        self.surrender(epoll);
        self.hide();
        // The fast path of a wait checks this alone.
        self.exposure.hide_for_exec();
        self.has_ended = true;
        self.registrations = Registrations::default();
        self.ready = ReadyQueue::default();
        self.room = RoomWaits::default();
    }

    /// Returns whether the kernel alone answers, for good.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Puts the doorbell and the tokens back after an exec that has failed. Returns `false` if the
    /// kernel alone answers, for good.
    #[inline]
    pub(crate) fn show(&mut self) -> bool {
        !self.exposure.is_hidden_for_exec() || self.show_again()
    }

    #[cold]
    fn show_again(&mut self) -> bool {
        if self.has_ended {
            return false;
        }
        self.exposure.show_again();
        self.add_wakeup();
        self.for_tokens(|one| (one.interest.events(), one.kernel_data()));
        self.unregister_disarmed();
        true
    }

    /// Freezes the registration of an fd: see [`super::freeze_everywhere`]. Only the bytes that a
    /// lane still holds are answered here from now on.
    pub(super) fn freeze(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        if !self.registrations.is_of(fd, endpoint) {
            return;
        }
        self.bury(epoll, fd);
        self.restore(fd);
        let Some(one) = self.registrations.records.get_mut(&fd) else { return };
        if one.answered.is_by_lanes() {
            if one.answered.lose_marks(&mut self.registrations.answered).is_some() {
                self.unclaim_unused(endpoint);
            }
            self.registrations.note_number(fd, endpoint);
            let frozen = self.registrations.next_frozen();
            self.rename(fd, frozen);
        } else {
            self.forget(fd);
            unlist(epoll, endpoint);
        }
    }

    /// Thaws the registration of an fd: see [`super::thaw_everywhere`].
    pub(super) fn thaw(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        let owner = Some(endpoint.reference());
        let is_it = |place: &RawFd| {
            let one = self.registrations.get(place).filter(|_| is_frozen(*place));
            one.is_some_and(|one| one.number == fd && one.owner == owner)
        };
        let place = self.registrations.numbers_of(endpoint).find(is_it);
        if let Some(place) = place {
            self.rename(place, fd);
            let is_answered = |one: &Registration| one.answered.is_by_lanes() && one.interest.is_armed();
            if !self.exposure.is_shared() && self.registrations.get(&fd).is_some_and(is_answered) {
                self.registrations.name(fd, new_token(epoll));
                self.set_kernel_events(fd, Some(endpoint));
            }
        }
    }

    /// Has the kernel's list hold a registration as the program made it.
    pub(super) fn restore(&mut self, fd: RawFd) {
        let Some(one) = self.registrations.records.get_mut(&fd) else { return };
        let is_as_made = !one.name.is_token() && !one.exclusive && one.interest.events() == one.events;
        if self.exposure.is_shared() || is_as_made {
            return;
        }
        if one.interest.is_disarmed() {
            one.mark_disarmed(self.list.fd, fd);
        } else if one.give_to_kernel(self.list.fd, fd) {
            self.registrations.names.give(&mut one.name, fd, Name::Given);
            self.merge_by_data(&listing::of(process::pid() as u32, self.list.fd).unwrap_or_default());
        }
    }

    /// Files a registration under another fd.
    fn rename(&mut self, from: RawFd, to: RawFd) {
        if self.registrations.rename(from, to) {
            self.ready.rename(from, to);
            self.room.rename(from, to);
        }
    }

    /// Gives the kernel the program's own registration: see [`super::leave_everywhere`].
    pub(super) fn leave(&self, fd: RawFd) {
        // A change is an edge, so a registration that is as the program made it stays untouched.
        let is_ours = !self.exposure.is_shared() && !self.exposure.is_hidden_for_exec();
        let held = self.registrations.get(&fd).filter(|one| is_ours && one.name.is_known());
        if let Some(one) = held.filter(|one| one.interest.is_armed()) {
            self.list.change(libc::EPOLL_CTL_MOD, fd, one.events, one.data);
        }
    }

    /// Gives the registrations with a token other events and data in the kernel's list. A
    /// registration that the kernel has disarmed reports nothing before it gets its data anew, and
    /// is skipped. A shared instance is left as it is.
    fn for_tokens(&self, held: impl Fn(&Registration) -> (u32, u64)) {
        let shows = |one: &Registration| {
            one.name.is_token() && one.interest.may_report() && !self.exposure.is_shared()
        };
        for (&fd, one) in self.registrations.iter().filter(|(_, one)| shows(one)) {
            let (events, data) = held(one);
            self.list.change(libc::EPOLL_CTL_MOD, fd, events, data);
        }
    }

    /// Updates the kernel's list after a direction has changed its transport. Leaving a lane is an
    /// edge for registrations that had no room there, or whose last edge has not been reported. For
    /// others it is none: TCP may make an edge of the next send, as when the peer is gone, and
    /// nothing may wake them before that.
    pub(super) fn refresh(&mut self, endpoint: &Endpoint) {
        if self.exposure.is_shared() {
            return;
        }
        for fd in self.registrations.numbers_of(endpoint).filter(|fd| !is_frozen(*fd)) {
            self.refresh_one(fd, endpoint);
        }
    }

    fn refresh_one(&mut self, fd: RawFd, endpoint: &Endpoint) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        let wanted = registration.needed_of_kernel(Some(endpoint));
        let enough = wanted & !registration.interest.events() == 0;
        let too_much = registration.interest.events() & OUT & !wanted != 0;
        let was_on_lane = std::mem::replace(&mut registration.sends_on_lane, sends_on_lane(endpoint));
        // A program that waits for room has it in TCP now, and the kernel must report it anew.
        let has_left = was_on_lane
            && !registration.sends_on_lane
            && registration.events & OUT != 0
            && (registration.due
                || registration.full
                || registration.may_tell(endpoint, false)
                || endpoint.tx.lock().seen.backlog.is_waiting());
        if (enough && !too_much && !has_left) || !registration.interest.is_armed() {
            return;
        }
        self.set_kernel_events(fd, Some(endpoint));
        // The next check must answer for what the kernel no longer answers.
        self.mark_due(fd);
    }

    /// Has the next wait report the state of a registration.
    pub(super) fn mark_due(&mut self, fd: RawFd) {
        let slot = self.slot();
        let found_by_marks = self.registrations.get(&fd).filter(|one| one.answered.is_by_marks());
        let marked = found_by_marks.and_then(Registration::endpoint).zip(slot);
        let is_marked = marked.is_some_and(|(endpoint, slot)| is_marked(endpoint, slot));
        if let Some(registration) = self.registrations.get_mut(&fd) {
            registration.due = true;
        }
        // A marked registration gets its own position when the mark is taken.
        if is_marked {
            return;
        }
        let has_some = self.has_unqueued_event(fd);
        // What has come before this gets its position before it, even by a link at rest.
        self.rung |= has_some && self.links.has_some_at_rest();
        if self.rung || self.has_marks() {
            self.take_marks();
        }
        self.queue_for_look(fd, has_some);
    }

    /// Returns whether lanes have an event for a registration that is not `Queued` yet.
    pub(super) fn has_unqueued_event(&self, fd: RawFd) -> bool {
        let Some(registration) =
            self.registrations.get(&fd).filter(|one| !one.position.is_queued_with_event())
        else {
            return false;
        };
        registration.endpoint().is_some_and(|endpoint| registration.has_some(endpoint, self.slot()))
    }

    /// Queues a registration for the next wait. It is `Queued` if it `has_some`; else its first
    /// mark places it.
    pub(super) fn queue_for_look(&mut self, fd: RawFd, has_some: bool) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        match has_some {
            true => self.ready.enter_ready(&mut registration.position, fd, 0),
            false => self.ready.enter_idle(&mut registration.position, fd),
        }
    }

    /// Has the next wait report what is new.
    pub(super) fn mark_pending(&mut self, fd: RawFd) {
        if let Some(registration) = self.registrations.get_mut(&fd) {
            self.ready.enter(&mut registration.position, fd);
        }
    }

    /// Reports `events` of a registration again: see [`super::tell_again`].
    pub(super) fn tell_again(&mut self, fd: RawFd, events: u32) {
        if self
            .registrations
            .get(&fd)
            .is_some_and(|one| one.answered.is_by_lanes() && one.events & events != 0)
        {
            self.mark_due(fd);
            self.wake();
        }
    }

    /// Has unreported edges checked: see [`super::note_urgent_read`].
    pub(super) fn note_urgent_read(&mut self, endpoint: &Endpoint) {
        let received = (Tcp { endpoint, fd: endpoint.fd() }).received();
        let untold = self.registrations.attached_where(|one, other| {
            std::ptr::eq(other, endpoint) && is_told_edges(one.events) && one.urgent_at != received
        });
        untold.into_iter().for_each(|fd| self.mark_due(fd));
    }

    /// Notes a lane without room: see [`super::watch_for_space`]. Since the send found none, the
    /// peer may have made some, and another thread may have checked, for which that was no edge
    /// yet. Or the direction may have left its lane, and the kernel may have reported its room
    /// already.
    pub(super) fn watch_for_space(&mut self, fd: RawFd, endpoint: &Endpoint) {
        self.note_full(fd);
        let waits = |one: &Registration| {
            one.answered.is_by_lanes() && one.interest.is_armed() && one.events & OUT != 0
        };
        if !self.registrations.get(&fd).is_some_and(waits) {
            return;
        }
        match outgoing::room(endpoint, endpoint.owner()).0 {
            // The end of the return registers the connection again.
            Room::None | Room::Returning => {}
            Room::OfTcp if !self.exposure.is_shared() => self.set_kernel_events(fd, Some(endpoint)),
            _ => {
                self.mark_due(fd);
                self.wake();
            }
        }
    }

    /// Notes that a lane of this registration has no room.
    pub(super) fn note_full(&mut self, fd: RawFd) {
        if let Some(registration) = self.registrations.get_mut(&fd) {
            registration.due = true;
            if !std::mem::replace(&mut registration.full, true) {
                self.room.add(fd);
            }
        }
    }
}

/// Removes the instance from the list of those that have the endpoint. Only once, as it may have
/// the endpoint by another fd too.
fn unlist(epoll: &Epoll, endpoint: &Endpoint) {
    let name = epoll.name();
    let mut instances = endpoint.epolls.lock();
    if let Some(place) = instances.iter().position(|other| *other == name) {
        instances.remove(place);
    }
}

/// Returns whether the peer has marked the endpoint for the waiter `slot`, which has not taken the
/// mark yet.
fn is_marked(endpoint: &Endpoint, slot: Slot) -> bool {
    let at = endpoint.rx.lock().at;
    at.is_some_and(|at| at.link.view().waiter(at.link.side, slot.0).is_marked(at.conn))
}

impl Registration {
    /// Gives the kernel's list of `instance` the registration as the program made it. Returns
    /// `false` if it is not there.
    pub(super) fn give_to_kernel(&mut self, instance: RawFd, fd: RawFd) -> bool {
        let is_there = if self.exclusive {
            // A registration cannot be changed to EPOLLEXCLUSIVE, only added with it.
            self.exclusive = false;
            self.events |= EXCLUSIVE;
            change(instance, libc::EPOLL_CTL_DEL, fd, 0, 0)
                && change(instance, libc::EPOLL_CTL_ADD, fd, self.events, self.data)
        } else {
            change(instance, libc::EPOLL_CTL_MOD, fd, self.events, self.data)
        };
        if is_there {
            self.interest.set_events(self.events);
        }
        is_there
    }

    /// Leaves the registration to waits that no hook sees: the kernel's list of `instance` gets it
    /// as the program made it. Returns `false` if nothing was to be changed, or nothing could be.
    #[cold]
    #[inline(never)]
    fn surrender(&mut self, instance: RawFd, fd: RawFd) -> bool {
        let is_as_made = !self.name.is_token() && !self.exclusive && self.interest.events() == self.events;
        match self.interest {
            // The kernel has disarmed it, and reports nothing for it, not even an error.
            KernelInterest::KernelDisarmed => false,
            _ if is_as_made => false,
            interest if interest.is_disarmed() => {
                change(instance, libc::EPOLL_CTL_MOD, fd, self.events & PRIVATE, self.data)
            }
            _ => self.give_to_kernel(instance, fd),
        }
    }

    /// Returns the events that the kernel's list must have: exactly those that the program asked
    /// for, as long as lanes do not answer for the registration, even if its endpoint is on lanes
    /// already. The same holds without a token: the kernel's events are then reported unchanged.
    fn needed_of_kernel(&self, endpoint: Option<&Endpoint>) -> u32 {
        let is_ours = self.answered.is_by_lanes() && self.name.is_known();
        kernel_events(endpoint.filter(|_| is_ours), self.events)
    }

    /// Returns the connection whose lanes answer.
    pub(super) fn endpoint(&self) -> Option<&'static Endpoint> {
        self.answered.by().and_then(EndpointRef::resolve)
    }

    /// Returns the user data in the kernel's list.
    pub(super) fn kernel_data(&self) -> u64 {
        self.name.in_kernel(self.data)
    }
}
