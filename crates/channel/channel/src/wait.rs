//! How long and how an operation waits: it spins for a moment, as long as that pays, and then
//! sleeps.

use std::hint::spin_loop;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::thread::sched_getaffinity;

/// The time that an operation may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    Never,
    /// Without limit.
    Forever,
    /// Until this time.
    Until(Instant),
}

impl Wait {
    /// Waits for at most `duration` from now on.
    pub fn at_most(duration: Duration) -> Wait {
        Instant::now().checked_add(duration).map_or(Wait::Forever, Wait::Until)
    }

    /// Returns the rest of the time, for a system call; `None` means without limit.
    pub(crate) fn left(self) -> Option<Timespec> {
        let left = match self {
            Wait::Forever => return None,
            Wait::Never => Duration::ZERO,
            Wait::Until(then) => then.saturating_duration_since(Instant::now()),
        };
        Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
    }

    /// Returns whether the time is over, for an operation that has waited.
    pub(crate) fn is_over(self) -> bool {
        match self {
            Wait::Never => true,
            Wait::Forever => false,
            Wait::Until(then) => Instant::now() >= then,
        }
    }
}

/// The pause between two tries while the other end, or the kernel, has no room for another connection
/// or for descriptors.
pub(crate) const PAUSE: Duration = Duration::from_millis(1);

/// Spinning before a sleep.
#[derive(Debug)]
pub(crate) struct Spin {
    limit: Duration,
    /// Number of waits since the last spin, while spinning does not pay.
    skipped: u32,
    /// Number of waits after which spinning is tried again.
    again: u32,
    is_alone: bool,
}

/// About the time that a sleep and a wake-up take.
const MOST: Duration = Duration::from_micros(50);
const LEAST: Duration = Duration::from_micros(4);
/// Where spinning has not paid, it is tried again after this number of waits, and twice as many
/// after each trial that does not pay either,
const AGAIN: u32 = 16;
/// up to this.
const RARELY: u32 = 1024;
/// Number of checks between two reads of the clock.
const BATCH: u32 = 16;

impl Spin {
    pub(crate) fn new() -> Spin {
        Spin { limit: MOST, skipped: 0, again: AGAIN, is_alone: is_alone() }
    }

    /// Spins until `look` returns a value, for a limited time. Returns `None` if there is nothing
    /// yet.
    #[inline]
    pub(crate) fn until<T>(&mut self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if self.is_alone {
            return None;
        }
        let is_trial = self.limit < LEAST;
        if is_trial {
            self.skipped += 1;
            if self.skipped < self.again {
                return None;
            }
            (self.skipped, self.limit) = (0, MOST);
        }
        let begin = Instant::now();
        loop {
            for _ in 0..BATCH {
                if let Some(found) = look() {
                    (self.limit, self.again) = ((self.limit * 2).min(MOST), AGAIN);
                    return Some(found);
                }
                spin_loop();
            }
            if begin.elapsed() >= self.limit {
                // A trial costs much, so only one that has paid is followed by others.
                if is_trial {
                    (self.limit, self.again) = (Duration::ZERO, (self.again * 2).min(RARELY));
                } else {
                    self.limit /= 2;
                }
                return None;
            }
        }
    }
}

/// Returns whether the machine has only one processor: then no other thread makes progress during a
/// spin. A process that is bound to one of several may have its peer on another.
fn is_alone() -> bool {
    static ALONE: OnceLock<bool> = OnceLock::new();
    *ALONE.get_or_init(|| {
        let is_bound = sched_getaffinity(None).is_ok_and(|processors| processors.count() == 1);
        // Such as "0", "0-3" or "0,2".
        let online = || std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        is_bound && !online().contains(['-', ','])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spin_that_does_not_pay_is_tried_ever_more_rarely() {
        let mut spin = Spin { is_alone: false, ..Spin::new() };
        let looks = |spin: &mut Spin| {
            let mut has_looked = false;
            let look = || {
                has_looked = true;
                None::<()>
            };
            assert_eq!(spin.until(look), None);
            has_looked
        };
        while spin.limit >= LEAST {
            assert!(looks(&mut spin));
        }
        for pause in [AGAIN, 2 * AGAIN, 4 * AGAIN] {
            assert!((1..pause).all(|_| !looks(&mut spin)));
            assert!(looks(&mut spin), "after {pause} waits");
        }
        assert!((1..8 * AGAIN).all(|_| !looks(&mut spin)));
        assert_eq!(spin.until(|| Some(7)), Some(7));
        assert!(looks(&mut spin) && spin.again == AGAIN);
        let mut alone = Spin { is_alone: true, ..Spin::new() };
        assert!(!looks(&mut alone));
    }
}
