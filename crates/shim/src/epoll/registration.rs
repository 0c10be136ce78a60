//! epoll_ctl, and what attaching does to a registration: which part of it the kernel's set answers, and which the lanes.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::epoll_event;
use shunt_abi::reason::Reason;
use shunt_transport::Kernel;

use super::answer::arrived;
use super::answered::Answered;
use super::duplicates::Numbers;
use super::held::Held;
use super::line::Place;
use super::names::{Name, new_token};
use super::report::NOBODY;
use super::shared::PRIVATE;
use super::{EDGE, EXCLUSIVE, Epoll, FINISHED, IN, Inner, ONE_SHOT, OUT, Registration, URGENT, listing};
use crate::base::code;
use crate::base::names::EndpointRef;
use crate::base::waiter::Slot;
use crate::base::{errno, order, process, real, table};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::links::Link;
use crate::socket::outgoing;
use crate::socket::tcp::Tcp;

/// Whether what is filed under this number has had another, which has been closed: see [`super::freeze_everywhere`].
pub(super) fn is_frozen(place: RawFd) -> bool {
    place < NOBODY
}

/// What the kernel is told of a registration.
pub(super) struct Passed {
    pub(super) events: u32,
    pub(super) name: Name,
}

/// What the kernel's set must hold: TCP's send buffer is empty while a lane is used, so EPOLLOUT is ours then, though it stays
/// where edges are told: whatever wakes such a registration reports all of its events that hold, and may be nothing else,
/// like urgent data that has been passed over. And the death of the peer, which is an error that nobody need ask for, is
/// first seen as the end of what it sends. Once this end has been shut down for writing there is always room: with EPOLLOUT
/// the kernel tells of the edges that TCP makes later, as when the peer acknowledges that, though only a lane has bytes. Urgent
/// data is an edge, too, to who has bytes to read.
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

/// Whether something is added with EPOLLEXCLUSIVE, as the kernel allows it: when something comes, at least one of the sets that have it so
/// wakes up. Of connections, or what may become one, all of them do here, and the kernel's set has it without: it would refuse every
/// change, also those that lanes need. The program's own it refuses as before.
pub(super) fn is_exclusive(operation: i32, events: u32) -> bool {
    const ALLOWED: i32 = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP;
    let allowed = ALLOWED as u32 | EDGE | EXCLUSIVE;
    operation == libc::EPOLL_CTL_ADD && events & EXCLUSIVE != 0 && events & !allowed == 0
}

/// Whether there is room is the lane's to say.
fn sends_on_lane(endpoint: &Endpoint) -> bool {
    endpoint.is_attached() && endpoint.tx.lock().tx.on_lane()
}

/// Whether a registration is told the same again and again, whenever something happens.
pub(super) fn is_told_edges(events: u32) -> bool {
    events & (EDGE | ONE_SHOT) == EDGE
}

