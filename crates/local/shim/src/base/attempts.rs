//! Decides which calls make an attempt that pays only if it succeeds: most of those after a success,
//! and few after several failures.

use std::cell::Cell;

/// Each failure in a row doubles the pause, up to 2 to the power of this.
const MOST_DOUBLINGS: u32 = 6;

/// What a thread has learned about one kind of attempt. All zeroes is the state before the first.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    /// Number of calls before the next attempt.
    pause: Cell<u32>,
    /// Failures since the last success.
    failures: Cell<u32>,
}

impl Attempts {
    /// Returns whether this call shall make an attempt.
    pub(crate) fn begin(&self) -> bool {
        let pause = self.pause.get();
        self.pause.set(pause.saturating_sub(1));
        pause == 0
    }

    /// Records the outcome of an attempt.
    pub(crate) fn note(&self, has_succeeded: bool) {
        let failures = if has_succeeded { 0 } else { (self.failures.get() + 1).min(MOST_DOUBLINGS) };
        self.failures.set(failures);
        self.pause.set((1 << failures) - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many of `calls` make an attempt, all with the same outcome.
    fn made(attempts: &Attempts, calls: u32, succeed: bool) -> usize {
        let begins = |_: &u32| {
            let begins = attempts.begin();
            if begins {
                attempts.note(succeed);
            }
            begins
        };
        (0..calls).filter(begins).count()
    }

    #[test]
    fn every_call_makes_an_attempt_while_all_succeed() {
        assert_eq!(made(&Attempts::default(), 100, true), 100);
    }

    #[test]
    fn attempts_that_fail_become_rare() {
        let attempts = Attempts::default();
        assert_eq!(made(&attempts, 64, false), 6);
        assert_eq!(made(&attempts, 6400, false), 100);
    }

    #[test]
    fn one_success_ends_the_pauses() {
        let attempts = Attempts::default();
        made(&attempts, 1000, false);
        assert!((0..64).any(|_| attempts.begin()));
        attempts.note(true);
        assert_eq!(made(&attempts, 100, true), 100);
    }
}
