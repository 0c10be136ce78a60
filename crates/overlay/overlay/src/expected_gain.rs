//! Decides if moving connections to the host network pays. To move one takes much more time, also
//! of the processors, than to make it on the overlay. Each message that crosses one network stack
//! instead of two repays a part of that.
//!
//! So where a program makes many connections to one destination, and the recently ended ones have
//! not repaid their moving, further ones stay on the overlay. The statistics decay, so some
//! connections are still moved every second, and their results show if that has changed.
//!
//! Example: a program makes 1,000 connections a second to one address, each with one question and
//! one answer. After 16 of them have ended, their average of repayment is far below 1, and the next
//! ones stay. After a second, the decayed count is below 16, and some are moved again.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use shunt_sys::ended::{self, Ended};

use crate::connections::Connections;
use crate::lock::lock;
use crate::metrics::End;

/// The number of messages, or of bytes, with which a connection repays its moving. docs/overlay.md
/// has the measurement.
const MESSAGES: f64 = 100.0;
const BYTES: f64 = 4_194_304.0;
/// The bound for the repayment of one connection, so that it makes up for this many others at most.
const AT_MOST: f64 = 100.0;
/// The number of recently ended connections from which on a destination counts. Below it, moving
/// costs little altogether.
const ENOUGH: f64 = 16.0;
/// The time constant of the decay: a connection that ended this long ago counts 1/e.
const LATELY: Duration = Duration::from_secs(1);
/// The number of pairs of namespace and destination that are tracked.
const KNOWN: usize = 16_384;

/// The network namespace of a program, and the destination of its connections.
pub(crate) type Way = (u64, SocketAddr);

/// The statistics of ended connections, by namespace and destination.
#[derive(Debug, Default)]
pub(crate) struct ExpectedGain(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The netlink socket that reports ended connections. `None` while there is none to be watched.
    reports: Option<OwnedFd>,
    ways: HashMap<Way, Lately>,
}

/// Statistics of ended connections, exponentially decayed.
#[derive(Clone, Copy, Debug)]
struct Lately {
    at: Instant,
    count: f64,
    /// The sum of their repayments: 1 for each connection that has just repaid its moving.
    repaid: f64,
}

impl ExpectedGain {
    /// Starts to watch for ended connections. Called before a connection is moved.
    pub(crate) fn watch(&self) {
        let mut state = self.state();
        if state.reports.is_none() {
            // Without these reports all connections are moved.
            state.reports = ended::watch()
                .inspect_err(|error| tracing::debug!(%error, "no reports of ended connections"))
                .ok();
        }
    }

    /// Returns `true` if a further connection would not repay its moving, judging by the previous
    /// ones.
    pub(crate) fn is_brief(&self, way: Way, connections: &Connections) -> bool {
        let mut state = self.state();
        state.read_reports(connections);
        state.ways.get(&way).is_some_and(|lately| lately.is_brief(Instant::now()))
    }

    /// Drops old statistics, and stops watching when no client's connection is left.
    pub(crate) fn sweep(&self, connections: &Connections) {
        let mut state = self.state();
        state.read_reports(connections);
        if connections.count(End::Client) == 0 {
            state.reports = None;
        }
        let now = Instant::now();
        state.ways.retain(|_, lately| lately.by(now).count > 0.5);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    /// Reads all pending reports.
    fn read_reports(&mut self, connections: &Connections) {
        let Some(reports) = &self.reports else { return };
        while let Some(ended) = ended::next(reports.as_fd()) {
            if let Some(way) = connections.way(ended.cookie)
                && (self.ways.len() < KNOWN || self.ways.contains_key(&way))
            {
                let now = Instant::now();
                self.ways.entry(way).or_insert_with(|| Lately::none(now)).add(now, repaid(ended));
            }
        }
    }
}

impl Lately {
    fn none(at: Instant) -> Lately {
        Lately { at, count: 0.0, repaid: 0.0 }
    }

    /// Returns the statistics, decayed to that time.
    fn by(self, now: Instant) -> Lately {
        let ago = now.saturating_duration_since(self.at).as_secs_f64();
        let left = (-ago / LATELY.as_secs_f64()).exp();
        Lately { at: now, count: self.count * left, repaid: self.repaid * left }
    }

    fn add(&mut self, now: Instant, repaid: f64) {
        *self = self.by(now);
        self.count += 1.0;
        self.repaid += repaid.min(AT_MOST);
    }

    fn is_brief(self, now: Instant) -> bool {
        let lately = self.by(now);
        lately.count >= ENOUGH && lately.repaid < lately.count
    }
}

/// Returns how many times the traffic of a connection repays its moving. Full segments are counted
/// by their bytes only, since a stack processes many of them together.
fn repaid(Ended { bytes, segments, segment, .. }: Ended) -> f64 {
    let full = bytes / u64::from(segment.max(1));
    let small = u64::from(segments).saturating_sub(full);
    small as f64 / MESSAGES + bytes as f64 / BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short() -> f64 {
        repaid(Ended { cookie: 1, bytes: 2_000, segments: 4, segment: 1_448 })
    }

    #[test]
    fn messages_repay_and_so_do_many_bytes() {
        let ended = |bytes, segments| Ended { cookie: 1, bytes, segments, segment: 1_448 };
        assert!(repaid(ended(400, 4)) < 0.1);
        assert!(repaid(ended(1_000, 100)) >= 1.0, "fifty questions and their answers");
        assert!(repaid(ended(200_000, 139)) < 0.1, "a page, in full segments");
        assert!(repaid(ended(8_000_000, 5_525)) >= 1.0);
        assert!(repaid(Ended { segment: 0, ..ended(1, 1) }).is_finite());
    }

    #[test]
    fn many_short_ones_keep_further_ones_from_being_moved_and_a_few_do_not() {
        let begin = Instant::now();
        let mut lately = Lately::none(begin);
        for _ in 0..15 {
            lately.add(begin, short());
        }
        assert!(!lately.is_brief(begin));
        for _ in 0..15 {
            lately.add(begin, short());
        }
        assert!(lately.is_brief(begin));
        assert!(!lately.is_brief(begin + LATELY), "after a while some are moved again");
    }

    #[test]
    fn one_that_carries_much_pays_for_many() {
        let begin = Instant::now();
        let mut lately = Lately::none(begin);
        for _ in 0..60 {
            lately.add(begin, short());
        }
        lately.add(begin, 1e9);
        assert!(!lately.is_brief(begin));
        for _ in 0..60 {
            lately.add(begin, short());
        }
        assert!(lately.is_brief(begin), "but not for all to come");
    }

    #[test]
    fn one_a_tenth_of_a_second_is_never_too_many() {
        let mut now = Instant::now();
        let mut lately = Lately::none(now);
        for _ in 0..1_000 {
            now += LATELY / 10;
            lately.add(now, short());
            assert!(!lately.is_brief(now));
        }
    }
}