impl Inner {
    /// `epoll_ctl` for a level-triggered registration of an attached socket, without the kernel where its set holds
    /// enough already. What it holds too much is taken out when it first reports it. `None`: not such a case; else
    /// an errno, or 0.
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
        // What such a set holds too much makes it ready.
        if self.nested {
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
            // Another set may need to be woken in place of this one.
            if endpoint.epolls.lock().len() > 1 {
                return None;
            }
            return Some(if registration.held.delete() { 0 } else { libc::ENOENT });
        }
        if !matches!(operation, libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD) || event.is_null() {
            return None;
        }
        // SAFETY: not null, and the program's promise to the kernel.
        let wanted = unsafe { std::ptr::read_unaligned(event) };
        // What is wrong with these, the kernel says first.
        if !plain(wanted.events) {
            return None;
        }
        match operation {
            libc::EPOLL_CTL_MOD if registration.held.is_deleted() => return Some(libc::ENOENT),
            libc::EPOLL_CTL_ADD if !registration.held.is_deleted() => return Some(libc::EEXIST),
            _ => {}
        }
        if !registration.held.is_enough_for(kernel_events(Some(endpoint), wanted.events)) {
            return None;
        }
        registration.events = wanted.events;
        registration.data = wanted.u64;
        self.mark_due(fd);
        self.wake();
        Some(0)
    }

    /// Takes a registration out of the kernel's set that the program removed before.
    pub(super) fn bury(&mut self, epoll: &Epoll, fd: RawFd) {
        if self.registrations.get(&fd).is_some_and(|registration| registration.held.is_deleted()) {
            self.remove(epoll, fd);
            self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
        }
    }

    /// The numbers by which an endpoint is registered here, if it is.
    pub(super) fn numbers_of(&self, endpoint: &Endpoint) -> Numbers {
        self.duplicates.numbers(endpoint.reference(), endpoint.fd.load(Relaxed))
    }

    /// Whether what is filed under this number is a registration of the endpoint's.
    pub(super) fn is_of(&self, fd: RawFd, endpoint: &Endpoint) -> bool {
        self.registrations.get(&fd).is_some_and(|one| one.owner == Some(endpoint.reference()))
    }

    /// Whether the program has it registered by this number.
    pub(super) fn has_by_number(&self, fd: RawFd, endpoint: &Endpoint) -> bool {
        self.is_of(fd, endpoint) && self.registrations.get(&fd).is_some_and(|one| !one.held.is_deleted())
    }

    /// Keeps a number of the endpoint's among its [`Duplicates`](super::duplicates), if it is registered by that.
    pub(super) fn note_number(&mut self, fd: RawFd, endpoint: &Endpoint) {
        if self.is_of(fd, endpoint)
            && let Some(one) = self.registrations.get(&fd)
        {
            self.duplicates.note(endpoint.reference(), one.made, fd);
        }
    }

    /// A registration has come. Where the endpoint has others than by its own number, all of them are kept.
    fn note_new(&mut self, fd: RawFd, endpoint: &Endpoint) {
        let own = endpoint.fd.load(Relaxed);
        if fd != own || self.duplicates.has(endpoint.reference()) {
            self.note_number(own, endpoint);
            self.note_number(fd, endpoint);
        }
    }

    /// The name by which the kernel's set is to have a registration that is made or changed.
    pub(super) fn name_for(
        &mut self,
        epoll: &Epoll,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        events: u32,
    ) -> Name {
        let known = self.registrations.get(&fd).filter(|_| operation == libc::EPOLL_CTL_MOD);
        // An unseen wait may come that would be told of a token.
        if !code::is_clean() {
            return Name::Given;
        }
        match known.map(|one| one.name) {
            Some(name @ Name::Token(_)) => return name,
            // Its data may be another's by now.
            Some(Name::Unique(_)) => return new_token(epoll),
            Some(Name::Given) | None => {}
        }
        let answered = known.is_none() && endpoint.is_some_and(Endpoint::is_attached);
        match events & EXCLUSIVE == 0 && (answered || events & ONE_SHOT != 0 && code::is_clean()) {
            true => new_token(epoll),
            false => Name::Given,
        }
    }

    /// The kernel's set has a registration by another name from now on.
    pub(super) fn name(&mut self, fd: RawFd, name: Name) {
        if let Some(registration) = self.registrations.get_mut(&fd) {
            self.names.give(&mut registration.name, fd, name);
        }
    }

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
        // It may have been connected since the caller looked, by another thread. Either this sees that, or whoever has connected
        // it finds the registration.
        let endpoint = endpoint.or_else(|| endpoint::behind(fd));
        if operation == libc::EPOLL_CTL_MOD
            && let Some(registration) = self.registrations.get_mut(&fd)
        {
            registration.events = wanted.events;
            registration.data = wanted.u64;
            registration.held.arm(passed.events);
            self.names.give(&mut registration.name, fd, passed.name);
            if registration.answered.is_by_lanes() {
                self.note_sending_road(fd, endpoint);
                self.mark_due(fd);
                self.wake();
            }
            return None;
        }
        // What has been closed where nobody saw it.
        self.remove(epoll, fd);
        let made = self.made;
        self.made += 1;
        let registration = |index| Registration {
            number: fd,
            made,
            owner: endpoint.map(Endpoint::reference),
            events: wanted.events,
            data: wanted.u64,
            exclusive: false,
            name: Name::Given,
            held: Held::Armed(passed.events),
            sends_on_lane: false,
            place: Place::of(index),
            full: false,
            answered: Answered::Kernel,
            watched: None,
            arrived: 0,
            due: true,
            urgent_at: 0,
            beside: false,
        };
        self.registrations.insert(fd, registration);
        self.name(fd, passed.name);
        let endpoint = endpoint?;
        endpoint.epolls.lock().push(epoll.name());
        self.note_new(fd, endpoint);
        let objection = self.objection(wanted.events);
        if objection.is_some() {
            if endpoint.is_attached() {
                self.drain_here(epoll, fd, endpoint);
            }
            return objection;
        }
        if endpoint.is_attached() && self.shared {
            // What its lane still holds.
            self.begin_answering(epoll, fd, endpoint, false);
        } else if endpoint.is_attached() {
            let refusal = self.attach(epoll, endpoint);
            self.place_behind_kernel(fd);
            return refusal;
        }
        None
    }

    /// What was there before a registration comes behind all that the kernel has to tell of by now.
    fn place_behind_kernel(&mut self, fd: RawFd) {
        if let Some(one) = self.registrations.get_mut(&fd) {
            one.place.stand_behind(order::now());
        }
    }

    /// Why nothing that is registered here for these events can be on a lane.
    pub(super) fn objection(&self, events: u32) -> Option<Reason> {
        let exclusive = (events & EXCLUSIVE != 0).then_some(Reason::ExclusiveEpoll);
        self.nested.then_some(Reason::NestedEpoll).or(exclusive)
    }

    /// What is filed under this number is in the set no more.
    pub(super) fn remove(&mut self, epoll: &Epoll, fd: RawFd) {
        let owner = self.registrations.get(&fd).and_then(|one| one.owner);
        if let Some(endpoint) = owner.and_then(EndpointRef::resolve) {
            self.part(epoll, fd, endpoint);
            unlist(epoll, endpoint);
        }
        self.forget(fd);
    }

    /// The kernel's set does not have it any more.
    pub(super) fn forget(&mut self, fd: RawFd) {
        if let Some(one) = self.registrations.remove(&fd) {
            self.names.forget(one.name, fd);
            self.line.forget(&one.place, fd);
            one.owner.into_iter().for_each(|owner| self.duplicates.forget(owner, fd));
        }
    }

    /// From now on the registrations of `endpoint` are answered here.
    pub(super) fn attach(&mut self, epoll: &Epoll, endpoint: &Endpoint) -> Option<Reason> {
        let at = endpoint.rx.lock().at?;
        let mut refusal = None;
        for fd in self.numbers_of(endpoint) {
            refusal = refusal.or(self.attach_one(epoll, fd, endpoint, at.link));
        }
        refusal
    }

    fn attach_one(
        &mut self,
        epoll: &Epoll,
        fd: RawFd,
        endpoint: &Endpoint,
        link: &'static Link,
    ) -> Option<Reason> {
        let known = self.registrations.get(&fd)?;
        if known.answered.is_by_lanes() || is_frozen(fd) {
            return None;
        }
        if let Some(reason) = self.objection(known.events) {
            return Some(reason);
        }
        // Whether its one event has been told, only a token would say. It gets one when the program arms it anew.
        if known.events & ONE_SHOT != 0 && !known.name.is_known() {
            return Some(Reason::NewCode);
        }
        if !self.unshare(epoll) {
            return Some(Reason::Shared);
        }
        let Some(slot) = self.take_slot(epoll) else { return Some(Reason::NoWaiter) };
        let by_marks = endpoint.wait_on_in_a_set(&endpoint.rx.lock(), slot) || endpoint.owner() == Some(slot);
        self.begin_answering(epoll, fd, endpoint, by_marks);
        self.watch(fd, link);
        if self.registrations.get(&fd).is_some_and(|registration| registration.name.is_known()) {
            self.refresh_one(fd, endpoint);
        } else {
            self.name(fd, new_token(epoll));
            self.set_kernel_events(fd, Some(endpoint));
        }
        // Whoever sleeps on this instance went to sleep without looking at this lane, and may not be counted.
        slot.ring();
        None
    }

    /// Looks for the marks of a link from now on, for this registration.
    fn watch(&mut self, fd: RawFd, link: &'static Link) {
        if let Some(one) = self.registrations.get_mut(&fd).filter(|one| one.watched.is_none()) {
            one.watched = Some(link);
            self.links.add(link);
        }
    }

    /// The marks of the connection come to this set from now on, which has looked for its bytes by itself. `false`: they go to another
    /// waiter, or it is none that they could find here.
    pub(super) fn gain_marks(&mut self, endpoint: &Endpoint) -> bool {
        let Some(slot) = self.slot().filter(|_| !self.shared && !self.nested) else { return false };
        let is_looked_for = |one: &Registration| {
            one.answered.by() == Some(endpoint.reference())
                && !one.answered.is_by_marks()
                && !one.held.is_deleted()
                && self.objection(one.events).is_none()
        };
        let looked_for = self.numbers_of(endpoint).filter(|fd| !is_frozen(*fd));
        let fds: Vec<RawFd> =
            looked_for.filter(|fd| self.registrations.get(fd).is_some_and(is_looked_for)).collect();
        let at = endpoint.rx.lock().at;
        let Some(at) = at.filter(|_| !fds.is_empty()) else { return false };
        if !endpoint.wait_on_in_a_set(&endpoint.rx.lock(), slot) {
            return false;
        }
        fds.iter().for_each(|fd| self.watch(*fd, at.link));
        // What has come before this has its place by its stamp.
        self.take_marks();
        for fd in fds {
            if let Some(one) = self.registrations.get_mut(&fd) {
                one.answered.gain_marks(&mut self.answered);
            }
            let has_some = self.lacks_place_for_some(fd);
            self.queue_for_look(fd, has_some);
        }
        self.wake();
        true
    }

    /// The same of all whose marks nobody has.
    pub(super) fn gain_all_marks(&mut self) {
        for fd in
            self.attached_where(|one, endpoint| !one.answered.is_by_marks() && endpoint.owner().is_none())
        {
            let endpoint = self.registrations.get(&fd).and_then(Registration::endpoint);
            if let Some(endpoint) = endpoint {
                self.gain_marks(endpoint);
            }
        }
    }

    /// Whoever sleeps on this instance looks again: what the program asks for has changed.
    fn wake(&self) {
        if let Some(slot) = self.slot().filter(|_| self.sleepers > 0) {
            slot.ring();
        }
    }

    /// A registration that cannot stay on lanes. The connection goes back, so this lasts until its lane has been drained, and as long a wait
    /// looks there by itself.
    fn drain_here(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        self.begin_answering(epoll, fd, endpoint, false);
        // See `attach_one`. In a shared set nobody can be woken.
        if !self.shared
            && let Some(slot) = self.take_slot(epoll)
        {
            slot.ring();
        }
    }

    /// Lanes answer for a registration from now on. `by_marks`: the marks of its connection go to this set.
    fn begin_answering(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint, by_marks: bool) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        if !registration.answered.begin(endpoint.reference(), by_marks, &mut self.answered) {
            return;
        }
        registration.arrived = arrived(endpoint, self.shared);
        epoll.active.fetch_add(1, AcqRel);
        self.note_sending_road(fd, Some(endpoint));
        self.mark_due(fd);
    }

    /// Undoes that.
    fn end_answering(&mut self, epoll: &Epoll, fd: RawFd) {
        if let Some(registration) = self.registrations.get_mut(&fd)
            && registration.answered.end(&mut self.answered)
        {
            epoll.active.fetch_sub(1, AcqRel);
        }
    }

    /// The connection has left its lanes.
    pub(super) fn detach(&mut self, epoll: &Epoll, endpoint: &Endpoint) {
        for fd in self.numbers_of(endpoint) {
            if self.part(epoll, fd, endpoint) {
                self.settle(epoll, fd, endpoint);
            }
        }
        self.show_lanes(epoll);
    }

    /// Lanes answer for a registration no more. `false` if they did not.
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

    /// Marks of the connection go to this set no more, unless another of its registrations is found by them.
    fn unclaim_unused(&self, endpoint: &Endpoint) {
        let owner = Some(endpoint.reference());
        let is_found = |one: &Registration| one.answered.is_by_marks() && one.answered.by() == owner;
        let is_used = self.numbers_of(endpoint).any(|fd| self.registrations.get(&fd).is_some_and(is_found));
        if let Some(slot) = self.slot().filter(|_| !is_used) {
            endpoint.unclaim(slot);
        }
    }

    /// Has the kernel's set hold all that the program asked for. What it holds too much is taken out when it is first reported, or
    /// at once where the set is watched: of what is told edges that would be one. An edge that only the lane has made, and nobody
    /// has been told of, is the kernel's to tell from now on.
    pub(super) fn settle(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        if registration.held.is_deleted() || is_frozen(fd) {
            self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
            self.forget(fd);
            unlist(epoll, endpoint);
        } else if registration.held.is_armed() && !self.shared {
            let lacks_some = registration.events & !registration.held.events() != 0;
            let is_to_look_anew = match registration.events & EDGE {
                0 => self.nested,
                _ => registration.may_tell(endpoint, false),
            };
            if lacks_some || is_to_look_anew {
                self.set_kernel_events(fd, Some(endpoint));
            }
        }
    }

    pub(super) fn set_kernel_events(&mut self, fd: RawFd, endpoint: Option<&Endpoint>) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        let (events, data) = (registration.needed_of_kernel(endpoint), registration.kernel_data());
        registration.held.hold(events);
        self.change_kernel(libc::EPOLL_CTL_MOD, fd, events, data);
        self.note_sending_road(fd, endpoint);
    }

    /// The kernel's set has just been told of a registration, and looks at it. Where it holds EPOLLOUT beside a lane, what it
    /// finds belongs into one report with what the lane says.
    fn note_sending_road(&mut self, fd: RawFd, endpoint: Option<&Endpoint>) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        registration.sends_on_lane = !self.shared && endpoint.is_some_and(sends_on_lane);
        let beside = registration.sends_on_lane || endpoint.is_some_and(Endpoint::has_shut_writing);
        self.must_ask |=
            beside && registration.answered.is_by_lanes() && registration.held.events() & OUT != 0;
    }

    /// See [`change`].
    pub(super) fn change_kernel(&self, operation: i32, fd: RawFd, events: u32, data: u64) {
        change(self.fd, operation, fd, events, data);
    }

    /// Takes what is ours out of the kernel's set, the doorbell and the tokens, and has it look anew at what lanes have
    /// answered until now.
    pub(super) fn hide(&mut self) {
        if self.slot().is_none() && self.names.are_none() {
            return;
        }
        self.hidden = true;
        for (&fd, one) in self.registrations.iter_mut().filter(|(_, one)| one.held == Held::Withdrawn) {
            one.mark_disarmed(self.fd, fd);
        }
        if let Some((fd, _)) = self.bell.in_set() {
            self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
        }
        self.for_tokens(|one| {
            (if one.held.is_disarmed() { one.events & PRIVATE } else { one.events }, one.data)
        });
    }

    /// Has the kernel's set hold nothing of ours from now on: what waits there may be a call that no hook sees. What a lane still
    /// holds, which nobody can give back, is all that is answered here.
    pub(super) fn surrender(&mut self, epoll: &Epoll) {
        if self.shared {
            return;
        }
        self.bury_deleted(epoll);
        let Inner { registrations, names, fd: set, .. } = self;
        for (&fd, one) in registrations.iter_mut().filter(|(_, one)| one.name.is_token()) {
            let is_given = match one.held.is_disarmed() {
                // The kernel has disarmed it, and reports nothing of it, not even an error.
                true if one.held == Held::Silent => false,
                true => change(*set, libc::EPOLL_CTL_MOD, fd, one.events & PRIVATE, one.data),
                false => one.give_to_kernel(*set, fd),
            };
            if is_given {
                names.give(&mut one.name, fd, Name::Given);
            }
        }
        // Where a lane still holds something, waits of libc's look for that by themselves.
        self.take_bell_out(epoll);
        if self.answered.is_none() {
            self.let_slot_go();
        }
    }

    /// Puts it back, if it was taken out for an exec that has failed.
    #[inline]
    pub(crate) fn show(&mut self) {
        if self.hidden {
            self.show_again();
        }
    }

    #[cold]
    fn show_again(&mut self) {
        self.hidden = false;
        self.show_bell();
        self.for_tokens(|one| (one.held.events(), one.kernel_data()));
        self.withdraw_disarmed();
    }

    /// See [`super::freeze_everywhere`]. Only what a lane still holds is answered here from now on.
    pub(super) fn freeze(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        if !self.is_of(fd, endpoint) {
            return;
        }
        self.bury(epoll, fd);
        self.restore(fd);
        let Some(one) = self.registrations.get_mut(&fd) else { return };
        if one.answered.is_by_lanes() {
            if one.answered.lose_marks(&mut self.answered).is_some() {
                self.unclaim_unused(endpoint);
            }
            self.note_number(fd, endpoint);
            self.frozen = self.frozen.min(NOBODY).checked_sub(1).unwrap_or(NOBODY - 1);
            self.rename(fd, self.frozen);
        } else {
            self.forget(fd);
            unlist(epoll, endpoint);
        }
    }

    /// See [`super::thaw_everywhere`].
    pub(super) fn thaw(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        let owner = Some(endpoint.reference());
        let is_it = |place: &RawFd| {
            let one = self.registrations.get(place).filter(|_| is_frozen(*place));
            one.is_some_and(|one| one.number == fd && one.owner == owner)
        };
        let place = self.numbers_of(endpoint).find(is_it);
        if let Some(place) = place {
            self.rename(place, fd);
            let is_answered = |one: &Registration| one.answered.is_by_lanes() && one.held.is_armed();
            if !self.shared && self.registrations.get(&fd).is_some_and(is_answered) {
                self.name(fd, new_token(epoll));
                self.set_kernel_events(fd, Some(endpoint));
            }
        }
    }

    /// Has the kernel's set report a registration as the program has made it.
    pub(super) fn restore(&mut self, fd: RawFd) {
        let Some(one) = self.registrations.get_mut(&fd) else { return };
        let is_as_made = !one.name.is_token() && !one.exclusive && one.held.events() == one.events;
        if self.shared || is_as_made {
            return;
        }
        if one.held.is_disarmed() {
            one.mark_disarmed(self.fd, fd);
        } else if one.give_to_kernel(self.fd, fd) {
            self.names.give(&mut one.name, fd, Name::Given);
            self.merge_by_data(&listing::of(process::pid() as u32, self.fd).unwrap_or_default());
        }
    }

    /// Files a registration under another number.
    fn rename(&mut self, from: RawFd, to: RawFd) {
        let Some(one) = self.registrations.get(&from) else { return };
        self.names.renumber(one.name, to);
        one.owner.into_iter().for_each(|owner| self.duplicates.rename(owner, from, to));
        self.registrations.rename(from, to);
        self.line.rename(from, to);
        self.full.iter_mut().filter(|number| **number == from).for_each(|number| *number = to);
    }

    /// See [`super::leave_everywhere`].
    pub(super) fn leave(&self, fd: RawFd) {
        // A change is an edge: what is as the program has it stays untouched.
        let is_ours = !self.shared && !self.hidden;
        let held = self.registrations.get(&fd).filter(|one| is_ours && one.name.is_known());
        if let Some(one) = held.filter(|one| one.held.is_armed()) {
            self.change_kernel(libc::EPOLL_CTL_MOD, fd, one.events, one.data);
        }
    }

    /// Has the kernel's set hold something else where it holds a token. What it has disarmed reports nothing before it is given
    /// its data anew, and what other processes use is left as it is.
    fn for_tokens(&self, held: impl Fn(&Registration) -> (u32, u64)) {
        let shows = |one: &Registration| one.name.is_token() && one.held.is_looked_for() && !self.shared;
        for (&fd, one) in self.registrations.iter().filter(|(_, one)| shows(one)) {
            let (events, data) = held(one);
            self.change_kernel(libc::EPOLL_CTL_MOD, fd, events, data);
        }
    }

    /// A direction that leaves its lane is an edge for those who had no room there, and for those who have not been told of the last.
    /// For others it is none: what TCP makes of the next send may be an edge, as when the peer is gone, and nothing may wake them
    /// before.
    pub(super) fn refresh(&mut self, endpoint: &Endpoint) {
        if self.shared {
            return;
        }
        for fd in self.numbers_of(endpoint).filter(|fd| !is_frozen(*fd)) {
            self.refresh_one(fd, endpoint);
        }
    }

    fn refresh_one(&mut self, fd: RawFd, endpoint: &Endpoint) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        let wanted = registration.needed_of_kernel(Some(endpoint));
        let enough = wanted & !registration.held.events() == 0;
        let too_much = registration.held.events() & OUT & !wanted != 0;
        let was_on_lane = std::mem::replace(&mut registration.sends_on_lane, sends_on_lane(endpoint));
        // A program that waits for room has it in TCP now, of which the kernel must tell anew.
        let has_left = was_on_lane
            && !registration.sends_on_lane
            && registration.events & OUT != 0
            && (registration.due
                || registration.full
                || registration.may_tell(endpoint, false)
                || endpoint.tx.lock().seen.backlog.is_waiting());
        if (enough && !too_much && !has_left) || !registration.held.is_armed() {
            return;
        }
        self.set_kernel_events(fd, Some(endpoint));
        // What the kernel no longer answers, the next look must.
        self.mark_due(fd);
    }

    /// The next wait tells how it is.
    pub(super) fn mark_due(&mut self, fd: RawFd) {
        let slot = self.slot();
        let found_by_marks = self.registrations.get(&fd).filter(|one| one.answered.is_by_marks());
        let marked = found_by_marks.and_then(Registration::endpoint).zip(slot);
        let is_marked = marked.is_some_and(|(endpoint, slot)| is_marked(endpoint, slot));
        if let Some(registration) = self.registrations.get_mut(&fd) {
            registration.due = true;
        }
        // What is marked has a place of its own, which taking the mark gives it.
        if is_marked {
            return;
        }
        let has_some = self.lacks_place_for_some(fd);
        // What has come before this has its place before it, also by a link at rest.
        self.rung |= has_some && self.links.has_some_at_rest();
        if self.rung || self.has_marks() {
            self.take_marks();
        }
        self.queue_for_look(fd, has_some);
    }

    /// Whether there is something to be told of a registration that has no place for it yet.
    pub(super) fn lacks_place_for_some(&self, fd: RawFd) -> bool {
        let Some(registration) = self.registrations.get(&fd).filter(|one| !one.place.is_placed()) else {
            return false;
        };
        registration.endpoint().is_some_and(|endpoint| registration.has_some(endpoint, self.slot()))
    }

    /// The next wait looks at it. It has its place if it `has_some`, and else its first mark gives it one.
    pub(super) fn queue_for_look(&mut self, fd: RawFd, has_some: bool) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        match has_some {
            true => self.line.enter_placed(&mut registration.place, fd, 0),
            false => self.line.enter_hollow(&mut registration.place, fd),
        }
    }

    /// The next wait tells what is new.
    pub(super) fn mark_pending(&mut self, fd: RawFd) {
        if let Some(registration) = self.registrations.get_mut(&fd) {
            self.line.enter(&mut registration.place, fd);
        }
    }

    /// See [`super::tell_again`].
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

    /// See [`super::note_urgent_read`].
    pub(super) fn note_urgent_read(&mut self, endpoint: &Endpoint) {
        let received = (Tcp { endpoint, fd: endpoint.fd.load(Relaxed) }).received();
        let untold = self.attached_where(|one, other| {
            std::ptr::eq(other, endpoint) && is_told_edges(one.events) && one.urgent_at != received
        });
        untold.into_iter().for_each(|fd| self.mark_due(fd));
    }

    /// See [`super::watch_for_space`]. Between the send that found no room and this, the peer may have made some, and another thread have
    /// looked, to which that was no edge yet. Or the direction may have left its lane, and the kernel have told of its room already.
    pub(super) fn watch_for_space(&mut self, fd: RawFd, endpoint: &Endpoint) {
        self.note_full(fd);
        let waits =
            |one: &Registration| one.answered.is_by_lanes() && one.held.is_armed() && one.events & OUT != 0;
        if !self.registrations.get(&fd).is_some_and(waits) {
            return;
        }
        match outgoing::writability(endpoint, endpoint.owner()) {
            Some(false) => {}
            None if !self.shared => self.set_kernel_events(fd, Some(endpoint)),
            _ => {
                self.mark_due(fd);
                self.wake();
            }
        }
    }

    /// A lane of this registration has no room.
    pub(super) fn note_full(&mut self, fd: RawFd) {
        if let Some(registration) = self.registrations.get_mut(&fd) {
            registration.due = true;
            if !std::mem::replace(&mut registration.full, true) {
                self.full.push(fd);
            }
        }
    }
}

