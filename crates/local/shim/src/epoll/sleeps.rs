//! The threads that sleep in the kernel on an epoll instance.

use super::sleep_bound::{DEGRADED_NANOS, SleepBound};

#[derive(Default)]
pub(crate) struct Sleeps {
    threads: u32,
    /// All of them check the lanes by themselves, every [`DEGRADED_NANOS`] or somewhat later.
    are_short: bool,
    /// The last check found lanes with bytes that cannot be read yet.
    pub(super) unread_behind: bool,
}

impl Sleeps {
    /// Returns whether a thread sleeps here.
    #[inline]
    pub(super) fn has_some(&self) -> bool {
        self.threads > 0
    }

    /// Returns whether a thread sleeps here that does not check the lanes by itself.
    pub(super) fn has_long(&self) -> bool {
        self.has_some() && !self.are_short
    }

    /// Notes that a thread is about to sleep for at most `patience`.
    pub(super) fn begin(&mut self, patience: SleepBound) {
        self.are_short = patience.is_unrung() && (self.threads == 0 || self.are_short);
        self.threads += 1;
    }

    /// Notes that a thread does not sleep any more. An instance that was closed meanwhile counts
    /// from zero.
    pub(super) fn end(&mut self) {
        self.threads = self.threads.saturating_sub(1);
    }

    /// Forgets all threads: none is left in a forked child.
    pub(super) fn forget(&mut self) {
        self.threads = 0;
    }

    /// Returns the bound of a sleep, after the last check before it.
    pub(super) fn bound(&self, before: SleepBound) -> SleepBound {
        if self.unread_behind { SleepBound::Unrung(DEGRADED_NANOS) } else { before }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeps_are_short_only_if_each_of_them_is() {
        let (short, long) = (SleepBound::Unrung(DEGRADED_NANOS), SleepBound::Endless);
        for (bounds, has_long) in [
            (vec![short], false),
            (vec![long], true),
            (vec![short, short], false),
            (vec![short, long], true),
            (vec![long, short], true),
        ] {
            let mut sleeps = Sleeps::default();
            bounds.iter().for_each(|bound| sleeps.begin(*bound));
            assert_eq!(sleeps.has_long(), has_long, "{bounds:?}");
            bounds.iter().for_each(|_| sleeps.end());
            assert!(!sleeps.has_some() && !sleeps.has_long());
        }
    }
}
