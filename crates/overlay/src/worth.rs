//! Whether connections are worth being moved to the host network. Moving one takes much longer, and more of the processors, than the overlay
//! takes to make it; each message that crosses one network stack and not two repays some of that. So where a program makes many
//! connections to one place, and those that have ended lately have not repaid their moving, further ones stay on the overlay. Some are
//! still moved in each second, from which is seen whether that has changed.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use shunt_sys::ended::{self, Ended};

use crate::connections::Connections;
use crate::lock::lock;
use crate::metrics::End;

/// A connection of so many messages, or bytes, repays its moving (docs/overlay.md has what that is measured by).
const MESSAGES: f64 = 100.0;
const BYTES: f64 = 4_194_304.0;
/// One that has repaid far more stands for no more than so many others.
const AT_MOST: f64 = 100.0;
/// So many have to have ended lately, or moving them costs little altogether.
const ENOUGH: f64 = 16.0;
/// How long ago that is: what ended so long ago counts for a third of what ends now.
const LATELY: Duration = Duration::from_secs(1);
/// So many are told from each other: from which network namespace, to where.
const KNOWN: usize = 16_384;

/// The network namespace of a program, and where it connects to.
pub(crate) type Way = (u64, SocketAddr);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Worth(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// By which the kernel tells what has ended, as long as there is anything that may.
    told: Option<OwnedFd>,
    ways: HashMap<Way, Lately>,
}

/// Connections that have ended, each the less the longer ago that is.
#[derive(Clone, Copy, Debug)]
struct Lately {
    at: Instant,
    count: f64,
    /// How often one has repaid its moving, altogether.
    repaid: f64,
}

impl Worth {
    /// A connection is about to be moved.
    pub(crate) fn watch(&self) {
        let mut state = self.state();
        if state.told.is_none() {
            // A kernel that does not tell leaves everything to be moved.
            state.told =
                ended::watch().inspect_err(|error| tracing::debug!(%error, "not told what ends")).ok();
        }
    }

    /// Whether a further connection would not repay its moving, as those before it have not.
    pub(crate) fn is_brief(&self, way: Way, connections: &Connections) -> bool {
        let mut state = self.state();
        state.hear(connections);
        state.ways.get(&way).is_some_and(|lately| lately.is_brief(Instant::now()))
    }

    /// Lets go of what is long ago.
    pub(crate) fn sweep(&self, connections: &Connections) {
        let mut state = self.state();
        state.hear(connections);
        if connections.count(End::Client) == 0 {
            state.told = None;
        }
        let now = Instant::now();
        state.ways.retain(|_, lately| lately.by(now).count > 0.5);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    /// Takes in what the kernel has told.
    fn hear(&mut self, connections: &Connections) {
        let Some(told) = &self.told else { return };
        while let Some(ended) = ended::next(told.as_fd()) {
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

    /// As it is at that time.
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

/// How often what a connection has carried repays its moving. Full segments pass through a stack many at a time.
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
