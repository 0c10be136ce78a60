//! The ends of the two streams of a connection, as far as the shim has seen them.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use super::Endpoint;

/// Bit of [`Ends::shut`]: this end reads no more.
const READING: u32 = 1;
/// Bit of [`Ends::shut`]: this end writes no more.
const WRITING: u32 = 2;

/// The result of [`Ends::add_shut`].
pub(crate) struct Shut {
    pub(crate) both: bool,
}

/// The ends of the streams of one connection.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// The directions that the program has shut down, as bits.
    shut: AtomicU32,
    /// Set when the kernel has reported that the peer sends no more bytes.
    has_peer_finished: AtomicBool,
    /// Set when the kernel has a FIN of the peer in whose place TCP would have sent a reset.
    is_fin_discounted: AtomicBool,
    /// Since when the end of the peer's stream, which the lane has reported, has been awaited from
    /// TCP; 0 if it is not awaited.
    awaited_since: AtomicU64,
}

impl Ends {
    /// Returns the directions that were shut down: 1 for reading, 2 for writing, 3 for both.
    pub(super) fn shut(&self) -> u32 {
        self.shut.load(Acquire)
    }

    pub(super) fn has_shut_writing(&self) -> bool {
        self.shut() & WRITING != 0
    }

    pub(super) fn has_shut_both(&self) -> bool {
        self.shut() == READING | WRITING
    }

    /// Records a shutdown.
    pub(super) fn add_shut(&self, reads: bool, writes: bool) -> Shut {
        let bits = if reads { READING } else { 0 } | if writes { WRITING } else { 0 };
        Shut { both: self.shut.fetch_or(bits, AcqRel) | bits == READING | WRITING }
    }

    pub(super) fn note_peer_finished(&self) {
        self.has_peer_finished.store(true, Relaxed);
    }

    pub(super) fn has_peer_finished(&self) -> bool {
        self.has_peer_finished.load(Relaxed)
    }

    pub(super) fn note_fin_discounted(&self) {
        self.is_fin_discounted.store(true, Relaxed);
    }

    pub(super) fn is_fin_discounted(&self) -> bool {
        self.is_fin_discounted.load(Relaxed)
    }

    /// Notes since when the end of the peer's stream has been awaited from TCP.
    pub(super) fn await_since(&self, since: u64) {
        self.awaited_since.store(since.max(1), Release);
    }

    pub(super) fn stop_awaiting(&self) {
        self.awaited_since.store(0, Release);
    }

    /// Returns since when the end has been awaited.
    #[inline]
    pub(super) fn awaited_since(&self) -> Option<u64> {
        Some(self.awaited_since.load(Acquire)).filter(|since| *since != 0)
    }

    pub(super) fn reset(&self) {
        let Ends { shut, has_peer_finished, is_fin_discounted, awaited_since } = self;
        shut.store(0, Relaxed);
        has_peer_finished.store(false, Relaxed);
        is_fin_discounted.store(false, Relaxed);
        awaited_since.store(0, Relaxed);
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.add_shut(true, true);
        self.note_peer_finished();
        self.note_fin_discounted();
        self.await_since(2);
    }
}

impl Endpoint {
    /// Returns the bits that [`add_shut`](Self::add_shut) has recorded.
    #[inline]
    pub(crate) fn shut(&self) -> u32 {
        self.ends.shut()
    }

    /// Returns whether the sending direction was shut down.
    #[inline]
    pub(crate) fn has_shut_writing(&self) -> bool {
        self.ends.has_shut_writing()
    }

    /// Returns whether both directions were shut down. TCP then answers any data by a reset.
    #[inline]
    pub(crate) fn has_shut_both(&self) -> bool {
        self.ends.has_shut_both()
    }

    /// Records a shutdown.
    #[inline]
    pub(crate) fn add_shut(&self, reads: bool, writes: bool) -> Shut {
        self.ends.add_shut(reads, writes)
    }

    /// Returns whether any direction was shut down.
    #[inline]
    pub(crate) fn is_shut(&self) -> bool {
        self.ends.shut() != 0
    }

    /// Records that the kernel has reported the end of the peer's stream, so that it need not be
    /// queried again.
    #[inline]
    pub(crate) fn note_peer_finished(&self) {
        self.ends.note_peer_finished();
    }

    /// Returns whether the kernel has reported the end of the peer's stream.
    #[inline]
    pub(crate) fn has_peer_finished(&self) -> bool {
        self.ends.has_peer_finished()
    }

    /// Records that the kernel has a FIN of the peer in whose place TCP would have sent a reset.
    #[inline]
    pub(crate) fn note_fin_discounted(&self) {
        self.ends.note_fin_discounted();
    }

    #[inline]
    pub(crate) fn is_fin_discounted(&self) -> bool {
        self.ends.is_fin_discounted()
    }

    /// Returns whether TCP has yet to deliver an end that the lane has reported: see
    /// [`crate::life::ending`].
    #[inline]
    pub(crate) fn awaits_end(&self) -> bool {
        self.end_awaited_since().is_some()
    }

    /// Returns since when that end has been awaited.
    #[inline]
    pub(crate) fn end_awaited_since(&self) -> Option<u64> {
        self.ends.awaited_since()
    }

    /// Notes that from the time `now` on, that end is awaited.
    #[inline]
    pub(crate) fn await_end(&self, now: u64) {
        self.ends.await_since(now);
    }

    #[inline]
    pub(crate) fn stop_awaiting_end(&self) {
        self.ends.stop_awaiting();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_are_shut_down_by_one_call_or_by_two() {
        let ends = Ends::default();
        assert!(!ends.add_shut(true, false).both && !ends.has_shut_writing());
        assert!(ends.add_shut(false, true).both && ends.has_shut_writing() && ends.has_shut_both());
        let ends = Ends::default();
        assert!(ends.add_shut(true, true).both);
        assert_eq!(ends.shut(), 3);
    }

    /// A clock that stands at 0 must not look as if no end were awaited.
    #[test]
    fn an_end_is_awaited_since_any_time() {
        let ends = Ends::default();
        assert_eq!(ends.awaited_since(), None);
        ends.await_since(0);
        assert!(ends.awaited_since().is_some());
        ends.stop_awaiting();
        assert_eq!(ends.awaited_since(), None);
    }
}
