//! The waiters of this process: who sleeps, and by which doorbell it is woken.
//!
//! A waiter owns one of 64 slots and a doorbell. Threads get theirs when they first sleep on a lane,
//! and keep it while there are enough; epoll instances when a registered connection is first watched. A slot's doorbell is made once and used again by the
//! next owner, so that the broker hears of it once. An instance listens to it in its own kernel set, a thread by a
//! descriptor that belongs to the slot.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::*};

use shunt_abi::geometry::WAITERS;
use shunt_abi::page::Counter;

use crate::base::above::Above;
use crate::base::private::PrivateFd;
use crate::base::process::{self, Spin};
use crate::base::{signal, thread};

static TAKEN: AtomicU64 = AtomicU64::new(0);
static DOORBELLS: [AtomicI32; WAITERS] = [const { AtomicI32::new(-1) }; WAITERS];
/// What a thread sleeps on: see `shunt_sys::eventfd::listen`. Made when a thread first has the slot.
static LISTENERS: [AtomicI32; WAITERS] = [const { AtomicI32::new(-1) }; WAITERS];
/// Slots whose doorbell the present broker has been told.
static TOLD: AtomicU64 = AtomicU64::new(0);
/// Tells it of one.
pub(crate) static TELL_BROKER: Above<Slot> = Above::new();

/// A slot, owned until given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(pub(crate) usize);

impl Slot {
    /// Takes a free slot. `None` when 64 are taken or there is no descriptor for a doorbell: the waiter then
    /// sleeps in short steps.
    pub(crate) fn take() -> Option<Slot> {
        let mut taken = TAKEN.load(Acquire);
        let index = loop {
            let index = (!taken).trailing_zeros() as usize;
            if index == WAITERS {
                return None;
            }
            match TAKEN.compare_exchange(taken, taken | 1 << index, AcqRel, Acquire) {
                Ok(_) => break index,
                Err(now) => taken = now,
            }
        };
        let slot = Slot(index);
        if !make(&DOORBELLS[index], shunt_sys::eventfd::create) {
            slot.give_back();
            return None;
        }
        Some(slot)
    }

    /// Takes a free slot for a thread, which can then sleep on its [`listener`](Self::listener).
    fn take_for_thread() -> Option<Slot> {
        let slot = Slot::take()?;
        if slot.make_listener().is_none() {
            slot.give_back();
            return None;
        }
        Some(slot)
    }

    /// The [`listener`](Self::listener), also if nobody had one before.
    pub(crate) fn make_listener(self) -> Option<i32> {
        let listen = || {
            let made = PrivateFd::lend(&DOORBELLS[self.0], |fd| shunt_sys::eventfd::listen(fd));
            made.unwrap_or(Err(rustix::io::Errno::BADF))
        };
        make(&LISTENERS[self.0], listen).then(|| self.listener())
    }

    pub(crate) fn give_back(self) {
        TAKEN.fetch_and(!(1 << self.0), AcqRel);
    }

    /// The number of the doorbell.
    pub(crate) fn doorbell(self) -> i32 {
        DOORBELLS[self.0].load(Acquire)
    }

    /// The descriptor that is readable once the doorbell has been rung, until that is [heard](Self::hear).
    pub(crate) fn listener(self) -> i32 {
        LISTENERS[self.0].load(Acquire)
    }

    /// Tells the broker, unless it knows. Whoever cannot be told is woken by its own short sleeps.
    pub(crate) fn register(self) {
        if TOLD.load(Acquire) & 1 << self.0 == 0 {
            TELL_BROKER.call(self);
        }
    }

    /// The broker knows it.
    pub(crate) fn note_told(self) {
        TOLD.fetch_or(1 << self.0, AcqRel);
    }

    /// Wakes this waiter: something it must look at has changed.
    pub(crate) fn ring(self) {
        PrivateFd::lend(&DOORBELLS[self.0], |fd| {
            let _ = shunt_sys::eventfd::ring(fd);
        });
    }

    /// Takes note of the rings so far.
    pub(crate) fn hear(self) {
        PrivateFd::lend(&LISTENERS[self.0], |fd| {
            let _ = shunt_sys::eventfd::heard(fd);
        });
    }
}

