//! Attaching and detaching of registered sockets: when lanes, the kernel or both answer for a
//! registration.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use shunt_abi::reason::Reason;

use super::freezing::is_frozen;
use super::lane_events::arrived;
use super::names::new_token;
use super::registration::sends_on_lane;
use super::{EDGE, Epoll, Inner, ONE_SHOT, OUT, Registration};
use crate::base::code;
use crate::base::waiter::Slot;
use crate::socket::endpoint::Endpoint;
use crate::socket::links::Link;

impl Inner {
    /// Has lanes answer for the registrations of `endpoint` from now on.
    pub(super) fn attach(&mut self, epoll: &Epoll, endpoint: &Endpoint) -> Option<Reason> {
        self.attach_if(epoll, endpoint, |inner| inner.unshare(epoll))
    }

    /// Does the same in an instance that is this process's alone. It never reads what the instance
    /// holds, which `attach` does for one that may be shared.
    pub(super) fn attach_alone(&mut self, epoll: &Epoll, endpoint: &Endpoint) -> Option<Reason> {
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
        // Bytes that came earlier get their position by their stamp.
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
    pub(super) fn wake(&self) {
        if let Some(slot) = self.slot().filter(|_| self.sleeps.has_some()) {
            slot.ring();
        }
    }

    /// Has lanes answer for a registration that cannot stay on lanes. The connection falls back, so
    /// this lasts until its lane has been drained, and until then each wait checks it by itself.
    #[cold]
    #[inline(never)]
    pub(super) fn drain_here(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
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
    pub(super) fn begin_answering(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint, by_marks: bool) {
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
    pub(super) fn part(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) -> bool {
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
    pub(super) fn unclaim_unused(&self, endpoint: &Endpoint) {
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
    fn settle(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
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
    pub(super) fn note_sending_transport(&mut self, fd: RawFd, endpoint: Option<&Endpoint>) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        registration.sends_on_lane = !self.exposure.is_shared() && endpoint.is_some_and(sends_on_lane);
        let beside = registration.sends_on_lane || endpoint.is_some_and(Endpoint::has_shut_writing);
        let is_incomplete =
            beside && registration.answered.is_by_lanes() && registration.interest.events() & OUT != 0;
        self.queries.note_incomplete(is_incomplete);
    }
}

/// Removes the instance from the list of those that have the endpoint. Only once, as it may have
/// the endpoint by another fd too.
pub(super) fn unlist(epoll: &Epoll, endpoint: &Endpoint) {
    let name = epoll.name();
    let mut instances = endpoint.epolls.lock();
    if let Some(place) = instances.iter().position(|other| *other == name) {
        instances.remove(place);
    }
}

/// Returns whether the peer has marked the endpoint for the waiter `slot`, which has not taken the
/// mark yet.
pub(super) fn is_marked(endpoint: &Endpoint, slot: Slot) -> bool {
    let at = endpoint.rx.lock().at;
    at.is_some_and(|at| at.link.view().waiter(at.link.side, slot.0).is_marked(at.conn))
}
