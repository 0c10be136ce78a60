//! Measures which engine serves a thread's messages faster, and decides where calm conversations
//! stay.
//!
//! The kernel serves a message on the processor of the client, and wakes no thread. That is faster
//! for clients that run on several processors, and slower if one busy client has to share its
//! processor while another one is idle. On a busy machine the kernel's worker threads wait for the
//! processor. No counter of a conversation shows which case it is, so a thread tries both engines
//! with all its calm conversations, in turns, and compares how many messages it served:
//!
//! ```text
//!            enough messages            the move is over              end of the window
//!   Idle ───────────────────► Moving ─────────────────────► Measuring ─────────────────► Moving, or
//!    ▲  too few messages                                                                 the same
//!    └────────────────────── Decided ◄───────────────────────────────────────────────── engine again
//!                               │                the difference is clear, or the windows are over
//!                               └─ after a hold, which doubles while the result stays the same: Moving
//! ```
//!
//! For example, the windows are K U U K K U: a pair is two consecutive windows with different
//! engines, so drift of the load cancels, and half of the moves are saved.

use std::time::{Duration, Instant};

/// An engine, as the place of calm conversations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    User,
    Kernel,
}

/// The comparison of one thread.
#[derive(Debug)]
pub(crate) struct Contest {
    phase: Phase,
    side: Side,
    /// The rate of the first window of the current pair, in messages per second.
    first: Option<f64>,
    /// Logarithms of the ratio of user space's rate to the kernel's, each with its weight.
    pairs: Vec<(f64, f64)>,
    /// Conversations in the kernel before the last move to user space.
    members: usize,
    /// How long the next decision holds.
    hold: Duration,
    /// The last decision, and the rate at which it was made.
    last: Option<(Side, f64)>,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Calm conversations go to the kernel. `Some`: the rate is measured since then.
    Idle(Option<Mark>),
    /// Conversations move to `side` until they are there, or until then. They are checked next at the
    /// second instant.
    Moving(Instant, Instant),
    /// A window that began with this mark.
    Measuring(Mark),
    /// `side` is faster. The mark is of the last check of the rate; the instants are those of the
    /// decision and of the next comparison.
    Decided { since: Instant, until: Instant, mark: Mark },
}

/// The number of messages at a time.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at: Instant,
    messages: u64,
}

impl Mark {
    fn rate(self, now: Instant, messages: u64) -> f64 {
        messages.saturating_sub(self.messages) as f64 / (now - self.at).as_secs_f64().max(1e-6)
    }
}

/// What a thread knows at a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) now: Instant,
    /// Messages served so far, by both engines.
    pub(crate) messages: u64,
    /// Conversations that the kernel owns.
    pub(crate) in_kernel: usize,
    /// Conversations on their way to user space, or out of the kernel's map.
    pub(crate) moving: usize,
    pub(crate) conversations: usize,
}

/// Below this rate the engines are not compared: the kernel answers earlier, and clients wait anyway.
const LEAST_RATE: f64 = 4000.0;
/// The length of the first windows. Each two pairs later it doubles.
const WINDOW: Duration = Duration::from_millis(15);
/// A part of a window for each conversation, whose counters are read at its end.
const EACH: Duration = Duration::from_micros(5);
/// The least and the most pairs of windows.
const PAIRS: (usize, usize) = (2, 8);
/// The longest time of a move. Windows begin even if some conversations have not moved.
const MOVE: Duration = Duration::from_millis(40);
/// The interval between checks of a move, and below between checks of the rate.
const STEP: Duration = Duration::from_millis(1);
const CHECK: Duration = Duration::from_millis(500);
/// How long the first decision holds, and the longest hold.
const HOLD: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(128));
/// Noise that is assumed in the logarithm of each pair, before it is measured.
const NOISE: f64 = 0.05;
/// A difference is clear if it is so many standard errors.
const CLEAR: f64 = 3.0;

impl Contest {
    pub(crate) fn new() -> Contest {
        Contest {
            phase: Phase::Idle(None),
            side: Side::Kernel,
            first: None,
            pairs: Vec::new(),
            members: 0,
            hold: HOLD.0,
            last: None,
        }
    }

    /// Returns where calm conversations should be.
    pub(crate) fn side(&self) -> Side {
        self.side
    }

    /// Returns true if calm periods of conversations in user space matter now. Otherwise they need
    /// not be counted.
    pub(crate) fn wants_calm(&self) -> bool {
        self.side == Side::Kernel
    }

