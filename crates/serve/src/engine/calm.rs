//! Decides when a conversation should move to the kernel.
//!
//! The kernel is faster while one message at a time is under way: a batch has nothing to combine
//! then, and each transition between kernel and user space only adds latency. `Calm` counts reads
//! in a row that carried exactly one message with nothing else pending (a *run*). A run of `needed`
//! reads makes the conversation a candidate. `needed` doubles each time the kernel returns a
//! conversation as busy, so that it does not oscillate between the engines.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use shunt_sys::tcp;

use super::counts::Move;

/// The run-length detector of one conversation.
#[derive(Debug)]
pub(crate) struct Calm {
    /// Length of the current run: reads in a row of one message each, with nothing else pending.
    run: u32,
    /// When the run began.
    since: Instant,
    /// The run length at which the conversation may move to the kernel.
    needed: u32,
    /// Reads that did not continue a run, since the conversation last came back from the kernel.
    busy: u32,
    /// TCP segments received when the last `WATCHED` reads of the run began, and the least number
    /// of segments that those reads can have needed.
    segments: u32,
    least: u32,
    /// The conversation was calm when it came back because user space was faster, or because the
    /// kernel was late.
    was_calm: bool,
}

/// The initial value of `Calm::needed`, and its maximum.
const NEEDED: (u32, u32) = (32, 1 << 16);
/// How many reads at the end of a run have their TCP segments counted.
const WATCHED: u32 = 16;
/// Reads outside of runs after which the sockets leave the kernel's map.
const BUSY: u32 = 32;
/// Least average distance between unanswered messages in the kernel. `SHUNT_BUSY` in engine.bpf.h
/// is the same limit.
const APART: Duration = Duration::from_micros(60);

impl Calm {
    pub(crate) fn new(now: Instant) -> Calm {
        Calm { run: 0, since: now, needed: NEEDED.0, busy: 0, segments: 0, least: 0, was_calm: false }
    }

    /// Records one read of `bytes` bytes from the client. `quiet` is true if it carried one message
    /// and nothing else was pending.
    pub(crate) fn saw(&mut self, quiet: bool, bytes: usize, client: &OwnedFd, now: Instant) {
        // Unacknowledged output means that the client sent again without waiting for the answer.
        let quiet = quiet && tcp::outq(client.as_fd()).unwrap_or(0) == 0;
        match quiet {
            true => {
                self.run += 1;
                let watched = self.run + WATCHED;
                if watched >= self.needed
                    && let Ok((segments, most)) = tcp::segments(client)
                {
                    if watched == self.needed {
                        (self.segments, self.least) = (segments, 0);
                    } else {
                        self.least = self.least.saturating_add((bytes as u32).div_ceil(most.max(1)));
                    }
                }
            }
            false => {
                (self.run, self.since) = (0, now);
                self.busy = self.busy.saturating_add(1);
            }
        }
    }

    /// Returns true if a run has become unlikely, because so many reads were outside of one.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy >= BUSY
    }

    /// Returns true if the run is long enough to move. `paced` means that the messages have no
    /// answers, so only the client's timing separates them.
    pub(crate) fn is_enough(&mut self, paced: bool, client: &OwnedFd, now: Instant) -> bool {
        if self.run < self.needed {
            return false;
        }
        // Segments that user space read together would reach the kernel engine one by one.
        let arrived = tcp::segments(client).map_or(0, |(segments, _)| segments.wrapping_sub(self.segments));
        if arrived > self.least.saturating_add(WATCHED / 4) {
            (self.run, self.since) = (0, now);
            self.busy = self.busy.saturating_add(WATCHED);
            return false;
        }
        let is_slow = !paced || now.duration_since(self.since) >= APART * self.run;
        if !is_slow {
            (self.run, self.since) = (0, now);
        }
        is_slow
    }

    /// Begins to count again, after [`Self::saw`] was not called for a time. A conversation that was
    /// calm needs no whole run.
    pub(crate) fn resume(&mut self, now: Instant) {
        let run = if std::mem::take(&mut self.was_calm) { self.needed - WATCHED - 1 } else { 0 };
        (self.run, self.since) = (run, now);
    }

    /// Records that the conversation came back from the kernel, which had served `messages`
    /// messages.
    pub(crate) fn left(&mut self, why: Move, messages: u64, now: Instant) {
        (self.run, self.since, self.busy) = (0, now, 0);
        self.was_calm = matches!(why, Move::Slower | Move::Late);
        let restless =
            !self.was_calm && !matches!(why, Move::NoConnection | Move::Ended | Move::Reload | Move::Stop);
        if messages > 64 * u64::from(self.needed) {
            self.needed = NEEDED.0;
        } else if restless {
            self.needed = (self.needed * 2).min(NEEDED.1);
        }
    }
}