/// Has a slot's descriptor made, unless an earlier owner had. `false` if there is none left.
fn make(place: &AtomicI32, new: impl FnOnce() -> rustix::io::Result<OwnedFd>) -> bool {
    if place.load(Acquire) < 0 {
        match new().ok().and_then(PrivateFd::adopt) {
            Some(made) => place.store(made.into_raw(), Release),
            None => return false,
        }
    }
    true
}

/// A descriptor has moved to another number; the broker and the peers hold the eventfd itself.
pub(crate) fn renumber(old: i32, new: i32) {
    for place in DOORBELLS.iter().chain(&LISTENERS) {
        let _ = place.compare_exchange(old, new, SeqCst, Relaxed);
    }
}

/// A new broker knows no doorbell yet.
pub(crate) fn forget_told() {
    TOLD.store(0, Release);
}

/// Those that somebody has.
pub(crate) fn in_use() -> impl Iterator<Item = Slot> {
    let taken = TAKEN.load(Acquire);
    (0..WAITERS).filter(move |slot| taken & 1 << slot != 0).map(Slot)
}

/// Wakes every waiter, where it cannot be told which of them it concerns.
pub(crate) fn ring_all() {
    in_use().for_each(Slot::ring);
}

/// A forked child has none of its parent's waiters.
pub(crate) fn after_fork_in_child() {
    for place in DOORBELLS.iter().chain(&LISTENERS) {
        PrivateFd::close_raw(place.swap(-1, AcqRel));
    }
    TAKEN.store(0, Release);
    TOLD.store(0, Release);
    thread::this().take_slot();
}

/// While fewer slots are free, a thread has one only as long as it waits: of hundreds of threads, few do at a time.
const SCARCE: u32 = 16;

/// What waits in `call`, if anything does, waits by the slot of this thread.
pub(crate) fn waiting<T>(call: impl FnOnce() -> T) -> T {
    let thread = thread::this();
    thread.begin_wait();
    let result = call();
    if thread.end_wait()
        && thread.slot().is_some()
        && TAKEN.load(Relaxed).count_zeros() < SCARCE
        && let Some(slot) = thread.take_slot()
    {
        slot.give_back();
    }
    result
}

/// The slot of this thread, taken at first use.
pub(crate) fn of_this_thread() -> Option<Slot> {
    let thread = thread::this();
    if thread.slot().is_none()
        && let Some(slot) = Slot::take_for_thread()
    {
        thread.set_slot(slot);
    }
    thread.slot()
}

/// Spins for this thread as its settings and its luck allow, until `ready` says so. `true` if it did.
pub(crate) fn spin(ready: impl FnMut() -> bool) -> bool {
    thread::this().spinner.spin(ready)
}

/// Adaptive spinning: only while it has been paying off.
pub(crate) struct Spinner {
    /// Sleeps to go without spinning.
    pause: Cell<u32>,
    /// Misses since the last quick hit; the pause doubles with each.
    misses: Cell<u32>,
    /// How long the last spin took, if it hit; else 0.
    hit: Cell<u64>,
}

/// Once a spin has hit, the next is twice as long in automatic mode, but at least
const SHORT_NANOS: u64 = 20_000;
/// and at most this: a program in a slow language answers in 20 us, and to wake up takes as long again.
const LONG_NANOS: u64 = 60_000;
/// The longest before that: the peer may be asleep, and a processor that is idle takes a while to wake. Once both are awake
/// they find each other at once.
const TRIAL_NANOS: u64 = 150_000;
/// How long a spin goes on before it asks whether somebody else wants the processor; one without a hit before it only looks a few times.
const YIELD_NANOS: u64 = 5_000;
/// Somebody does if giving it up took as long as this: then spinning takes time from those who have something to do.
const OTHERS_NANOS: u64 = 3_000;
/// Looks between two looks at the clock.
const LOOKS: u32 = 32;
const MISSES_ALLOWED: u32 = 1;
const LONGEST_PAUSE: u32 = 4096;

