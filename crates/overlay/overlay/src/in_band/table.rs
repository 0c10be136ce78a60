//! The containers of other hosts that in-band discovery has found, and what it knows of each.
//!
//! A hint names a router for the address of a container. It is used only after that router has said,
//! on a line on which it has proved the key, that it would take the connection.
//!
//! ```text
//! (unknown) ── a program connects ──────────────────────► Awaited
//! (unknown), Awaited, Refused after its pause ── hint ──► Asking      the router is asked
//! Refused ───── hint of another router ─────────────────► Asking
//! Asking ────── its router says yes ────────────────────► Known       connections are moved
//!        ────── no, or no line to it ───────────────────► Refused     for a pause
//! Known ─────── hint of its router, yes to a connection ► Known       for its lifetime again
//!        ────── hint of another router ─────────────────► Asking      the container has moved
//!        ────── three noes in a row ────────────────────► (unknown)
//!        ────── the line ends, the lifetime is over ────► (unknown)
//! Awaited, Refused ── lifetime ─────────────────────────► (unknown)
//! ```
//!
//! Other hints change nothing. So a hint, also a repeated one, never makes a connection use a router
//! that has not confirmed it, and makes this router ask another one at most once in a pause for each
//! address. Each namespace has a share of the table.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::map::Router;
use crate::reason::Reason;

/// The largest number of addresses.
const MOST: usize = 16_384;
/// The largest number of addresses that the programs of one network namespace have added.
const SHARE: usize = 1024;
/// The largest numbers of addresses whose routers are being asked: of all, and of one namespace.
const ASKING: usize = 64;
const ASKING_SHARE: usize = 8;
/// The time for which an entry is valid after it was last confirmed.
const LIFETIME: Duration = Duration::from_secs(600);
/// The time between two questions about an address, if the first one was not answered with yes.
pub(super) const PAUSE: Duration = Duration::from_secs(10);
/// The time in which the first connection to an address brings its hint, if there is one.
const AWAITED: Duration = Duration::from_secs(2);
/// The number of noes to connections, without a yes in between, that end an entry. A container may
/// have ports on which nothing supervised listens.
const NOES: u8 = 3;

/// All addresses.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: HashMap<IpAddr, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// The cookie of the namespace whose program connected first.
    by: u64,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Awaited { since: Instant },
    Asking { router: Router },
    Known { router: Router, until: Instant, noes: u8 },
    Refused { router: Router, reason: Reason, since: Instant },
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Awaited { .. } => "awaited",
            State::Asking { .. } => "asking",
            State::Known { .. } => "known",
            State::Refused { .. } => "refused",
        }
    }
}

impl Table {
    /// Returns the router that has confirmed to have a container.
    pub(super) fn router(&self, container: IpAddr, now: Instant) -> Option<Router> {
        match self.entries.get(&container)?.state {
            State::Known { router, until, .. } if now < until => Some(router),
            _ => None,
        }
    }

    /// Notes that a program connects to an address with no known host, and returns the reason for
    /// which the connection stays.
    pub(super) fn connects(&mut self, container: IpAddr, namespace: u64, now: Instant) -> Reason {
        let state = match self.entries.get(&container) {
            Some(entry) => entry.state,
            None => {
                let state = State::Awaited { since: now };
                if !self.add(container, namespace, state) {
                    return Reason::UnknownHost;
                }
                state
            }
        };
        match state {
            State::Awaited { since } if now.saturating_duration_since(since) >= AWAITED => {
                Reason::UnknownHost
            }
            // The other host's policy denies it at accept.
            State::Refused { reason, .. } if reason.denial().is_none() => reason,
            _ => Reason::Discovering,
        }
    }

    /// Notes a hint, and returns `true` if its router is to be asked now.
    pub(super) fn hint(&mut self, container: IpAddr, router: Router, namespace: u64, now: Instant) -> bool {
        let next = match self.entries.get_mut(&container).map(|entry| &mut entry.state) {
            None | Some(State::Awaited { .. }) => true,
            Some(State::Asking { .. }) => false,
            Some(State::Known { router: known, until, .. }) if *known == router => {
                *until = now + LIFETIME;
                false
            }
            Some(State::Known { .. }) => true,
            Some(State::Refused { router: asked, since, .. }) => {
                *asked != router || now.saturating_duration_since(*since) >= PAUSE
            }
        };
        if !next || !self.may_ask(namespace) {
            return false;
        }
        let state = State::Asking { router };
        match self.entries.get_mut(&container) {
            Some(entry) => entry.state = state,
            None => return self.add(container, namespace, state),
        }
        true
    }