/// A change of our own to the kernel's set `set`. If the registration has vanished, or its descriptor is closed while another
/// names the socket, it fails and changes nothing.
pub(super) fn change(set: RawFd, operation: i32, fd: RawFd, events: u32, data: u64) -> bool {
    let before = errno::get();
    let mut event = epoll_event { events, u64: data };
    // SAFETY: an event of our own.
    let changed = unsafe { real::epoll_ctl(set, operation, fd, &mut event) } == 0;
    errno::set(before);
    changed
}

/// Takes the set off the list of those that hold the endpoint: once, as the set may know it by another number too.
fn unlist(epoll: &Epoll, endpoint: &Endpoint) {
    let name = epoll.name();
    let mut sets = endpoint.epolls.lock();
    if let Some(place) = sets.iter().position(|other| *other == name) {
        sets.remove(place);
    }
}

/// Whether its peer has marked it for the waiter `slot`, which has not taken the mark yet.
fn is_marked(endpoint: &Endpoint, slot: Slot) -> bool {
    let at = endpoint.rx.lock().at;
    at.is_some_and(|at| at.link.view().waiter(at.link.side, slot.0).is_marked(at.conn))
}

impl Registration {
    /// Has the kernel's set `set` hold all of it, as the program has made it. `false`: it is not there.
    pub(super) fn give_to_kernel(&mut self, set: RawFd, fd: RawFd) -> bool {
        let is_there = if self.exclusive {
            // Which cannot be changed into.
            self.exclusive = false;
            self.events |= EXCLUSIVE;
            change(set, libc::EPOLL_CTL_DEL, fd, 0, 0)
                && change(set, libc::EPOLL_CTL_ADD, fd, self.events, self.data)
        } else {
            change(set, libc::EPOLL_CTL_MOD, fd, self.events, self.data)
        };
        if is_there {
            self.held.hold(self.events);
        }
        is_there
    }

    /// What the kernel's set must hold: everything, as long as nothing of it is answered here, though the endpoint may be on its
    /// lanes already.
    fn needed_of_kernel(&self, endpoint: Option<&Endpoint>) -> u32 {
        kernel_events(endpoint.filter(|_| self.answered.is_by_lanes()), self.events)
    }

    /// The connection that is answered here.
    pub(super) fn endpoint(&self) -> Option<&'static Endpoint> {
        self.answered.by().and_then(EndpointRef::resolve)
    }

    /// The user data that the kernel's set holds.
    pub(super) fn kernel_data(&self) -> u64 {
        self.name.in_set(self.data)
    }
}
