//! How long a sleep on lanes may last, if not every event that it waits for wakes it.

/// The longest sleep of a waiter that its peers cannot wake.
pub(crate) const DEGRADED_NANOS: u64 = 1_000_000;

/// The bound of a sleep, in addition to the program's timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SleepBound {
    /// None: every event wakes it.
    Endless,
    /// So many nanoseconds, after which it checks again for room in lanes.
    Room(u64),
    /// So many nanoseconds, because no doorbell wakes it. Then it checks everything.
    Unrung(u64),
}

impl SleepBound {
    pub(crate) fn nanos(self) -> Option<u64> {
        match self {
            SleepBound::Endless => None,
            SleepBound::Room(nanos) | SleepBound::Unrung(nanos) => Some(nanos),
        }
    }

    pub(crate) fn is_unrung(self) -> bool {
        matches!(self, SleepBound::Unrung(_))
    }
}

/// Returns how many nanoseconds a sleep may last if a peer does not hold the doorbell yet.
/// `in_a_row` sleeps before it found nothing.
///
/// A peer takes its messages from the broker with its next call, and rings each doorbell that it
/// takes. So it can publish without a ring only until the broker has sent it the doorbell. A waiter
/// that has slept for longer waits for a peer that makes no calls, perhaps for hours.
pub(crate) fn until_known(in_a_row: u32) -> u64 {
    const AT_FIRST: u32 = 64;
    const LONGEST: u32 = 6;
    DEGRADED_NANOS << (in_a_row / AT_FIRST).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_makes_no_calls_is_looked_for_less_and_less() {
        let sleeps: Vec<u64> = (0..u32::MAX).step_by(64).take(16).map(until_known).collect();
        assert_eq!(sleeps[..3], [1, 2, 4].map(|times| times * DEGRADED_NANOS));
        assert!(sleeps.is_sorted() && sleeps.ends_with(&[64 * DEGRADED_NANOS; 3]));
        assert_eq!(until_known(u32::MAX), 64 * DEGRADED_NANOS);
    }
}
