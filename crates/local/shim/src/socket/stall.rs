//! What a sender does about a full lane: pure decisions.
//!
//! A ring holds 256 KiB, and TCP's buffers on loopback hold 4 MB. As long as TCP would have room,
//! each moment that a sender waits for room in the ring is a moment that it is later than with TCP.
//! So [`Backlog`] adds up the waits, and once their sum is [`PATIENCE_NANOS`] the lane *spills*:
//! what does not fit into the ring goes to the lane's spill, which has room for as much as TCP.
//!
//! ```text
//!             room                   full                  waited for 4 ms
//!   ring: ... writes ------------> waits for the ring -------------------> spilled: writes ...
//!               ^                        |                                    |
//!               |   the receiver reads   |                                    | the spill is full
//!               +------------------------+                                    v
//!               ^                                                          waits for the spill
//!               |            the lane is empty                                |
//!               +---------------------------------- held <--------------------+--> falls back
//!                                                         4 MiB were read     1 s without a read
//! ```
//!
//! The sum begins anew, and the spill is *held*, once the receiver has read as much as TCP holds. A
//! receiver that is fast empties a spill within the next 4 ms, and the lane is in its ring again,
//! which stays in the processor's cache. One that is slow lets the sum grow, and the lane spills
//! again. So a sender is later than with TCP by 4 ms for each 4 MiB at the most.
//!
//! When the spill is full too, TCP would have no room either. Then, or where there is none, the
//! sender falls back to TCP if the receiver reads nothing for a while.
//!
//! Example: both ends write 300,000 bytes before either reads. Each has a full ring after 262,144.
//! After 4 ms each spills, writes the rest, and reads.

use shunt_transport::Spill;

/// The longest sum of waits that a sender accepts while TCP would have room.
const PATIENCE_NANOS: u64 = 4_000_000;
/// The bytes that TCP holds. The sum begins anew whenever the receiver has read this number.
const WINDOW: u64 = 4 << 20;
/// If the receiver sleeps and has not read for this time, it is not going to read. The sender falls
/// back, because TCP takes more bytes than a lane.
const ASLEEP_NANOS: u64 = 20_000_000;
/// The time for a receiver that is awake, because it may only be busy.
const BUSY_NANOS: u64 = 1_000_000_000;
/// The longest time until the sender checks again, since the receiver's state may have changed.
pub(crate) const LOOK_NANOS: u64 = 20_000_000;
/// The time between two checks by an epoll instance that never sleeps, because it always has an
/// event to report.
pub(crate) const AWAKE_LOOK_NANOS: u64 = 1_000_000;
/// The shortest sleep until the next check.
const SHORTEST_NANOS: u64 = 50_000;

/// The state of a full lane at a check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    /// The time in nanoseconds.
    pub(crate) now: u64,
    /// Bytes that the receiver has read, counted from any point.
    pub(crate) read: u64,
    /// Set if the receiver's waiter sleeps although there are bytes, and this end has read all that
    /// the receiver has sent.
    pub(crate) is_asleep: bool,
    /// The state of the lane's spill.
    pub(crate) spill: Spill,
}

/// The decision about a full lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Hold the spill if it is used, wait for at most this many nanoseconds, and check again.
    HoldSpill(u64),
    /// Write to the spill.
    Spill,
    /// TCP would have no room either. Wait for at most this many nanoseconds, and check again.
    Wait(u64),
    /// Continue on TCP.
    FallBack,
}

/// The waits of a sender for room in its lane.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Backlog {
    /// When the current wait began; 0 if there is none.
    since: u64,
    /// The receiver's count at the last check, and the time at which it was last seen to change.
    read: u64,
    moved_at: u64,
    /// The receiver's count when the sum began, and the sum of the waits that have ended since.
    window: u64,
    waited: u64,
}

impl Backlog {
    /// Returns whether the sender waits for room.
    #[inline(always)]
    pub(crate) fn is_waiting(&self) -> bool {
        self.since != 0
    }

    /// Notes that there is room. The current wait does not count. This is for the fast path, which
    /// does not read the clock.
    #[inline(always)]
    pub(crate) fn forget_wait(&mut self) {
        self.since = 0;
    }

