//! epoll_ctl: registrations are added, changed, hidden and removed, and the kernel's list gets the
//! events that it must answer.

use std::os::fd::RawFd;

use libc::epoll_event;
use rustix::net::sockopt::socket_acceptconn;
use shunt_abi::reason::Reason;

use super::answered::Answered;
use super::attachment::unlist;
use super::kernel_interest::KernelInterest;
use super::kernel_list::change;
use super::names::{Name, new_token};
use super::ready_queue::{Position, ReadyQueue};
use super::registrations::Registrations;
use super::room::RoomWaits;
use super::shared::PRIVATE;
use super::{EDGE, EXCLUSIVE, Epoll, FINISHED, IN, Inner, ONE_SHOT, OUT, Registration, URGENT};
use crate::base::code::Code;
use crate::base::names::EndpointRef;
use crate::base::private::borrow;
use crate::base::{code, order, real, table};
use crate::socket::endpoint;
use crate::socket::endpoint::Endpoint;

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
fn kernel_events(endpoint: Option<&Endpoint>, wanted: u32) -> u32 {
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
fn is_exclusive(operation: i32, events: u32) -> bool {
    const ALLOWED: i32 = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP;
    let allowed = ALLOWED as u32 | EDGE | EXCLUSIVE;
    let is_allowed = operation == libc::EPOLL_CTL_ADD && events & EXCLUSIVE != 0 && events & !allowed == 0;
    is_allowed && code::state() != Code::MayBypass
}

/// Returns whether a lane, not TCP, answers whether there is room.
pub(super) fn sends_on_lane(endpoint: &Endpoint) -> bool {
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
    fn name_for(
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
    pub(super) fn needed_of_kernel(&self, endpoint: Option<&Endpoint>) -> u32 {
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