    /// Notes the answer to the question that a hint has caused.
    pub(super) fn answered(
        &mut self,
        container: IpAddr,
        router: Router,
        answer: Result<(), Reason>,
        now: Instant,
    ) {
        let Some(entry) = self.entries.get_mut(&container) else { return };
        if entry.state != (State::Asking { router }) {
            return;
        }
        entry.state = match answer {
            Ok(()) => State::Known { router, until: now + LIFETIME, noes: 0 },
            Err(reason) => State::Refused { router, reason, since: now },
        };
    }

    /// Notes the answer to an Ask for a connection.
    pub(super) fn asked(
        &mut self,
        container: IpAddr,
        address: SocketAddr,
        answer: Result<(), Reason>,
        now: Instant,
    ) {
        let Some(entry) = self.entries.get_mut(&container) else { return };
        let State::Known { router, until, noes } = &mut entry.state else { return };
        if router.address != address {
            return;
        }
        match answer {
            Ok(()) => (*until, *noes) = (now + LIFETIME, 0),
            Err(Reason::NotSupervised | Reason::Ambiguous) if *noes + 1 < NOES => *noes += 1,
            Err(Reason::NotSupervised | Reason::Ambiguous | Reason::RouterSilent | Reason::Stranger) => {
                self.entries.remove(&container);
            }
            // It concerns this connection only.
            Err(_) => {}
        }
    }

    /// Removes old entries, and those of routers without a line. Returns `true` if any was
    /// removed.
    pub(super) fn sweep(&mut self, has_line: impl Fn(SocketAddr) -> bool, now: Instant) -> bool {
        let before = self.entries.len();
        self.entries.retain(|_, entry| match entry.state {
            State::Asking { .. } => true,
            State::Known { router, until, .. } => now < until && has_line(router.address),
            State::Awaited { since } | State::Refused { since, .. } => {
                now.saturating_duration_since(since) < LIFETIME
            }
        });
        self.entries.len() < before
    }

    /// Returns the routers that have containers, or are being asked.
    pub(super) fn routers(&self) -> HashSet<SocketAddr> {
        let router = |entry: &Entry| match entry.state {
            State::Asking { router } | State::Known { router, .. } => Some(router.address),
            State::Awaited { .. } | State::Refused { .. } => None,
        };
        self.entries.values().filter_map(router).collect()
    }

