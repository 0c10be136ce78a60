//! How much processor time somebody may have of the broker's, measured by the clock of the thread.
//!
//! A system call on a stranger's file can take the kernel a fifth of a second, although it never
//! sleeps: a write to an eventfd or to a socket walks the list of everybody who watches that file,
//! which its owner can make a million entries long. What such a call has cost is known only
//! afterwards. So it is a debt, which is paid off with time.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// What may be owed before anything is put off.
const BURST: Duration = Duration::from_millis(50);
/// Of so much time that passes, a unit is paid off: a fiftieth of a processor.
const SHARE: u32 = 50;

/// What somebody owes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowance {
    debt: Duration,
    at: Instant,
}

impl Allowance {
    pub(crate) fn new(now: Instant) -> Allowance {
        Allowance { debt: Duration::ZERO, at: now }
    }

    /// Adds what something has cost.
    pub(crate) fn spend(&mut self, cost: Duration, now: Instant) {
        self.debt = self.owed(now) + cost;
        self.at = now;
    }

    /// Returns how long the next thing is put off.
    pub(crate) fn pause(&self, now: Instant) -> Duration {
        self.owed(now).saturating_sub(BURST) * SHARE
    }

    /// Whether nothing is owed.
    pub(crate) fn is_clear(&self, now: Instant) -> bool {
        self.owed(now).is_zero()
    }

    fn owed(&self, now: Instant) -> Duration {
        self.debt.saturating_sub(now.saturating_duration_since(self.at) / SHARE)
    }
}

/// Runs `work` and returns the processor time that it has taken of this thread.
pub(crate) fn measured<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let before = thread_time();
    let result = work();
    (result, thread_time().saturating_sub(before))
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_costs_little_is_never_put_off() {
        let mut now = Instant::now();
        let mut allowance = Allowance::new(now);
        for _ in 0..10_000 {
            assert_eq!(allowance.pause(now), Duration::ZERO);
            allowance.spend(MS / 500, now);
            now += MS / 10;
        }
    }

    #[test]
    fn what_costs_much_has_a_fiftieth_of_a_processor() {
        let start = Instant::now();
        let (mut now, mut spent) = (start, Duration::ZERO);
        let mut allowance = Allowance::new(now);
        while now < start + 100_000 * MS {
            allowance.spend(200 * MS, now);
            spent += 200 * MS;
            now += allowance.pause(now);
        }
        assert!(spent <= (now - start) / SHARE + 250 * MS, "{spent:?}");
        assert!(!allowance.is_clear(now) && allowance.is_clear(now + BURST * SHARE));
    }

    #[test]
    fn time_that_a_thread_sleeps_costs_nothing() {
        let ((), cost) = measured(|| std::thread::sleep(20 * MS));
        assert!(cost < 20 * MS, "{cost:?}");
    }
}
