//! A lane by itself: the memory that one sender shares with one receiver, who found each other without a broker.
//! `crates/channel` is its user.
//!
//! ```text
//! 0       the lane's header
//! 256     the line of the receiver's waiter, then that of the sender's
//! 4096    the ring
//! ```

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use shunt_abi::geometry::{LANE_BYTES, MAX_RING_BYTES, MIN_RING_BYTES, WAITER_BYTES};
use shunt_abi::reason::Reason;
use shunt_sys::mapping::{Mapping, back};

use crate::bytes::{MappedRing, Ring};
use crate::lane::LaneHeader;
use crate::user::{Fault, Sink, Source};
use crate::waiter::WaiterLine;

/// Where the ring begins.
const RING_OFFSET: usize = 4096;
const RECEIVER_OFFSET: usize = LANE_BYTES;
const SENDER_OFFSET: usize = LANE_BYTES + WAITER_BYTES;

const _: () = assert!(SENDER_OFFSET + WAITER_BYTES <= RING_OFFSET);

/// The connection that the waiters' ready words speak of: there is only one.
const CONN: usize = 0;

/// One end's view of it. It owns the mapping.
#[derive(Debug)]
pub struct PrivateLane {
    mapping: Mapping,
    ring_bytes: usize,
    /// Bytes from the beginning of the ring that have memory behind them.
    backed: AtomicUsize,
}

impl PrivateLane {
    /// Bytes of the memory for a ring of `ring_bytes`, if there can be such a ring.
    pub fn bytes(ring_bytes: usize) -> Option<usize> {
        let fits = ring_bytes.is_power_of_two() && (MIN_RING_BYTES..=MAX_RING_BYTES).contains(&ring_bytes);
        fits.then(|| RING_OFFSET + ring_bytes)
    }

    /// Views a mapping that is exactly so long as [`bytes`](PrivateLane::bytes) says.
    pub fn over(mapping: Mapping) -> Option<PrivateLane> {
        let ring_bytes = mapping.len().checked_sub(RING_OFFSET)?;
        PrivateLane::bytes(ring_bytes)?;
        // Without it a touch of the first page could be a signal.
        back(mapping.as_ptr(), RING_OFFSET).ok()?;
        Some(PrivateLane { mapping, ring_bytes, backed: AtomicUsize::new(0) })
    }

    /// The header.
    #[inline]
    pub fn lane(&self) -> &LaneHeader {
        // SAFETY: inside the mapping, which is page aligned and lives as long as `self`; the type is made of atomics (L5).
        unsafe { &*self.mapping.as_ptr().cast() }
    }

    /// The sender has published, and passed a full fence. Says whether the receiver must be woken by other means.
    #[inline]
    pub fn notify_receiver(&self) -> bool {
        self.receiver().notify(CONN)
    }

    /// The receiver has made room, and passed a full fence. Says whether the sender must be woken by other means.
    #[inline]
    pub fn notify_sender(&self) -> bool {
        self.sender().notify(CONN)
    }

    /// The line of the receiver's sleep.
    #[inline]
    pub fn receiver(&self) -> &WaiterLine {
        self.line(RECEIVER_OFFSET)
    }

    /// The line of the sender's sleep.
    #[inline]
    pub fn sender(&self) -> &WaiterLine {
        self.line(SENDER_OFFSET)
    }

    #[inline]
    fn line(&self, offset: usize) -> &WaiterLine {
        // SAFETY: as in `lane`; both offsets are multiples of the line's size.
        unsafe { &*self.mapping.as_ptr().add(offset).cast() }
    }

    #[inline]
    fn ring(&self) -> MappedRing {
        // SAFETY: the rest of the mapping, a power of two long (`over`).
        unsafe { MappedRing::new(self.mapping.as_ptr().add(RING_OFFSET), self.ring_bytes) }
    }

    #[cold]
    fn back_more(&self, end: usize) -> bool {
        let backed = self.backed.load(Relaxed);
        let start = self.mapping.as_ptr().wrapping_add(RING_OFFSET + backed);
        let done = back(start, end - backed).is_ok();
        if done {
            self.backed.store(end, Relaxed);
        }
        done
    }
}

impl Ring for PrivateLane {
    #[inline]
    fn len(&self) -> usize {
        self.ring_bytes
    }

    #[inline]
    fn back(&self, at: u64, count: usize) -> Result<(), Reason> {
        let offset = at as usize & (self.ring_bytes - 1);
        let end = (offset + count).min(self.ring_bytes);
        let is_backed = end <= self.backed.load(Relaxed) || self.back_more(end);
        is_backed.then_some(()).ok_or(Reason::NoMemory)
    }

    #[inline]
    fn fill(&self, at: u64, count: usize, source: &mut Source<'_>) -> Result<(), Fault> {
        self.ring().fill(at, count, source)
    }

    /// Memory is asked for before it is read, too: a sender may say that it has written where it never was.
    #[inline]
    fn drain(&self, at: u64, count: usize, sink: &mut Sink<'_>) -> Result<(), Fault> {
        if self.back(at, count).is_err() {
            return Err(Fault);
        }
        self.ring().drain(at, count, sink)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Consumer, Producer, Published};
    use shunt_sys::memfd::create_fixed;
    use std::io::{IoSlice, IoSliceMut};

    fn ends(ring_bytes: usize) -> (PrivateLane, PrivateLane) {
        let len = PrivateLane::bytes(ring_bytes).unwrap();
        let fd = create_fixed("shunt-test", len).unwrap();
        let map = || PrivateLane::over(Mapping::map(&fd, len).unwrap()).unwrap();
        (map(), map())
    }

    #[test]
    fn what_one_end_writes_the_other_reads() {
        let (ours, theirs) = ends(8192);
        let (mut producer, mut consumer) = (Producer::new(), Consumer::new());
        for round in 0..10u8 {
            let (head, body) = ([round; 3], [round ^ 0xff; 5000]);
            let pieces = [IoSlice::new(&head), IoSlice::new(&body)];
            let mut source = Source::of(&pieces);
            assert_eq!(producer.write(ours.lane(), &ours, &mut source), Ok(Published::Bytes(5003)));
            let (mut one, mut two) = ([0; 4], [0; 4999]);
            let mut pieces = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
            let mut sink = Sink::of(&mut pieces);
            assert_eq!(consumer.read(theirs.lane(), &theirs, &mut sink), Ok(5003));
            assert_eq!((one, two), ([round, round, round, round ^ 0xff], [round ^ 0xff; 4999]));
        }
    }

    #[test]
    fn a_sleep_of_either_end_is_seen_by_the_other() {
        let (ours, theirs) = ends(4096);
        assert!(!ours.notify_receiver() && !theirs.notify_sender());
        theirs.receiver().announce_sleep();
        ours.sender().announce_sleep();
        assert!(ours.notify_receiver() && !ours.notify_receiver());
        assert!(theirs.notify_sender() && !theirs.notify_sender());
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        for ring_bytes in [0, 4095, 6144, 2 * MAX_RING_BYTES] {
            assert_eq!(PrivateLane::bytes(ring_bytes), None, "{ring_bytes}");
        }
        for len in [4096, 8192 - 4096, 3 * 4096 + 4096] {
            let fd = create_fixed("shunt-test", len).unwrap();
            assert!(PrivateLane::over(Mapping::map(&fd, len).unwrap()).is_none(), "{len}");
        }
    }
}
