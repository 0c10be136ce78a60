//! How long an operation waits, and how: it looks for a moment, as long as that pays, and then sleeps.

use std::hint::spin_loop;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::Timespec;

/// How long an operation may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    Never,
    /// As long as it takes.
    Forever,
    /// Until then.
    Until(Instant),
}

impl Wait {
    /// No longer than this from now on.
    pub fn at_most(duration: Duration) -> Wait {
        Instant::now().checked_add(duration).map_or(Wait::Forever, Wait::Until)
    }

    /// What is left of it, for a system call; nothing is for ever.
    pub(crate) fn left(self) -> Option<Timespec> {
        let left = match self {
            Wait::Forever => return None,
            Wait::Never => Duration::ZERO,
            Wait::Until(then) => then.saturating_duration_since(Instant::now()),
        };
        Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
    }

    /// Whether it is over, for one that has waited.
    pub(crate) fn is_over(self) -> bool {
        match self {
            Wait::Never => true,
            Wait::Forever => false,
            Wait::Until(then) => Instant::now() >= then,
        }
    }
}

/// Looking before sleeping.
#[derive(Debug)]
pub(crate) struct Spin {
    limit: Duration,
    /// Waits since the last look, where looking does not pay.
    skipped: u32,
}

/// A sleep and a wake-up take about as long.
const MOST: Duration = Duration::from_micros(50);
const LEAST: Duration = Duration::from_micros(4);
/// Where looking has not paid, it is tried again once in so many waits.
const AGAIN: u32 = 16;
/// Looks between two looks at the clock.
const BATCH: u32 = 16;

impl Spin {
    pub(crate) fn new() -> Spin {
        Spin { limit: if is_alone() { Duration::ZERO } else { MOST }, skipped: 0 }
    }

    /// Looks until there is something, for a moment. `None`: there is nothing yet.
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

/// Whether there is only one processor: then nothing comes while one looks.
fn is_alone() -> bool {
    static ALONE: OnceLock<bool> = OnceLock::new();
    *ALONE.get_or_init(|| std::thread::available_parallelism().is_ok_and(|count| count.get() == 1))
}
