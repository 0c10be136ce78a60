//! Keeps conversations out of the kernel while its worker threads are late.
//!
//! What the program redirects is sent by a worker thread of the kernel. On a busy machine such a thread
//! waits for its processor like any other, sometimes for seconds, and the message cannot be taken back.
//! So with the automatic engine one thread of the service sends bytes through the kernel's workers, as
//! messages go (a *probe*), before a conversation moves and while some are in the kernel.
//!
//! ```text
//!            a conversation wants to move              a probe is late
//!  Unknown ───────────────────────────────► InTime ──────────────────────► Late
//!    ▲ ▲    and all probes are in time        │                            ▲ │
//!    │ └─── no conversation is in the kernel ─┘                            │ │
//!    │ └──────── a conversation wants to move, and a probe is late ────────┘ │
//!    └──────────────────────────────────── the hold is over ─────────────────┘
//! ```
//!
//! The hold is one second. After conversations were in the kernel it doubles, if the time between two
//! holds was short.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use shunt_kernel::delay::Probe;

use super::events::milliseconds;
use super::shared::Shared;

/// A probe that takes longer is late.
const LIMIT: Duration = Duration::from_millis(20);
/// After so many milliseconds the other threads do not wait for the result of a probe.
const OVERDUE: u64 = 100;
/// The interval between probes while conversations are in the kernel, and their number.
const INTERVAL: Duration = Duration::from_millis(200);
const PROBES: usize = 2;
/// The most probes before a conversation moves.
const FIRST_PROBES: usize = 16;
/// The first and the longest hold.
const HOLD: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(64));
/// After so many holds in time, the next hold is the first one again.
const FORGET: u32 = 4;

/// What the threads of a service know about the kernel's worker threads.
#[derive(Debug, Default)]
pub(crate) struct Delays {
    known: AtomicU8,
    /// When the current probe began, or when the next one will, in milliseconds, or 0 if there is none.
    /// The thread that probes may get no processor to say that it is late.
    due: AtomicU64,
    /// A conversation wants to move to the kernel.
    is_asked: AtomicBool,
    is_stopped: Mutex<bool>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Known {
    Unknown,
    InTime,
    Late,
}

impl Delays {
    /// Returns true if conversations may move to the kernel now. If that is unknown, has it measured.
    pub(crate) fn may_enter(&self) -> bool {
        let known = self.known.load(Relaxed);
        if known == Known::Unknown as u8 && !self.is_asked.swap(true, Relaxed) {
            // The lock orders this with the check before the wait.
            drop(self.is_stopped.lock().expect(NEVER));
            self.changed.notify_all();
        }
        known == Known::InTime as u8 && !self.is_overdue()
    }

    /// Returns true if conversations must leave the kernel.
    pub(crate) fn are_late(&self) -> bool {
        self.known.load(Relaxed) == Known::Late as u8 || self.is_overdue()
    }

    fn is_overdue(&self) -> bool {
        let due = self.due.load(Relaxed);
        due > 0 && milliseconds().saturating_sub(due) > OVERDUE
    }

    /// Ends [`Self::watch`].
    pub(crate) fn stop(&self) {
        *self.is_stopped.lock().expect(NEVER) = true;
        self.changed.notify_all();
    }

    /// Loads the probe. If that fails, conversations may always move.
    ///
    /// This reads all types of the kernel. The memory of the thread that does so stays large, so the
    /// thread is the one that has loaded the service too.
    pub(crate) fn prepare(&self) -> Option<Probe> {
        let probe = Probe::load();
        if let Err(error) = &probe {
            tracing::warn!(%error, "the delay of the kernel's worker threads is not measured");
            self.known.store(Known::InTime as u8, Relaxed);
        }
        probe.ok()
    }

    /// Probes until [`Self::stop`].
    pub(crate) fn watch(&self, mut probe: Probe, shared: &Shared) {
        let (mut state, mut processors) = (State::new(), Processors::new());
        loop {
            let due = match state.phase {
                Phase::InTime => milliseconds() + INTERVAL.as_millis() as u64,
                _ => 0,
            };
            self.due.store(due, Relaxed);
            if !self.wait(state.pause(Instant::now())) {
                return;
            }
            let mut probes = |count: usize| {
                let count = count.min(processors.count());
                let are_in_time = (0..count).all(|_| {
                    // Until this thread runs there, others wait there too.
                    let began = Instant::now();
                    self.due.store(milliseconds(), Relaxed);
                    processors.go_to_next();
                    matches!(probe.measure(LIMIT), Ok(Some(_))) && began.elapsed() <= LIMIT
                });
                processors.go_anywhere();
                are_in_time
            };
            let event = match state.phase {
                Phase::Unknown => Event::Probed(probes(FIRST_PROBES)),
                Phase::InTime if shared.in_kernel() == 0 => Event::Unused,
                Phase::InTime => Event::Probed(probes(PROBES)),
                Phase::Late { .. } => Event::Waited,
            };
            let before = state.known();
            state.step(event, Instant::now());
            self.is_asked.store(false, Relaxed);
            self.known.store(state.known() as u8, Relaxed);
            if (before == Known::Late) != (state.known() == Known::Late) {
                shared.drain.wake();
            }
        }
    }