    /// Returns the number of addresses in each state.
    pub(super) fn counts(&self) -> BTreeMap<&'static str, usize> {
        let mut counts: BTreeMap<_, _> =
            ["awaited", "asking", "known", "refused"].map(|name| (name, 0)).into();
        for entry in self.entries.values() {
            *counts.entry(entry.state.name()).or_default() += 1;
        }
        counts
    }

    fn may_ask(&self, namespace: u64) -> bool {
        let asking = || self.entries.values().filter(|entry| matches!(entry.state, State::Asking { .. }));
        asking().count() < ASKING && asking().filter(|entry| entry.by == namespace).count() < ASKING_SHARE
    }

    fn add(&mut self, container: IpAddr, by: u64, state: State) -> bool {
        let is_full = self.entries.len() >= MOST
            || self.entries.values().filter(|entry| entry.by == by).count() >= SHARE;
        if !is_full {
            self.entries.insert(container, Entry { by, state });
        }
        !is_full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: u64 = 7;

    fn ip(last: u8) -> IpAddr {
        [10, 50, 2, last].into()
    }

    fn router(last: u8) -> Router {
        Router { address: SocketAddr::from(([192, 168, 0, last], 7450)), ports: 1 }
    }

    /// Returns a table in which router 2 has confirmed container 1.
    fn known(now: Instant) -> Table {
        let mut table = Table::default();
        assert_eq!(table.connects(ip(1), SPACE, now), Reason::Discovering);
        assert!(table.hint(ip(1), router(2), SPACE, now));
        assert_eq!(table.connects(ip(1), SPACE, now), Reason::Discovering);
        assert_eq!(table.router(ip(1), now), None, "it has not confirmed it");
        table.answered(ip(1), router(2), Ok(()), now);
        assert_eq!(table.router(ip(1), now), Some(router(2)));
        table
    }

    #[test]
    fn a_container_is_known_when_its_router_has_confirmed_it() {
        let now = Instant::now();
        let mut table = known(now);
        // A known container is not asked about again, but lives longer.
        let later = now + LIFETIME / 2;
        assert!(!table.hint(ip(1), router(2), SPACE, later));
        assert_eq!(table.router(ip(1), now + LIFETIME), Some(router(2)));
        assert_eq!(table.router(ip(1), later + LIFETIME), None);
        assert!(!table.sweep(|_| true, now + LIFETIME));
        assert!(table.sweep(|_| true, later + LIFETIME));
        assert_eq!(table.routers(), HashSet::new());
    }

    #[test]
    fn an_address_without_a_hint_is_unknown() {
        let now = Instant::now();
        let mut table = Table::default();
        assert_eq!(table.connects(ip(1), SPACE, now), Reason::Discovering);
        assert_eq!(table.connects(ip(1), SPACE, now + AWAITED), Reason::UnknownHost);
        assert!(table.hint(ip(1), router(2), SPACE, now + AWAITED), "it has started late");
    }

    #[test]
    fn a_router_that_does_not_confirm_is_asked_again_after_a_pause() {
        let now = Instant::now();
        for reason in [Reason::NotSupervised, Reason::RouterSilent, Reason::Denied] {
            let mut table = Table::default();
            assert!(table.hint(ip(1), router(2), SPACE, now));
            table.answered(ip(1), router(3), Ok(()), now);
            assert_eq!(table.router(ip(1), now), None, "another router was asked");
            table.answered(ip(1), router(2), Err(reason), now);
            // A program is not denied a connection by what another host says about a hint.
            let shown = if reason == Reason::Denied { Reason::Discovering } else { reason };
            assert_eq!(table.connects(ip(1), SPACE, now), shown);
            assert!(!table.hint(ip(1), router(2), SPACE, now));
            assert_eq!(table.routers(), HashSet::new(), "no line is kept");
            assert!(table.hint(ip(1), router(2), SPACE, now + PAUSE));
            // The answer to the former question comes late.
            table.answered(ip(1), router(2), Err(reason), now + PAUSE);
            assert!(table.hint(ip(1), router(3), SPACE, now + PAUSE), "the container has moved");
        }
    }

    #[test]
    fn a_container_that_has_moved_is_not_at_its_former_host() {
        let now = Instant::now();
        let mut table = known(now);
        assert!(table.hint(ip(1), router(3), SPACE, now));
        assert_eq!(table.router(ip(1), now), None);
        // The former host says something about a connection that began before.
        table.asked(ip(1), router(2).address, Ok(()), now);
        assert_eq!(table.router(ip(1), now), None);
        table.answered(ip(1), router(3), Ok(()), now);
        assert_eq!(table.router(ip(1), now), Some(router(3)));
        table.asked(ip(1), router(2).address, Err(Reason::RouterSilent), now);
        assert_eq!(table.router(ip(1), now), Some(router(3)));
    }

    #[test]
    fn noes_to_connections_end_an_entry() {
        let now = Instant::now();
        let mut table = known(now);
        let asked = |table: &mut Table, answer| table.asked(ip(1), router(2).address, answer, now);
        for _ in 0..4 {
            // Another port of the same container is served.
            asked(&mut table, Err(Reason::NotSupervised));
            asked(&mut table, Err(Reason::NotSupervised));
            asked(&mut table, Err(Reason::Busy));
            assert_eq!(table.router(ip(1), now), Some(router(2)));
            asked(&mut table, Ok(()));
        }
        for _ in 0..3 {
            asked(&mut table, Err(Reason::NotSupervised));
        }
        assert_eq!(table.router(ip(1), now), None);
        for reason in [Reason::RouterSilent, Reason::Stranger] {
            let mut table = known(now);
            asked(&mut table, Err(reason));
            assert_eq!(table.router(ip(1), now), None, "{reason:?}");
        }
    }

    #[test]
    fn an_entry_ends_with_the_line_to_its_router() {
        let now = Instant::now();
        let mut table = known(now);
        assert!(table.hint(ip(4), router(3), SPACE, now));
        assert!(!table.sweep(|address| address == router(2).address, now));
        assert_eq!(table.routers(), [router(2).address, router(3).address].into());
        assert!(table.sweep(|_| false, now));
        assert_eq!(table.routers(), [router(3).address].into(), "there is no line yet");
    }

    #[test]
    fn a_namespace_has_a_share_of_the_table_and_of_the_questions() {
        let now = Instant::now();
        let mut table = Table::default();
        for at in 0..ASKING_SHARE as u8 {
            assert!(table.hint(ip(at), router(2), SPACE, now));
        }
        assert!(!table.hint(ip(100), router(2), SPACE, now));
        assert!(table.hint(ip(100), router(2), SPACE + 1, now));
        for at in 0..2 * SHARE {
            let address = IpAddr::from(u32::to_be_bytes(0x0a33_0000 + at as u32));
            let expected = if at < SHARE - ASKING_SHARE { Reason::Discovering } else { Reason::UnknownHost };
            assert_eq!(table.connects(address, SPACE, now), expected, "{at}");
        }
        assert_eq!(table.connects(ip(200), SPACE + 1, now), Reason::Discovering);
        assert_eq!(table.counts()["asking"], ASKING_SHARE + 1);
    }
}
