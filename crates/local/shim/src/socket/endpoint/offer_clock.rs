//! When an endpoint is offered to the broker, and the facts of its last offer.
//!
//! The clock counts data operations. Once they reach a limit, the endpoint is considered for an
//! offer. If the offer is put off, the clock begins again with another limit.
//!
//! Example: a new connection has a limit of 4. Its fourth send finds that the broker is busy, so
//! the clock begins again, and the eighth send makes the offer.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

/// The limit of an endpoint that will never be offered.
pub(crate) const NEVER: u32 = 0;

/// The clock of one endpoint.
#[derive(Debug, Default)]
pub(crate) struct OfferClock {
    /// Data operations since the clock began.
    operations: AtomicU32,
    /// The number of operations at which the next offer is considered, or [`NEVER`].
    limit: AtomicU32,
    /// When the endpoint was last offered; 0 if never.
    offered_at: AtomicU64,
    /// The number of the broker message with the last offer; 0 if there was none.
    message: AtomicU64,
    /// The index, plus one, of the peer in the table of peers while an offer to it is pending;
    /// 0 if there is none. See [`crate::socket::peer_locality`].
    distance: AtomicU32,
    /// Set when the peer is known to be on another host.
    is_remote: AtomicBool,
    /// Set while calls may be in progress that were not counted, so the endpoint is not offered.
    /// See [`crate::life::earlier_calls`].
    awaits_calls: AtomicBool,
}

impl OfferClock {
    /// Returns the number of operations since the clock began.
    #[inline]
    pub(crate) fn operations(&self) -> u32 {
        self.operations.load(Relaxed)
    }

    #[inline]
    pub(crate) fn set_operations(&self, operations: u32) {
        self.operations.store(operations, Relaxed);
    }

    /// Returns the number of operations at which the next offer is considered, or [`NEVER`].
    #[inline]
    pub(crate) fn limit(&self) -> u32 {
        self.limit.load(Relaxed)
    }

    /// Begins again, with the same limit.
    pub(crate) fn restart(&self) {
        self.operations.store(0, Relaxed);
    }

    /// Begins again, with another limit.
    pub(crate) fn restart_with(&self, limit: u32) {
        self.limit.store(limit, Relaxed);
        self.restart();
    }

    /// Returns when the endpoint was last offered; 0 if never.
    pub(crate) fn offered_at(&self) -> u64 {
        self.offered_at.load(Relaxed)
    }

    /// Notes an offer at the time `now`. Returns whether it is the endpoint's first.
    pub(crate) fn note_offer(&self, now: u64) -> bool {
        self.offered_at.swap(now, Relaxed) == 0
    }

    /// Returns the number of the broker message with the last offer; 0 if there was none.
    pub(crate) fn message(&self) -> u64 {
        self.message.load(Relaxed)
    }

    pub(crate) fn set_message(&self, number: u64) {
        self.message.store(number, Relaxed);
    }

    /// Forgets that number in a forked child. It belongs to the parent's connection to the broker.
    pub(super) fn forget_message(&self) {
        self.set_message(0);
    }

    /// Notes that the pending offer is to the peer at `index` of the table of peers.
    pub(crate) fn set_distance(&self, index: usize) {
        self.distance.store(index as u32 + 1, Relaxed);
    }

    /// Takes that index. Of several callers, one gets it.
    pub(crate) fn take_distance(&self) -> Option<usize> {
        (self.distance.swap(0, Relaxed) as usize).checked_sub(1)
    }

    pub(crate) fn note_remote(&self) {
        self.is_remote.store(true, Relaxed);
    }

    /// Returns whether the peer is known to be on another host.
    #[inline]
    pub(crate) fn is_remote(&self) -> bool {
        self.is_remote.load(Relaxed)
    }

    /// Returns whether calls may be in progress that were not counted.
    #[inline]
    pub(crate) fn awaits_calls(&self) -> bool {
        self.awaits_calls.load(Acquire)
    }

    pub(crate) fn set_awaits_calls(&self, awaits: bool) {
        self.awaits_calls.store(awaits, Release);
    }

    pub(super) fn reset(&self) {
        let OfferClock { operations, limit, offered_at, message, distance, is_remote, awaits_calls } = self;
        operations.store(0, Relaxed);
        limit.store(NEVER, Relaxed);
        offered_at.store(0, Relaxed);
        message.store(0, Relaxed);
        distance.store(0, Relaxed);
        is_remote.store(false, Relaxed);
        awaits_calls.store(false, Relaxed);
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.restart_with(2);
        self.set_operations(3);
        self.note_offer(4);
        self.set_message(5);
        self.set_distance(6);
        self.note_remote();
        self.set_awaits_calls(true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_begins_again_keeps_its_limit_or_gets_another() {
        let clock = OfferClock::default();
        clock.restart_with(4);
        clock.set_operations(4);
        clock.restart();
        assert_eq!((clock.operations(), clock.limit()), (0, 4));
        clock.set_operations(4);
        clock.restart_with(NEVER);
        assert_eq!((clock.operations(), clock.limit()), (0, NEVER));
    }

    #[test]
    fn only_the_first_offer_is_the_first() {
        let clock = OfferClock::default();
        assert!(clock.note_offer(7) && !clock.note_offer(8));
        assert_eq!(clock.offered_at(), 8);
    }

    #[test]
    fn a_distance_is_taken_once_even_at_index_0() {
        let clock = OfferClock::default();
        assert_eq!(clock.take_distance(), None);
        clock.set_distance(0);
        assert_eq!((clock.take_distance(), clock.take_distance()), (Some(0), None));
    }
}
