//! When a receiver looks for more of a stream of small messages.
//!
//! A receiver that is faster than the sender finds one or two messages each time it looks, and each look takes the line of
//! the sender's cursor away from the sender, who needs it back to publish the next: that costs both of them more than the
//! message does. So such a receiver leaves the sender alone for a moment, until there are some more messages for a look. Only one
//! that may wait does this, and that sends nothing on the connection meanwhile: a peer that waits for an answer has no
//! more to say.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::base::process::{self, Spin};

/// What a receiving direction has learnt. Under its lock.
#[derive(Default)]
pub(crate) struct Pace {
    /// How long it waits before a look.
    nanos: u64,
    /// Looks to go before it is tried again.
    rest: u32,
}

/// Looks that have found something since the last send. Each direction has a lock of its own, and this lies between them.
#[derive(Default)]
pub(crate) struct Unanswered(AtomicU32);

/// Looks that nothing is sent between make a stream.
const STREAM: u32 = 32;
/// Messages that are worth a look.
const ENOUGH: usize = 8;
const SHORTEST_NANOS: u64 = 100;
/// A sender that has not said enough by then is a slow one, and its messages are waited for one by one,
const LONGEST_NANOS: u64 = 1_600;
/// for as many looks as this.
const REST: u32 = 1_024;

impl Unanswered {
    /// This end sends.
    #[inline]
    pub(crate) fn answer(&self) {
        // Not written without need: another thread may be receiving.
        if self.0.load(Relaxed) != 0 {
            self.0.store(0, Relaxed);
        }
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
    /// Whether a look is waited for.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.nanos > 0
    }

    /// Before a look.
    #[inline]
    pub(crate) fn wait(&self) {
        if self.nanos > 0 {
            let begin = process::now();
            while process::now() - begin < self.nanos {
                std::hint::spin_loop();
            }
        }
    }

    /// A look for `wanted` bytes has found that there are `found`.
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
