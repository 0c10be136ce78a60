//! Connection tracking: after how many seconds of silence a firewall or an address translation forgets a connection, and how
//! often the two ends of a pair send something because of that.
//!
//! A connection whose bytes all go by lanes is silent to everything between its ends. See *Connection tracking* in
//! docs/local-path.md.

use std::fs;
use std::time::{Duration, Instant};

/// Where the kernel says it, of the network namespace of the thread that asks.
const FOLDER: &str = "/proc/sys/net/netfilter";
/// How long an answer is used.
const FRESH: Duration = Duration::from_secs(5);
/// The longest silence where connection tracking or address translation may be on the way, in seconds. Load balancers forget after
/// some minutes.
const LONGEST: Silence = Silence { open: 60, half_closed: 20 };

/// How many seconds a connection may be silent for; 0: for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Silence {
    /// With both directions open.
    pub(crate) open: u32,
    /// Once one end has finished.
    pub(crate) half_closed: u32,
}

/// After how many seconds of silence the connections of a network namespace are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timeouts {
    established: u32,
    half_closed: u32,
}

impl Timeouts {
    /// Returns the timeouts of the network namespace of this thread, unless it tracks no connection now.
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

/// The timeouts of one namespace, as they were a moment ago.
#[derive(Debug, Default)]
pub(crate) struct Recent(Option<(Instant, Option<Timeouts>)>);

impl Recent {
    /// Returns what was read last, or what `read` says if that is too old.
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

/// Returns how long the ends of a pair may be silent. `is_direct`: they have mirrored addresses in one namespace, so nothing but
/// the connection tracking of that namespace is on the way.
pub(crate) fn silence(is_direct: bool, tracked: impl IntoIterator<Item = Option<Timeouts>>) -> Silence {
    let known = tracked.into_iter().flatten();
    let shorter = |silence: Silence, timeouts: Timeouts| Silence {
        // Three probes to a timeout: one may be lost.
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
