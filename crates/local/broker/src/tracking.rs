//! Connection tracking: the time after which a firewall or an address translator forgets a silent
//! connection, and how often the two ends of a pair must send something to prevent that.
//!
//! A connection whose bytes all take lanes is silent for every device between its ends. See
//! *Connection tracking* in docs/local-path.md.

use std::fs;
use std::time::{Duration, Instant};

/// The directory with the timeouts of the network namespace of the reading thread.
const FOLDER: &str = "/proc/sys/net/netfilter";
/// How long a value that was read stays valid.
const FRESH: Duration = Duration::from_secs(5);
/// The maximum silence in seconds if there may be connection tracking or address translation on the
/// path. Load balancers forget connections after some minutes.
const LONGEST: Silence = Silence { open: 60, half_closed: 20 };

/// Maximum time of silence on a connection in seconds; 0 means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Silence {
    /// While both directions are open.
    pub(crate) open: u32,
    /// After one end has sent its FIN.
    pub(crate) half_closed: u32,
}

/// The timeouts of a network namespace, in seconds of silence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timeouts {
    established: u32,
    half_closed: u32,
}

impl Timeouts {
    /// Returns the timeouts of this thread's network namespace, or `None` if it tracks no
    /// connection at present.
    pub(crate) fn read() -> Option<Timeouts> {
        let number = |name: &str| -> Option<u32> {
            fs::read_to_string(format!("{FOLDER}/nf_conntrack_{name}")).ok()?.trim().parse().ok()
        };
        if number("count")? == 0 {
            return None;
        }
        let half_closed = number("tcp_timeout_fin_wait").into_iter().chain(number("tcp_timeout_close_wait"));
        let half_closed = half_closed.min().unwrap_or(u32::MAX);
        Some(Timeouts { established: number("tcp_timeout_established")?, half_closed })
    }
}

/// A cache of the timeouts of one namespace.
#[derive(Debug, Default)]
pub(crate) struct Recent(Option<(Instant, Option<Timeouts>)>);

impl Recent {
    /// Returns the cached value, or calls `read` if that is too old.
    pub(crate) fn get(&mut self, now: Instant, read: impl FnOnce() -> Option<Timeouts>) -> Option<Timeouts> {
        match self.0 {
            Some((since, timeouts)) if now.duration_since(since) < FRESH => timeouts,
            _ => {
                let timeouts = read();
                self.0 = Some((now, timeouts));
                timeouts
            }
        }
    }
}

/// Returns how long the ends of a pair may be silent. `is_direct` means mirrored addresses in one
/// namespace: then only the connection tracking of that namespace is on the path.
pub(crate) fn silence(is_direct: bool, tracked: impl IntoIterator<Item = Option<Timeouts>>) -> Silence {
    let known = tracked.into_iter().flatten();
    let shorter = |silence: Silence, timeouts: Timeouts| Silence {
        // Three probes per timeout, so that one may be lost.
        open: silence.open.min(timeouts.established / 3).max(1),
        half_closed: silence.half_closed.min(timeouts.half_closed / 3).max(1),
    };
    let mut known = known.peekable();
    if is_direct && known.peek().is_none() {
        return Silence::default();
    }
    known.fold(LONGEST, shorter)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Timeouts = Timeouts { established: 432_000, half_closed: 60 };
    const SHORT: Timeouts = Timeouts { established: 4, half_closed: 7 };

    #[test]
    fn a_direct_pair_without_connection_tracking_is_silent_for_ever() {
        assert_eq!(silence(true, [None]), Silence { open: 0, half_closed: 0 });
    }

    #[test]
    fn what_may_be_translated_is_never_silent_for_long() {
        assert_eq!(silence(false, [None, None]), LONGEST);
        assert_eq!(silence(false, [None, Some(USUAL)]), LONGEST);
        assert_eq!(silence(true, [Some(USUAL)]), LONGEST);
    }

    #[test]
    fn the_shortest_timeout_counts_and_is_never_zero() {
        assert_eq!(silence(false, [Some(USUAL), Some(SHORT)]), Silence { open: 1, half_closed: 2 });
        let least = Timeouts { established: 1, half_closed: 1 };
        assert_eq!(silence(true, [Some(least)]), Silence { open: 1, half_closed: 1 });
    }

    #[test]
    fn an_answer_is_used_for_a_while() {
        let (mut recent, now) = (Recent::default(), Instant::now());
        assert_eq!(recent.get(now, || Some(SHORT)), Some(SHORT));
        assert_eq!(recent.get(now + FRESH / 2, || unreachable!()), Some(SHORT));
        assert_eq!(recent.get(now + FRESH, || None), None);
    }
}