    /// Returns the duration until the next call of [`Self::step`], if one is needed.
    pub(crate) fn pause(&self, now: Instant, conversations: usize) -> Option<Duration> {
        let at = match self.phase {
            Phase::Idle(None) => return None,
            Phase::Idle(Some(mark)) => mark.at + window(conversations, 0),
            Phase::Moving(_, next) => next,
            Phase::Measuring(mark) => mark.at + window(conversations, self.pairs.len()),
            Phase::Decided { until, mark, .. } => until.min(mark.at + CHECK),
        };
        Some(at.saturating_duration_since(now))
    }

    /// Records that a conversation has moved to the kernel.
    pub(crate) fn promoted(&mut self, now: Instant, messages: u64) {
        if let Phase::Idle(None) = self.phase {
            self.phase = Phase::Idle(Some(Mark { at: now, messages }));
        }
    }

    /// Goes on to the next phase, if the current one is over. The caller then moves conversations if
    /// [`Self::side`] has changed.
    pub(crate) fn step(&mut self, seen: Seen) {
        let Seen { now, messages, .. } = seen;
        let here = Mark { at: now, messages };
        let is_over = self.pause(now, seen.conversations).is_some_and(|pause| pause.is_zero());
        match self.phase {
            Phase::Idle(Some(mark)) if is_over => {
                if mark.rate(now, messages) < LEAST_RATE {
                    self.phase = Phase::Idle(None);
                } else {
                    self.begin(seen);
                }
            }
            Phase::Moving(until, _) if is_over => {
                let is_there = match self.side {
                    Side::User => seen.in_kernel == 0 && seen.moving == 0,
                    Side::Kernel => seen.in_kernel * 10 >= self.members * 9,
                };
                if is_there || now >= until {
                    self.phase = Phase::Measuring(here);
                } else {
                    self.phase = Phase::Moving(until, now + STEP);
                }
            }
            Phase::Measuring(mark) if is_over => self.measured(mark.rate(now, messages), seen),
            Phase::Decided { since, until, mark } if is_over => {
                let rate = mark.rate(now, messages);
                let (_, before) = self.last.unwrap_or((self.side, rate));
                let is_other = rate > 2.0 * before || rate < before / 2.0;
                if rate < LEAST_RATE {
                    (self.phase, self.side, self.hold) = (Phase::Idle(None), Side::Kernel, HOLD.0);
                } else if now >= until || is_other && now >= since + HOLD.0 {
                    self.begin(seen);
                } else {
                    self.phase = Phase::Decided { since, until, mark: here };
                }
            }
            _ => {}
        }
    }

    /// Begins a comparison with the engine where the conversations are.
    fn begin(&mut self, seen: Seen) {
        (self.first, self.members) = (None, self.members.max(seen.in_kernel));
        if self.side == Side::Kernel {
            self.members = seen.in_kernel;
        }
        self.pairs.clear();
        self.phase = Phase::Measuring(Mark { at: seen.now, messages: seen.messages });
    }

    fn measured(&mut self, rate: f64, seen: Seen) {
        let rate = rate.max(1.0);
        let Some(first) = self.first.take() else {
            self.first = Some(rate);
            return self.go_to(other(self.side), seen);
        };
        let (user, kernel) = if self.side == Side::User { (rate, first) } else { (first, rate) };
        let weight = (1 << (self.pairs.len() / 2)) as f64;
        self.pairs.push(((user / kernel).ln(), weight));
        match self.result() {
            Some(side) => self.decide(side, (user + kernel) / 2.0, seen),
            None => self.phase = Phase::Measuring(Mark { at: seen.now, messages: seen.messages }),
        }
    }

    /// Returns the faster engine, if the difference is clear or the last pair is over.
    fn result(&self) -> Option<Side> {
        let count = self.pairs.len();
        if count < PAIRS.0 {
            return None;
        }
        let weights: f64 = self.pairs.iter().map(|(_, weight)| weight).sum();
        let mean = self.pairs.iter().map(|(value, weight)| value * weight).sum::<f64>() / weights;
        let squares: f64 = self.pairs.iter().map(|(value, weight)| weight * (value - mean).powi(2)).sum();
        let variance = (squares * count as f64 / weights + 2.0 * NOISE * NOISE) / (count as f64 + 1.0);
        let is_clear = mean.abs() > CLEAR * (variance / count as f64).sqrt();
        let faster = if mean > 0.0 { Side::User } else { Side::Kernel };
        (is_clear || count >= PAIRS.1).then_some(faster)
    }

