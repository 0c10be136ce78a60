//! How long and how an operation waits: it spins for a moment, as long as that pays, and then
//! sleeps.

use std::hint::spin_loop;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::Timespec;

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
}

/// About the time that a sleep and a wake-up take.
const MOST: Duration = Duration::from_micros(50);
const LEAST: Duration = Duration::from_micros(4);
/// Where spinning has not paid, it is tried again once in this number of waits.
const AGAIN: u32 = 16;
/// Number of checks between two reads of the clock.
const BATCH: u32 = 16;

impl Spin {
    pub(crate) fn new() -> Spin {
        Spin { limit: if is_alone() { Duration::ZERO } else { MOST }, skipped: 0 }
    }

    /// Spins until `look` returns a value, for a limited time. Returns `None` if there is nothing
    /// yet.
    #[inline]
    pub(crate) fn until<T>(&mut self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        if self.limit < LEAST {
            self.skipped += 1;
            if self.skipped < AGAIN || is_alone() {
                return None;
            }
            (self.skipped, self.limit) = (0, MOST);
        }
        let begin = Instant::now();
        loop {
            for _ in 0..BATCH {
                if let Some(found) = look() {
                    self.limit = (self.limit * 2).min(MOST);
                    return Some(found);
                }
                spin_loop();
            }
            if begin.elapsed() >= self.limit {
                self.limit /= 2;
                return None;
            }
        }
    }
}

/// Returns whether there is only one processor: then no other thread makes progress during a spin.
fn is_alone() -> bool {
    static ALONE: OnceLock<bool> = OnceLock::new();
    *ALONE.get_or_init(|| std::thread::available_parallelism().is_ok_and(|count| count.get() == 1))
}
