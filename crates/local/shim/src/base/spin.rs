//! Spinning before a sleep, and before a non-blocking call reports that there is nothing. A thread
//! spins only while that has paid off, and while no other thread wants the processor.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::thread::sched_getaffinity;
use shunt_abi::page::Counter;

use crate::base::process::{self, Spin};
use crate::base::signal;
use crate::base::thread::{self, Spinner};

/// Spins until `ready` returns `true`, before this thread sleeps, as the settings and past results
/// allow. Returns whether it succeeded.
pub(crate) fn spin(ready: impl FnMut() -> bool) -> bool {
    thread::this().spinner.spin(&BEFORE_SLEEP, ready)
}

/// Spins before a non-blocking call reports that `what` has nothing. The program's way from there
/// to a sleep may be long (in Go it leads through the scheduler), and the bytes may come sooner.
///
/// Spins only if this thread's last such call was about the same `what`. A thread that serves
/// several connections has other work meanwhile.
pub(crate) fn linger(what: usize, ready: impl FnMut() -> bool) -> bool {
    let thread = thread::this();
    let again = thread.asked.replace(what) == what;
    again && process::spin() == Spin::Auto && thread.lingerer.spin(&BEFORE_NOTHING, ready)
}

/// The parameters of one occasion to spin.
struct Occasion {
    /// After a hit, the next spin is twice as long in automatic mode, but at least this,
    short: u64,
    /// and at most this.
    long: u64,
    /// Length of a trial: a spin that no hit precedes.
    trial: u64,
    trials: Trials,
}

/// A program in a slow language answers in 20 us, and a wake-up takes as long again. In a trial the
/// peer may be asleep, and an idle processor takes a while to wake. Once both threads are awake,
/// each finds the other within a microsecond.
static BEFORE_SLEEP: Occasion =
    Occasion { short: 20_000, long: 60_000, trial: 150_000, trials: Trials::new() };
/// Lengths are short, because both threads must be awake already.
static BEFORE_NOTHING: Occasion =
    Occasion { short: 5_000, long: 12_000, trial: 12_000, trials: Trials::new() };

/// A spin yields the processor so often, to learn whether another thread wants it. A trial yields
/// for the first time after a few checks.
const YIELD_NANOS: u64 = 5_000;
/// If a yield took longer than this, another thread wanted the processor. Spinning would take time
/// from threads that have work.
const OTHERS_NANOS: u64 = 3_000;
/// Number of checks between two readings of the clock.
const LOOKS: u32 = 32;
const MISSES_ALLOWED: u32 = 1;
const LONGEST_PAUSE: u32 = 4096;

impl Spinner {
    fn spin(&self, occasion: &Occasion, mut ready: impl FnMut() -> bool) -> bool {
        let Occasion { short, long, trial, trials } = occasion;
        let nanos = match process::spin() {
            Spin::Nanos(0) => return false,
            Spin::Nanos(nanos) => nanos,
            Spin::Auto if self.pause.get() > 0 => {
                self.pause.set(self.pause.get() - 1);
                return false;
            }
            Spin::Auto if IS_SINGLE.load(Relaxed) => return false,
            Spin::Auto if self.hit.get() > 0 => (2 * self.hit.get()).clamp(*short, *long),
            Spin::Auto if !trials.begin(process::now()) => return false,
            Spin::Auto => *trial,
        };
        let begin = process::now();
        let is_trial = self.hit.get() == 0;
        let mut yield_at = if is_trial { begin } else { begin + YIELD_NANOS };
        let (mut is_crowded, mut given) = (false, 0);
        let found = loop {
            if (0..LOOKS).any(|_| {
                std::hint::spin_loop();
                ready()
            }) {
                break true;
            }
            let now = process::now();
            if signal::has_deferred() || now - begin >= nanos {
                break false;
            }
            if now >= yield_at {
                rustix::thread::sched_yield();
                let after = process::now();
                if after - now > OTHERS_NANOS {
                    // Perhaps the peer ran: then its bytes are there now, but a sleep would have
                    // been as fast.
                    (is_crowded, given) = (true, after - now);
                    break ready();
                }
                yield_at = after + YIELD_NANOS;
            }
        };
        let spent = process::now() - begin;
        // Time that other threads had is not counted as spent.
        process::count(Counter::SpinNanos, spent - given);
        let has_paid = found && !is_crowded;
        match (is_crowded, is_trial) {
            (true, _) => trials.note_crowd(begin + spent),
            (false, true) if !found => trials.note_miss(begin + spent),
            _ => {}
        }
        self.hit.set(if has_paid { spent.max(1) } else { 0 });
        if has_paid {
            process::count(Counter::SpinHits, 1);
            if spent <= *long {
                self.misses.set(0);
                trials.note_hit();
            }
        } else {
            let misses = self.misses.get() + 1;
            self.misses.set(misses);
            if misses > MISSES_ALLOWED {
                self.pause.set((1 << (misses - MISSES_ALLOWED).min(16)).min(LONGEST_PAUSE));
            }
        }
        found
    }
}