    fn go_to(&mut self, side: Side, seen: Seen) {
        if side == Side::User && self.side == Side::Kernel {
            self.members = self.members.max(seen.in_kernel);
        }
        (self.side, self.phase) = (side, Phase::Moving(seen.now + MOVE, seen.now + STEP));
    }

    fn decide(&mut self, side: Side, rate: f64, seen: Seen) {
        self.hold = match self.last {
            Some((last, _)) if last == side => (self.hold * 2).min(HOLD.1),
            _ => HOLD.0,
        };
        (self.last, self.side) = (Some((side, rate)), side);
        let mark = Mark { at: seen.now, messages: seen.messages };
        self.phase = Phase::Decided { since: seen.now, until: seen.now + self.hold, mark };
    }
}

fn other(side: Side) -> Side {
    if side == Side::User { Side::Kernel } else { Side::User }
}

fn window(conversations: usize, pairs: usize) -> Duration {
    WINDOW * (1 << (pairs / 2)) + EACH * conversations as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that serves at these rates in user space and in the kernel, with some noise.
    struct Load {
        rates: [f64; 2],
        noise: f64,
        now: Instant,
        messages: f64,
        random: u64,
    }

    impl Load {
        fn new(user: f64, kernel: f64, noise: f64, seed: u64) -> Load {
            Load { rates: [user, kernel], noise, now: Instant::now(), messages: 0.0, random: seed * 2 + 1 }
        }

        fn run(&mut self, contest: &mut Contest, time: Duration) {
            let end = self.now + time;
            while self.now < end {
                self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let random = (self.random >> 40) as f64 / f64::from(1 << 24) * 2.0 - 1.0;
                let rate = self.rates[contest.side() as usize] * (1.0 + self.noise * random);
                self.messages += rate / 1000.0;
                self.now += Duration::from_millis(1);
                let in_kernel = if contest.side() == Side::Kernel { 50 } else { 0 };
                let messages = self.messages as u64;
                contest.promoted(self.now, messages);
                contest.step(Seen { now: self.now, messages, in_kernel, moving: 0, conversations: 50 });
            }
        }

        fn side_after(&mut self, time: Duration) -> Side {
            let mut contest = Contest::new();
            self.run(&mut contest, time);
            contest.side()
        }
    }

    #[test]
    fn a_clear_difference_is_found_within_a_fifth_of_a_second() {
        let time = Duration::from_millis(200);
        assert_eq!(Load::new(140e3, 90e3, 0.1, 1).side_after(time), Side::User);
        assert_eq!(Load::new(90e3, 140e3, 0.1, 1).side_after(time), Side::Kernel);
    }

    #[test]
    fn much_noise_is_averaged_out() {
        for seed in 0..50 {
            let time = Duration::from_millis(2500);
            assert_eq!(Load::new(20e3, 14e3, 0.9, seed).side_after(time), Side::User, "seed {seed}");
            assert_eq!(Load::new(14e3, 20e3, 0.9, seed).side_after(time), Side::Kernel, "seed {seed}");
        }
    }

    #[test]
    fn few_messages_stay_in_the_kernel() {
        assert_eq!(Load::new(1000.0, 900.0, 0.1, 1).side_after(Duration::from_secs(3)), Side::Kernel);
    }

    #[test]
    fn comparisons_become_rare_and_changes_are_seen() {
        let mut load = Load::new(140e3, 90e3, 0.1, 1);
        let mut contest = Contest::new();
        load.run(&mut contest, Duration::from_secs(60));
        assert_eq!(contest.side(), Side::User);
        assert!(contest.hold >= Duration::from_secs(16), "{:?}", contest.hold);
        // Fewer messages: another comparison, in which the kernel wins.
        load.rates = [40e3, 50e3];
        load.run(&mut contest, Duration::from_secs(5));
        assert_eq!(contest.side(), Side::Kernel);
        // Almost none.
        load.rates = [100e3, 50e3];
        load.run(&mut contest, Duration::from_secs(5));
        assert_eq!(contest.side(), Side::User);
        load.rates = [10.0, 10.0];
        load.run(&mut contest, Duration::from_secs(2));
        assert_eq!(contest.side(), Side::Kernel);
    }
}
