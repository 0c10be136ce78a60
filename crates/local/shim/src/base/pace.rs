//! The pace at which a receiver checks for more of a stream of small messages.
//!
//! A receiver that is faster than the sender finds only one or two messages at each check. Each
//! check takes the cache line of the sender's cursor away from the sender, which needs it back to
//! publish the next message. That costs both ends more than the message itself. So such a receiver
//! pauses before each check, until a check finds several messages.
//!
//! Only a receiver that may wait does so, and only while it sends nothing on the connection: a peer
//! that waits for an answer has no more to send.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::base::process::{self, Spin};

/// The state of one receiving direction, under the lock of that direction.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Length of the pause before a check.
    nanos: u64,
    /// Checks without a pause before the next attempt to pause.
    rest: u32,
}

/// The number of successful checks since the last send. Sender and receiver share it, because each
/// direction has its own lock.
#[derive(Debug, Default)]
pub(crate) struct Unanswered(AtomicU32);

/// Number of successful checks without a send that make a stream.
const STREAM: u32 = 32;
/// Number of messages that make a check worthwhile.
const ENOUGH: usize = 8;
const SHORTEST_NANOS: u64 = 100;
/// Longest pause. If it does not bring enough messages, the sender is slow, and the receiver checks
/// for each message,
const LONGEST_NANOS: u64 = 1_600;
/// for this many checks.
const REST: u32 = 1_024;

impl Unanswered {
    /// Records a send of this end.
    #[inline]
    pub(crate) fn answer(&self) {
        // Writes only if needed: another thread may be receiving.
        if self.0.load(Relaxed) != 0 {
            self.0.store(0, Relaxed);
        }
    }

    /// Counts a successful check.
    #[cfg(test)]
    pub(crate) fn note_check(&self) {
        self.is_stream();
    }

    fn is_stream(&self) -> bool {
        let looks = self.0.load(Relaxed);
        if looks < STREAM {
            self.0.store(looks + 1, Relaxed);
        }
        looks >= STREAM
    }
}

impl Pace {
    /// Returns a state that no new direction has.
    #[cfg(test)]
    pub(crate) fn in_use() -> Pace {
        Pace { nanos: SHORTEST_NANOS, rest: 1 }
    }

    /// Returns whether a check is preceded by a pause.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.nanos > 0
    }

    /// Pauses before a check.
    #[inline]
    pub(crate) fn wait(&self) {
        if self.nanos > 0 {
            let begin = process::now();
            while process::now() - begin < self.nanos {
                std::hint::spin_loop();
            }
        }
    }

    /// Learns from a check that wanted `wanted` bytes and found `found`.
    #[inline]
    pub(crate) fn learn(&mut self, found: usize, wanted: usize, unanswered: &Unanswered) {
        if found == 0 {
            self.nanos = 0;
        } else if !unanswered.is_stream() || self.rest > 0 {
            self.nanos = 0;
            self.rest = self.rest.saturating_sub(1);
        } else if found < wanted.saturating_mul(ENOUGH) {
            self.wait_longer();
        }
    }

    fn wait_longer(&mut self) {
        if self.nanos >= LONGEST_NANOS || process::spin() == Spin::Nanos(0) {
            *self = Pace { nanos: 0, rest: REST };
        } else {
            self.nanos = (2 * self.nanos).max(SHORTEST_NANOS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: usize = 64;

    fn learn(pace: &mut Pace, unanswered: &Unanswered, messages: usize, looks: u32) {
        for _ in 0..looks {
            pace.learn(messages * WANTED, WANTED, unanswered);
        }
    }

    #[test]
    fn a_stream_is_left_alone_until_a_look_finds_enough() {
        let (mut pace, unanswered) = (Pace::default(), Unanswered::default());
        learn(&mut pace, &unanswered, 1, STREAM);
        assert_eq!(pace.nanos, 0);
        learn(&mut pace, &unanswered, 1, 2);
        assert_eq!(pace.nanos, 2 * SHORTEST_NANOS);
        learn(&mut pace, &unanswered, ENOUGH, 100);
        assert_eq!(pace.nanos, 2 * SHORTEST_NANOS);
        learn(&mut pace, &unanswered, 0, 1);
        assert_eq!(pace.nanos, 0, "nobody is there who could be disturbed");
    }

    #[test]
    fn answers_are_never_kept_waiting() {
        let (mut pace, unanswered) = (Pace::default(), Unanswered::default());
        for _ in 0..1000 {
            learn(&mut pace, &unanswered, 1, 1);
            unanswered.answer();
            assert_eq!(pace.nanos, 0);
        }
    }

    #[test]
    fn a_wait_that_brings_no_more_is_given_up_for_long() {
        let (mut pace, unanswered) = (Pace::default(), Unanswered::default());
        learn(&mut pace, &unanswered, 1, STREAM + 6);
        assert_eq!((pace.nanos, pace.rest), (0, REST));
        learn(&mut pace, &unanswered, 1, REST);
        assert_eq!((pace.nanos, pace.rest), (0, 0));
        learn(&mut pace, &unanswered, 1, 1);
        assert_eq!(pace.nanos, SHORTEST_NANOS);
    }
}
