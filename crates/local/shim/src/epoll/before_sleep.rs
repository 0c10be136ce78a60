//! What a wait does before it sleeps, and after: how long it may sleep, what it announces to peers,
//! and which connections it leaves behind.

use super::sleep_bound::{DEGRADED_NANOS, SleepBound, until_known};
use super::{Epoll, Inner, OUT, Registration, shared};
use crate::socket::endpoint::Endpoint;
use crate::socket::links::Pin;
use crate::socket::{incoming, outgoing};

impl Inner {
    /// Returns the bound of a sleep, in addition to the program's timeout.
    pub(crate) fn patience(&mut self, epoll: &Epoll) -> SleepBound {
        self.register_wakeup_again(epoll);
        if self.registrations.answered.is_none() {
            return match self.exposure.is_shared() && shared::may_be_added() {
                true => SleepBound::Unrung(DEGRADED_NANOS),
                false => SleepBound::Endless,
            };
        }
        if self.registrations.answered.has_looks() {
            self.gain_all_marks();
        }
        let Some(slot) =
            self.slot().filter(|_| !self.registrations.answered.has_looks() && !self.exposure.is_shared())
        else {
            return SleepBound::Unrung(DEGRADED_NANOS);
        };
        if self.is_wakeup_unregistered() {
            // The bytes in lanes were there before. New ones come by TCP.
            return SleepBound::Unrung(until_known(u32::MAX));
        }
        slot.register();
        self.rung |= self.links.learn_known(slot);
        if let Some(in_a_row) = self.links.note_sleep_unknown() {
            return SleepBound::Unrung(until_known(in_a_row));
        }
        self.forget_room();
        let full = self.room.fds.iter().filter_map(|fd| self.registrations.get(fd)?.endpoint());
        full.map(outgoing::longest_sleep).min().map_or(SleepBound::Endless, SleepBound::Room)
    }

    /// Returns the bound after the last check before the sleep.
    pub(crate) fn last_patience(&self, before: SleepBound) -> SleepBound {
        self.sleeps.bound(before)
    }

    /// Drops those from the list of full lanes that do not wait for room any more. Another thread
    /// may have found the room, and this instance has yet to report it.
    fn forget_room(&mut self) {
        let Inner { registrations, ready, room, .. } = self;
        room.fds.retain(|fd| {
            let Some(registration) = registrations.get_mut(fd) else { return false };
            let wanted = registration.events & OUT != 0 && !registration.interest.is_disarmed();
            let endpoint = registration.endpoint();
            let is_full = endpoint.is_some_and(|endpoint| endpoint.tx.lock().seen.backlog.is_waiting());
            registration.full = wanted && is_full;
            if wanted && !is_full && registration.due {
                ready.enter(&mut registration.position, *fd);
            }
            registration.full
        });
    }

    /// Announces a sleep of at most `patience`. The caller checks once more afterwards, and then
    /// [rests](Self::rest) or not.
    pub(crate) fn announce_sleep(&mut self, patience: SleepBound) {
        self.sleeps.begin(patience);
        if let Some(slot) = self.slot() {
            self.links.announce_sleep(slot);
        }
    }

    /// Brings the links to rest after a check that found nothing. They need no check until the
    /// doorbell is rung. A peer that does not hold it yet marks without a ring, and the next wait
    /// may be one that does not sleep.
    pub(crate) fn rest(&mut self) {
        self.links.rest();
        self.rung |= !self.links.all_known();
    }

    /// Cancels the sleep, because something was found. Other threads that do sleep must still be
    /// woken.
    pub(crate) fn stay_awake(&mut self, epoll: &Epoll) {
        self.awake(epoll);
        let Some(slot) = self.slot() else { return };
        if self.sleeps.has_some() {
            self.links.announce_sleep(slot);
        } else {
            self.links.stay_awake(slot);
        }
    }

    /// Ends a sleep.
    pub(crate) fn awake(&mut self, epoll: &Epoll) {
        self.sleeps.end();
        self.retire_doorbell(epoll);
    }

    /// Passes a ring on to a sleeping thread, which will check. This one received it and returns to
    /// the program without a check.
    pub(crate) fn pass_ring_on(&self) {
        if let Some(slot) = self.slot().filter(|_| self.rung && self.sleeps.has_some()) {
            slot.ring();
        }
    }

    /// Ends a check or a sleep, which has `found` something or not. Returns whether there is work
    /// to [take](Self::take_left), which is rare.
    #[inline]
    pub(crate) fn end_round(&mut self, epoll: &Epoll, found: bool) -> bool {
        if found {
            self.note_change(epoll);
        }
        self.show_lanes(epoll);
        !self.returned.is_empty() || self.closed.has_read()
    }

    /// Takes the work that must be done outside the lock: endpoints whose receivers have returned
    /// bytes, which must be sent again, and pins of closed sockets that have been read to the end.
    pub(crate) fn take_left(&mut self) -> (Vec<&'static Endpoint>, Vec<Pin>) {
        (std::mem::take(&mut self.returned), self.closed.take_read())
    }

    /// Returns the endpoints whose peers will never know this instance's doorbell. They must fall
    /// back to TCP.
    pub(crate) fn deaf(&self) -> Vec<&'static Endpoint> {
        let Some(slot) = self.slot().filter(|_| !self.links.all_known()) else { return Vec::new() };
        let attached = self.registrations.values().filter_map(Registration::endpoint);
        attached.filter(|endpoint| !incoming::can_be_rung(endpoint, Some(slot))).collect()
    }

    /// Returns the senders that have [waited](Self::stalled) for too long, at most once in a while.
    /// For an instance that always has an event to report, so that its waits never sleep.
    #[inline]
    pub(crate) fn stalled_if_due(&mut self, now: u64) -> Vec<&'static Endpoint> {
        if !self.room.is_due(now) {
            return Vec::new();
        }
        self.room.checked_at = now;
        self.forget_room();
        self.stalled()
    }

    /// Returns the senders that have waited for room in their lanes for too long, and must fall
    /// back to TCP.
    #[cold]
    pub(crate) fn stalled(&mut self) -> Vec<&'static Endpoint> {
        let full = self.room.fds.iter().filter_map(|fd| self.registrations.get(fd)?.endpoint());
        full.filter(|endpoint| outgoing::has_stalled(endpoint)).collect()
    }
}
