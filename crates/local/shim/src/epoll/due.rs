//! Registrations that the next wait must look at.

use std::os::fd::RawFd;

use shunt_transport::Kernel;

use super::attachment::is_marked;
use super::freezing::is_frozen;
use super::registration::{is_told_edges, sends_on_lane};
use super::{Inner, OUT, Registration};
use crate::socket::endpoint::Endpoint;
use crate::socket::outgoing;
use crate::socket::outgoing::Room;
use crate::socket::tcp::Tcp;

impl Inner {
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

    pub(super) fn refresh_one(&mut self, fd: RawFd, endpoint: &Endpoint) {
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
        // Earlier events get an earlier position, even by a link at rest.
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

    /// Has the next wait report new events.
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