/// The trials of all threads. What one thread learns holds for the others, of which there may be
/// hundreds. Only one thread tries at a time, and after a miss no thread tries for a while.
///
/// The pause is longer if another thread wanted the processor. A thread that yields there gets the
/// processor back after milliseconds, while a thread that is woken from a sleep gets it
/// immediately.
struct Trials {
    /// No trial begins before this time.
    next: AtomicU64,
    /// Length of the last pause. Hits make it shorter.
    left: AtomicU64,
}

/// Length of the pause after the second miss,
const LEFT_NANOS: u64 = 1_000_000;
/// after many misses in a row,
const LONGEST_LEFT_NANOS: u64 = 16_000_000;
/// and after many trials in a row that met another thread.
const LONGEST_CROWDED_NANOS: u64 = 128_000_000;

impl Trials {
    const fn new() -> Trials {
        Trials { next: AtomicU64::new(0), left: AtomicU64::new(0) }
    }

    /// Begins a trial, unless it is too early or another thread begins one. Returns whether it
    /// began.
    fn begin(&self, now: u64) -> bool {
        let next = self.next.load(Relaxed);
        let until = now + self.left.load(Relaxed).max(LEFT_NANOS);
        now >= next && self.next.compare_exchange(next, until, Relaxed, Relaxed).is_ok()
    }

    fn note_hit(&self) {
        // Writes only if needed: all threads read these words.
        let left = self.left.load(Relaxed);
        if left != 0 || self.next.load(Relaxed) != 0 {
            self.left.store(left / 4, Relaxed);
            self.next.store(0, Relaxed);
        }
    }

    /// Records a trial that found nothing.
    fn note_miss(&self, now: u64) {
        self.leave(now, LONGEST_LEFT_NANOS);
    }

    /// Records that another thread wanted the processor.
    fn note_crowd(&self, now: u64) {
        self.leave(now, LONGEST_CROWDED_NANOS);
    }

    /// Begins the next pause. The first miss after a row of hits causes almost none: it may be an
    /// exception.
    fn leave(&self, now: u64, longest: u64) {
        let left = match self.left.load(Relaxed) {
            0 => 1,
            left => (2 * left).clamp(LEFT_NANOS, longest),
        };
        self.left.store(left, Relaxed);
        self.next.store(now + left, Relaxed);
    }
}

/// Whether the whole machine has only one processor.
static IS_SINGLE: AtomicBool = AtomicBool::new(false);

/// Counts the processors. Runs before the program's first instruction: later, a program might
/// notice the descriptor that is open for a moment.
pub(crate) fn start() {
    let is_bound = sched_getaffinity(None).is_ok_and(|processors| processors.count() == 1);
    IS_SINGLE.store(is_bound && !has_several_processors(), Relaxed);
}

/// Returns whether the machine has several processors. A program that is bound to one may have
/// peers on others.
fn has_several_processors() -> bool {
    let file =
        openat(CWD, c"/sys/devices/system/cpu/online", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let mut listed = [0; 16];
    // Such as "0", "0-3" or "0,2".
    let len = file.and_then(|file| rustix::io::read(file, &mut listed)).unwrap_or(0);
    listed[..len].iter().any(|byte| matches!(byte, b'-' | b','))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Begins a trial at `now`, ends it by `note`, and returns when the next one may begin.
    fn next(trials: &Trials, now: u64, note: impl Fn(&Trials, u64)) -> u64 {
        assert!(trials.begin(now));
        assert!(!trials.begin(now), "another thread at the same time");
        note(trials, now);
        let next = trials.next.load(Relaxed);
        assert!(!trials.begin(next - 1));
        next
    }

    #[test]
    fn what_one_thread_has_missed_the_others_do_not_try() {
        let (trials, mut now) = (Trials::new(), 1);
        for left in [0, 1, 2, 4, 8, 16, 16] {
            let left = (left * LEFT_NANOS).max(1);
            assert_eq!(next(&trials, now, Trials::note_miss) - now, left);
            now += left;
        }
        trials.note_hit();
        assert!(trials.begin(now));
    }

    #[test]
    fn where_somebody_else_wants_the_processor_it_is_tried_seldom_until_it_pays() {
        let (trials, mut now) = (Trials::new(), 1);
        for _ in 0..12 {
            now = next(&trials, now, Trials::note_crowd);
        }
        assert_eq!(next(&trials, now, Trials::note_crowd) - now, LONGEST_CROWDED_NANOS);
        now += LONGEST_CROWDED_NANOS;
        assert_eq!(next(&trials, now, Trials::note_miss) - now, LONGEST_LEFT_NANOS, "they have gone");
        for _ in 0..12 {
            trials.note_hit();
        }
        assert_eq!(next(&trials, now, Trials::note_crowd) - now, 1, "forgotten");
    }
}