    /// Notes that a wait has ended now.
    pub(crate) fn end_wait(&mut self, now: u64) {
        if self.is_waiting() {
            self.waited += now.saturating_sub(self.since);
            self.since = 0;
        }
    }

    /// Decides what to do about a full lane.
    pub(crate) fn look(&mut self, look: Look) -> Verdict {
        if !self.is_waiting() || look.read != self.read {
            (self.read, self.moved_at) = (look.read, look.now);
        }
        if !self.is_waiting() {
            self.since = look.now.max(1);
        }
        if look.read.wrapping_sub(self.window) >= WINDOW {
            (self.window, self.waited, self.since) = (look.read, 0, look.now.max(1));
        }
        let waited = self.waited + look.now.saturating_sub(self.since);
        match (look.spill, PATIENCE_NANOS.saturating_sub(waited)) {
            (Spill::None, _) | (Spill::Full, 0) => {}
            (Spill::Closed, 0) => {
                self.end_wait(look.now);
                return Verdict::Spill;
            }
            (Spill::Closed | Spill::Full, left) => return Verdict::HoldSpill(left.max(SHORTEST_NANOS)),
        }
        let patience = if look.is_asleep { ASLEEP_NANOS } else { BUSY_NANOS };
        match patience.saturating_sub(look.now.saturating_sub(self.moved_at)) {
            0 => Verdict::FallBack,
            left => Verdict::Wait(left.clamp(SHORTEST_NANOS, LOOK_NANOS)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const RING: u64 = 256 << 10;
    /// Bytes of a spill.
    const SPILL: u64 = 4 << 20;

    /// A lane with a sender that always has more to send, and a receiver that reads now and then.
    #[derive(Default)]
    struct Lane {
        backlog: Backlog,
        now: u64,
        head: u64,
        tail: u64,
        spilled_at: Option<u64>,
        is_held: bool,
        has_no_spill: bool,
        is_asleep: bool,
        /// How long the sender has waited since the receiver had last read as much as TCP holds.
        late: u64,
        read_when_late_began: u64,
        most_late: u64,
    }

    impl Lane {
        fn new() -> Lane {
            Lane { now: 1_000 * MS, ..Lane::default() }
        }

        fn room(&mut self) -> u64 {
            if self.head == self.tail {
                self.spilled_at = None;
            }
            match self.spilled_at {
                None => RING - (self.tail - self.head),
                Some(_) if self.is_held => 0,
                Some(at) => SPILL - (self.tail - self.head.max(at)),
            }
        }

        /// Fills the room, and decides. Waits for as long as the verdict says, or until the
        /// receiver reads, if that is sooner.
        fn step(&mut self, until_read: u64) -> Verdict {
            let room = self.room();
            if room > 0 {
                self.tail += room;
                self.backlog.end_wait(self.now);
            }
            let verdict = self.backlog.look(Look {
                now: self.now,
                read: self.head,
                is_asleep: self.is_asleep,
                spill: match self.spilled_at {
                    _ if self.has_no_spill => Spill::None,
                    None => Spill::Closed,
                    Some(at) if self.is_held && self.tail - self.head.max(at) < SPILL => Spill::Closed,
                    Some(_) => Spill::Full,
                },
            });
            match verdict {
                Verdict::Spill => {
                    self.spilled_at = self.spilled_at.or(Some(self.tail));
                    self.is_held = false;
                }
                Verdict::HoldSpill(nanos) | Verdict::Wait(nanos) => {
                    self.is_held |= matches!(verdict, Verdict::HoldSpill(_)) && self.spilled_at.is_some();
                    let passed = nanos.min(until_read);
                    self.now += passed;
                    // With TCP it would have had room.
                    if self.tail - self.head < SPILL {
                        self.late += passed;
                    }
                }
                Verdict::FallBack => {}
            }
            if self.head - self.read_when_late_began >= WINDOW {
                (self.read_when_late_began, self.late) = (self.head, 0);
            }
            self.most_late = self.most_late.max(self.late);
            verdict
        }

        fn read(&mut self, count: u64) {
            self.head += count.min(self.tail - self.head);
        }

        /// Returns the time after which the sender falls back if nothing is read.
        fn falls_back_after(&mut self) -> u64 {
            let began = self.now;
            while self.step(u64::MAX) != Verdict::FallBack {
                assert!(self.now - began < 10_000 * MS);
            }
            self.now - began
        }

        /// Runs with a receiver that reads `count` bytes each `nanos`.
        fn run(&mut self, count: u64, nanos: u64, times: u32) {
            for _ in 0..times {
                let next = self.now + nanos;
                while self.now < next {
                    assert_ne!(self.step(next - self.now), Verdict::FallBack);
                }
                self.read(count);
            }
        }
    }

    #[test]
    fn a_full_ring_spills_after_four_milliseconds() {
        let mut lane = Lane::new();
        let began = lane.now;
        assert_eq!(lane.step(u64::MAX), Verdict::HoldSpill(PATIENCE_NANOS));
        assert_eq!((lane.step(u64::MAX), lane.now - began), (Verdict::Spill, 4 * MS));
        assert!(matches!(lane.step(u64::MAX), Verdict::Wait(_)));
        assert_eq!(lane.tail, RING + SPILL, "as much as TCP takes");
    }

    #[test]
    fn a_lane_that_is_wholly_full_falls_back_as_a_ring_without_a_spill_does() {
        for (is_asleep, has_no_spill) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut lane = Lane { is_asleep, has_no_spill, ..Lane::new() };
            let before = if has_no_spill { 0 } else { PATIENCE_NANOS };
            let expected = before + if is_asleep { ASLEEP_NANOS } else { BUSY_NANOS };
            assert_eq!(lane.falls_back_after(), expected, "asleep: {is_asleep}, without: {has_no_spill}");
        }
    }

    #[test]
    fn waits_that_follow_one_another_are_added_up() {
        let mut lane = Lane::new();
        // Room for a third of the ring after each millisecond.
        lane.run(RING / 3, MS, 4);
        assert_eq!(lane.spilled_at, None);
        lane.run(RING / 3, MS, 1);
        assert!(lane.spilled_at.is_some());
    }

    /// Whatever the receiver does, the sender is later than with TCP by no more than the documented
    /// limit.
    #[test]
    fn no_receiver_makes_a_sender_later() {
        for count in [1, 100, 10_000, RING / 3, RING, 1 << 20] {
            for nanos in [1_000, 100_000, MS, 10 * MS, 100 * MS] {
                let mut lane = Lane::new();
                lane.run(count, nanos, 3_000);
                // A part of the wait may precede the window.
                let most = 2 * PATIENCE_NANOS + SHORTEST_NANOS;
                assert!(lane.most_late <= most, "{count} bytes each {nanos} ns: {} ns", lane.most_late);
            }
        }
    }

    /// The stream has two gigabytes a second. Each 100 ms the receiver is off its processor for 15
    /// ms.
    #[test]
    fn a_receiver_that_is_fast_again_brings_the_lane_back_to_its_ring() {
        let mut lane = Lane::new();
        let mut rounds_in_ring = 0;
        for _ in 0..100 {
            lane.run(RING / 3, 40_000, 2_500);
            rounds_in_ring += u32::from(lane.spilled_at.is_none());
            lane.run(0, 15 * MS, 1);
            assert!(lane.spilled_at.is_some());
        }
        assert_eq!(rounds_in_ring, 100);
    }

    #[test]
    fn a_fast_stream_never_spills() {
        let mut lane = Lane::new();
        lane.run(RING / 3, 60_000, 100_000);
        assert_eq!(lane.spilled_at, None);
    }

    #[test]
    fn what_the_fast_path_forgets_is_not_waited() {
        let mut backlog = Backlog::default();
        for step in 0..100 {
            assert!(!backlog.is_waiting());
            let look = Look { now: (1_000 + step * 3) * MS, read: 0, is_asleep: false, spill: Spill::Closed };
            assert_eq!(backlog.look(look), Verdict::HoldSpill(PATIENCE_NANOS));
            backlog.forget_wait();
        }
    }
}