impl Spinner {
    fn spin(&self, mut ready: impl FnMut() -> bool) -> bool {
        let nanos = match process::spin() {
            Spin::Nanos(0) => return false,
            Spin::Nanos(nanos) => nanos,
            Spin::Auto if self.pause.get() > 0 => {
                self.pause.set(self.pause.get() - 1);
                return false;
            }
            Spin::Auto if single_processor() => return false,
            Spin::Auto if self.hit.get() > 0 => (2 * self.hit.get()).clamp(SHORT_NANOS, LONG_NANOS),
            Spin::Auto if !TRIALS.begin(process::now()) => return false,
            Spin::Auto => TRIAL_NANOS,
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
                    // Perhaps the peer itself: then it is there now, but a sleep would have been as quick.
                    (is_crowded, given) = (true, after - now);
                    break ready();
                }
                yield_at = after + YIELD_NANOS;
            }
        };
        let spent = process::now() - begin;
        // What others have had of it is not spent.
        process::count(Counter::SpinNanos, spent - given);
        let has_paid = found && !is_crowded;
        match (is_crowded, is_trial) {
            (true, _) => TRIALS.note_crowd(begin + spent),
            (false, true) if !found => TRIALS.note_miss(begin + spent),
            _ => {}
        }
        self.hit.set(if has_paid { spent.max(1) } else { 0 });
        if has_paid {
            process::count(Counter::SpinHits, 1);
            if spent <= LONG_NANOS {
                self.misses.set(0);
                TRIALS.note_hit();
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

/// Spins without a hit before them, by all threads together. What one of them learns holds for the others, of which there may be
/// hundreds: one tries at a time, and where that finds nothing none tries again for a while. For longer still where somebody else wants the
/// processor: who gives it up there has it back after milliseconds, while who is woken from a sleep has it at once.
struct Trials {
    /// No other begins before this time.
    next: AtomicU64,
    /// How long they were last left alone; less after each hit.
    left: AtomicU64,
}

static TRIALS: Trials = Trials { next: AtomicU64::new(0), left: AtomicU64::new(0) };

/// How long they are left alone after the second that has not paid,
const LEFT_NANOS: u64 = 1_000_000;
/// after many in a row that found nothing,
const LONGEST_LEFT_NANOS: u64 = 16_000_000;
/// and after many that found somebody else.
const LONGEST_CROWDED_NANOS: u64 = 128_000_000;

impl Trials {
    /// Whether one may begin.
    fn begin(&self, now: u64) -> bool {
        let next = self.next.load(Relaxed);
        let until = now + self.left.load(Relaxed).max(LEFT_NANOS);
        now >= next && self.next.compare_exchange(next, until, Relaxed, Relaxed).is_ok()
    }

    fn note_hit(&self) {
        // Not written without need: all threads look here.
        let left = self.left.load(Relaxed);
        if left != 0 || self.next.load(Relaxed) != 0 {
            self.left.store(left / 4, Relaxed);
            self.next.store(0, Relaxed);
        }
    }

    /// One has found nothing.
    fn note_miss(&self, now: u64) {
        self.leave(now, LONGEST_LEFT_NANOS);
    }

    /// Somebody else wants the processor.
    fn note_crowd(&self, now: u64) {
        self.leave(now, LONGEST_CROWDED_NANOS);
    }

    /// After a row of hits one that has not paid counts for nothing: something passed by.
    fn leave(&self, now: u64, longest: u64) {
        let left = match self.left.load(Relaxed) {
            0 => 1,
            left => (2 * left).clamp(LEFT_NANOS, longest),
        };
        self.left.store(left, Relaxed);
        self.next.store(now + left, Relaxed);
    }
}

/// Of the whole machine: a program that is bound to one processor may have peers on others.
fn single_processor() -> bool {
    static PROCESSORS: AtomicI32 = AtomicI32::new(0);
    if PROCESSORS.load(Relaxed) == 0 {
        // SAFETY: a plain call.
        let online = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        PROCESSORS.store(online.max(1) as i32, Relaxed);
    }
    PROCESSORS.load(Relaxed) == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new() -> Trials {
        Trials { next: AtomicU64::new(0), left: AtomicU64::new(0) }
    }

    /// When the next may begin, after one at `now` that ends by `note`.
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
        let (trials, mut now) = (new(), 1);
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
        let (trials, mut now) = (new(), 1);
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