    /// Waits for so long, or until a conversation wants to move. Returns false after [`Self::stop`].
    fn wait(&self, pause: Option<Duration>) -> bool {
        let is_stopped = self.is_stopped.lock().expect(NEVER);
        let is_stopped = match pause {
            Some(pause) => self.changed.wait_timeout_while(is_stopped, pause, |it| !*it).expect(NEVER).0,
            None => {
                self.changed.wait_while(is_stopped, |it| !*it && !self.is_asked.load(Relaxed)).expect(NEVER)
            }
        };
        !*is_stopped
    }
}

const NEVER: &str = "no thread panics with it";

#[derive(Clone, Copy, Debug)]
enum Phase {
    Unknown,
    InTime,
    Late { until: Instant },
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// All probes were in time, or one was late.
    Probed(bool),
    /// No conversation is in the kernel.
    Unused,
    /// The pause is over.
    Waited,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// The last hold after conversations were in the kernel.
    hold: Duration,
    /// When a hold last ended.
    ended: Option<Instant>,
}

impl State {
    fn new() -> State {
        State { phase: Phase::Unknown, hold: HOLD.0, ended: None }
    }

    fn known(&self) -> Known {
        match self.phase {
            Phase::Unknown => Known::Unknown,
            Phase::InTime => Known::InTime,
            Phase::Late { .. } => Known::Late,
        }
    }

    /// Returns the time until the next event, or `None` if nothing happens until a conversation wants to
    /// move.
    fn pause(&self, now: Instant) -> Option<Duration> {
        match self.phase {
            Phase::Unknown => None,
            Phase::InTime => Some(INTERVAL),
            Phase::Late { until } => Some(until.saturating_duration_since(now)),
        }
    }

    fn step(&mut self, event: Event, now: Instant) {
        self.phase = match (self.phase, event) {
            (Phase::Late { until }, _) if now < until => return,
            (Phase::Late { .. }, _) => {
                self.ended = Some(now);
                Phase::Unknown
            }
            (Phase::Unknown, Event::Probed(true)) => Phase::InTime,
            (Phase::InTime, Event::Unused) => Phase::Unknown,
            // No message has waited.
            (Phase::Unknown, Event::Probed(false)) => Phase::Late { until: now + HOLD.0 },
            (_, Event::Probed(false)) => {
                let was_short = self.ended.is_some_and(|ended| now - ended < self.hold * FORGET);
                self.hold = if was_short { (self.hold * 2).min(HOLD.1) } else { HOLD.0 };
                Phase::Late { until: now + self.hold }
            }
            (phase, _) => phase,
        };
    }
}

/// The processors that this thread may use. It visits them in turn.
struct Processors {
    set: CpuSet,
    all: Vec<usize>,
    next: usize,
}

impl Processors {
    fn new() -> Processors {
        let set = sched_getaffinity(None).unwrap_or_default();
        let all = (0..CpuSet::MAX_CPU).filter(|processor| set.is_set(*processor)).collect();
        Processors { set, all, next: 0 }
    }

    fn count(&self) -> usize {
        self.all.len().max(1)
    }

    fn go_anywhere(&self) {
        let _ = sched_setaffinity(None, &self.set);
    }

    fn go_to_next(&mut self) {
        let Some(processor) = self.all.get(self.next) else { return };
        let mut one = CpuSet::new();
        one.set(*processor);
        // The processor may be gone. Then the probe is that of another.
        let _ = sched_setaffinity(None, &one);
        self.next = (self.next + 1) % self.all.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of a second each.
    fn after(events: &[Event]) -> (Known, Duration) {
        let (mut state, begin) = (State::new(), Instant::now());
        for (second, event) in events.iter().enumerate() {
            state.step(*event, begin + Duration::from_secs(second as u64));
        }
        (state.known(), state.hold)
    }

    #[test]
    fn conversations_move_only_after_probes_in_time() {
        use Event::{Probed, Unused, Waited};
        assert_eq!(after(&[]).0, Known::Unknown);
        assert_eq!(after(&[Probed(true)]).0, Known::InTime);
        assert_eq!(after(&[Probed(false)]).0, Known::Late);
        assert_eq!(after(&[Probed(true), Probed(true)]).0, Known::InTime);
        assert_eq!(after(&[Probed(true), Probed(false)]).0, Known::Late);
        assert_eq!(after(&[Probed(true), Unused]).0, Known::Unknown);
        assert_eq!(after(&[Probed(false), Waited]).0, Known::Unknown);
    }

    #[test]
    fn a_hold_doubles_and_is_forgotten() {
        use Event::{Probed, Unused, Waited};
        let late_again = [Probed(true), Probed(false), Waited, Probed(true), Probed(false)];
        assert_eq!(after(&late_again), (Known::Late, Duration::from_secs(2)));
        // The second hold is not over after a second.
        assert_eq!(after(&[&late_again[..], &[Waited]].concat()).0, Known::Late);
        assert_eq!(after(&[&late_again[..], &[Waited, Waited]].concat()).0, Known::Unknown);
        let much_later = [&late_again[..4], &[Probed(true); 9], &[Probed(false)]].concat();
        assert_eq!(after(&much_later), (Known::Late, HOLD.0));
        let unused = [&late_again[..4], &[Unused; 9], &[Probed(false)]].concat();
        assert_eq!(after(&unused), (Known::Late, HOLD.0));
        let never_in_the_kernel = [Probed(false)].repeat(1000);
        assert_eq!(after(&never_in_the_kernel).1, HOLD.0);
        let always = [Probed(true), Probed(false), Waited].repeat(1000);
        assert_eq!(after(&always).1, HOLD.1);
    }
}
