//! When a conversation belongs in the kernel: while one message at a time is under way, for then a batch has nothing to put
//! together, and each step between the kernel and user space is lost time. A conversation that proved restless has to be
//! calm for longer the next time, so that it does not go back and forth.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use shunt_sys::tcp;

use super::counts::Move;

/// See the module.
#[derive(Debug)]
pub(crate) struct Calm {
    /// Reads in a row that gave one message, with nothing else under way.
    run: u32,
    /// When it began.
    since: Instant,
    /// How long a run has to be.
    needed: u32,
    /// Reads that were none of a run, since it came back from the kernel.
    busy: u32,
    /// Segments that had arrived when the end of the run began, and as many as its reads can have had at least.
    segments: u32,
    least: u32,
}

/// Reads before a conversation is moved for the first time, and at most.
const NEEDED: (u32, u32) = (32, 1 << 16);
/// The last reads of a run, of which is asked how many segments they were.
const WATCHED: u32 = 16;
/// Reads that were none of a run, before the sockets leave the kernel's map.
const BUSY: u32 = 32;
/// Messages that nobody answers may follow each other so closely: engine.bpf.h has the same, as SHUNT_BUSY.
const APART: Duration = Duration::from_micros(60);

impl Calm {
    pub(crate) fn new(now: Instant) -> Calm {
        Calm { run: 0, since: now, needed: NEEDED.0, busy: 0, segments: 0, least: 0 }
    }

    /// One read of the client, of so many bytes. `quiet`: it gave one message, and nothing else was under way.
    pub(crate) fn saw(&mut self, quiet: bool, bytes: usize, client: &OwnedFd, now: Instant) {
        // What the client has not acknowledged when it sends again, it has not waited for.
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

    /// Whether it has been busy for so long that it will hardly be calm soon.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy >= BUSY
    }

    /// Whether it has been calm for long enough. `paced`: nothing but time keeps the messages apart.
    pub(crate) fn is_enough(&mut self, paced: bool, client: &OwnedFd, now: Instant) -> bool {
        if self.run < self.needed {
            return false;
        }
        // What came in several segments and was read at once, the kernel would serve one by one.
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

    /// It has come back from the kernel, where it had so many messages.
    pub(crate) fn left(&mut self, why: Move, messages: u64, now: Instant) {
        (self.run, self.since, self.busy) = (0, now, 0);
        let restless = !matches!(why, Move::NoConnection | Move::Ended | Move::Reload | Move::Stop);
        if messages > 64 * u64::from(self.needed) {
            self.needed = NEEDED.0;
        } else if restless {
            self.needed = (self.needed * 2).min(NEEDED.1);
        }
    }
}
