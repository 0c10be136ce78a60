//! How long a sleep on lanes may last where not all that is awaited wakes it.

/// The longest sleep of a waiter that its peers cannot wake.
pub(crate) const DEGRADED_NANOS: u64 = 1_000_000;

/// How long a sleep may last at most, beside what the program wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Whatever comes wakes it.
    Endless,
    /// So many nanoseconds, after which it looks for room again.
    Room(u64),
    /// So many for want of a doorbell: after that it looks for everything.
    Unrung(u64),
}

impl Patience {
    pub(crate) fn nanos(self) -> Option<u64> {
        match self {
            Patience::Endless => None,
            Patience::Room(nanos) | Patience::Unrung(nanos) => Some(nanos),
        }
    }

    pub(crate) fn is_unrung(self) -> bool {
        matches!(self, Patience::Unrung(_))
    }
}

/// How long a sleep may last in nanoseconds if a peer does not hold the doorbell yet, after `in_a_row` of them that found nothing.
///
/// A peer takes what the broker has for it with its next call, and rings when it takes a doorbell. So it says nothing unheard but in
/// the moment before the broker has sent it that doorbell. Who has slept for longer than that waits for a peer that makes no calls, for
/// hours perhaps.
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
