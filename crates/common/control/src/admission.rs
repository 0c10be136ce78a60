//! Bounds the unproven connections of a listener: those whose peer has not authenticated yet.
//!
//! A peer that opens connections and stays silent must not take the room from others. So the room
//! is divided by the source of the connections:
//!
//! ```text
//! reserved: sources that have authenticated before, or that are configured
//!                 one such host: at most half
//! open:     all others, and those for which no reserved room is left
//!                 one host (/32, /64)  <  its network (/24, /48)  <  all
//! ```
//!
//! A new connection is always admitted. If its host, its network or all together have used up
//! their share, a connection of that same group is evicted. The oldest silent one is evicted first;
//! if none is silent, the oldest one is. An honest peer authenticates within a few round trips. A
//! silent one grows older than that and is evicted first. So a flood from one host costs that host
//! its own connections. A flood from everywhere must replace all places within those few round
//! trips.
//!
//! Example: with a share of 4 for one host, a host opens a fifth connection while its first four
//! are silent. The first one is evicted, and no other host is affected.
//!
//! [`Admission`] decides, and knows neither sockets nor time. With [`Gate`] tasks wait for its
//! decisions.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

/// The numbers of unproven connections that may exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// For one host: an IPv4 address, or an IPv6 /64.
    pub host: usize,
    /// For one network: an IPv4 /24, or an IPv6 /48.
    pub network: usize,
    /// For all hosts together.
    pub all: usize,
    /// For known hosts, in addition to the above.
    pub reserved: usize,
}

/// The share that was used up when a connection was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Full {
    /// The host's share.
    Host,
    /// The network's share.
    Network,
    /// The share of all hosts.
    All,
}

impl Full {
    /// Returns the name of the share in counters.
    pub fn label(self) -> &'static str {
        match self {
            Full::Host => "host",
            Full::Network => "network",
            Full::All => "all",
        }
    }
}

/// An admitted connection. Later ones have larger tickets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// The decision about a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// The ticket of the new connection.
    pub ticket: Ticket,
    /// The connection that is evicted for it, and the share that was used up.
    pub evicted: Option<(Ticket, Full)>,
}

/// A group of connections with a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Group {
    Reserved,
    ReservedHost(IpAddr),
    Open(Full, IpAddr),
}

/// The number of hosts that are remembered as having authenticated.
const FAMILIAR: usize = 1024;

/// The order of eviction: silent connections first, and among equals the oldest.
type Queue = BTreeSet<(bool, Ticket)>;

#[derive(Clone, Copy, Debug)]
struct Place {
    source: IpAddr,
    is_reserved: bool,
    has_spoken: bool,
}

/// The bookkeeping of unproven connections.
#[derive(Debug)]
pub struct Admission {
    shares: Shares,
    last: u64,
    places: HashMap<Ticket, Place>,
    groups: HashMap<Group, Queue>,
    /// The hosts that have authenticated, in the order in which they did so first.
    familiar: VecDeque<IpAddr>,
}

impl Admission {
    /// Creates an empty one.
    pub fn new(shares: Shares) -> Admission {
        let (places, groups) = (HashMap::new(), HashMap::new());
        Admission { shares, last: 0, places, groups, familiar: VecDeque::new() }
    }

    /// Admits a connection, and returns the one that is evicted for it. `is_expected`: the
    /// configuration names its source.
    pub fn admit(&mut self, source: IpAddr, is_expected: bool) -> Admitted {
        let source = host(source);
        let is_known = is_expected || self.familiar.contains(&source);
        let of_host = self.count(Group::ReservedHost(source));
        let is_reserved = is_known
            && of_host < self.shares.reserved.div_ceil(2)
            && self.count(Group::Reserved) < self.shares.reserved;
        let evicted = if is_reserved { None } else { self.make_room(source) };
        self.last += 1;
        let ticket = Ticket(self.last);
        let place = Place { source, is_reserved, has_spoken: false };
        self.places.insert(ticket, place);
        for group in groups(place) {
            self.groups.entry(group).or_default().insert((false, ticket));
        }
        Admitted { ticket, evicted }
    }

    /// Notes that a connection has sent a plausible message, so all silent ones are evicted before
    /// it.
    pub fn speak(&mut self, ticket: Ticket) {
        let Some(place) = self.places.get_mut(&ticket) else { return };
        if std::mem::replace(&mut place.has_spoken, true) {
            return;
        }
        for group in groups(*place) {
            let queue = self.groups.entry(group).or_default();
            queue.remove(&(false, ticket));
            queue.insert((true, ticket));
        }
    }

    /// Notes that a connection has authenticated, and remembers its host as known. Returns `false`
    /// if it was evicted before.
    pub fn prove(&mut self, ticket: Ticket) -> bool {
        let Some(Place { source, .. }) = self.places.get(&ticket) else { return false };
        if !self.familiar.contains(source) {
            self.familiar.push_back(*source);
            self.familiar.drain(..self.familiar.len().saturating_sub(FAMILIAR));
        }
        self.leave(ticket);
        true
    }

    /// Removes a connection that has ended.
    pub fn leave(&mut self, ticket: Ticket) {
        let Some(place) = self.places.remove(&ticket) else { return };
        for group in groups(place) {
            if let Some(queue) = self.groups.get_mut(&group) {
                queue.remove(&(place.has_spoken, ticket));
                if queue.is_empty() {
                    self.groups.remove(&group);
                }
            }
        }
    }

    /// Returns the number of unproven connections.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Returns `true` if there are none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Evicts the first connection of the narrowest group whose share is used up. That makes room
    /// in the wider groups, too.
    fn make_room(&mut self, source: IpAddr) -> Option<(Ticket, Full)> {
        let Shares { host, network, all, .. } = self.shares;
        let shares = [(Full::Host, host), (Full::Network, network), (Full::All, all)];
        let (full, _) = shares.into_iter().find(|(full, share)| self.count(open(*full, source)) >= *share)?;
        let (_, first) = *self.groups.get(&open(full, source))?.first()?;
        self.leave(first);
        Some((first, full))
    }

    fn count(&self, group: Group) -> usize {
        self.groups.get(&group).map_or(0, BTreeSet::len)
    }
}

fn groups(place: Place) -> impl Iterator<Item = Group> {
    let groups = match place.is_reserved {
        true => [Some(Group::Reserved), Some(Group::ReservedHost(place.source)), None],
        false => [Full::Host, Full::Network, Full::All].map(|full| Some(open(full, place.source))),
    };
    groups.into_iter().flatten()
}

fn open(full: Full, source: IpAddr) -> Group {
    let nowhere = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    Group::Open(
        full,
        match full {
            Full::Host => source,
            Full::Network => network(source),
            Full::All => nowhere,
        },
    )
}

/// Returns the address that represents the host: one IPv6 host may use all of a /64.
fn host(source: IpAddr) -> IpAddr {
    match source.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64)),
        v4 => v4,
    }
}

fn network(source: IpAddr) -> IpAddr {
    match source {
        IpAddr::V4(v4) => IpAddr::V4((v4.to_bits() >> 8 << 8).into()),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() >> 80 << 80)),
    }
}

/// An [`Admission`] whose decisions tasks can wait for.
#[derive(Debug)]
pub struct Gate(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    admission: Admission,
    /// Notified when a connection is evicted.
    waiting: HashMap<Ticket, Arc<Notify>>,
}

/// An admitted connection, until this is dropped.
#[derive(Debug)]
pub struct Pass {
    gate: Arc<Gate>,
    ticket: Ticket,
    go: Arc<Notify>,
}

impl Gate {
    /// Creates a gate with these shares.
    pub fn new(shares: Shares) -> Arc<Gate> {
        Arc::new(Gate(Mutex::new(Inner { admission: Admission::new(shares), waiting: HashMap::new() })))
    }

    /// Admits a connection. Returns its pass, and the share that was used up if another one was
    /// evicted.
    pub fn enter(self: &Arc<Gate>, source: IpAddr, is_expected: bool) -> (Pass, Option<Full>) {
        let mut inner = self.inner();
        let Admitted { ticket, evicted } = inner.admission.admit(source, is_expected);
        if let Some(other) = evicted.and_then(|(other, _)| inner.waiting.remove(&other)) {
            other.notify_one();
        }
        let go = Arc::new(Notify::new());
        inner.waiting.insert(ticket, go.clone());
        (Pass { gate: self.clone(), ticket, go }, evicted.map(|(_, full)| full))
    }

    /// Returns the number of unproven connections.
    pub fn count(&self) -> usize {
        self.inner().admission.len()
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("nobody panics while it is locked")
    }
}

impl Pass {
    /// See [`Admission::speak`].
    pub fn speak(&self) {
        self.gate.inner().admission.speak(self.ticket);
    }

    /// Leaves the gate because the connection has authenticated. Returns `false` if it was evicted
    /// before; otherwise it never will be.
    #[must_use]
    pub fn prove(self) -> bool {
        self.gate.inner().admission.prove(self.ticket)
    }

    /// Returns a future that completes when this connection is evicted.
    pub fn evicted(&self) -> impl Future<Output = ()> + Send + use<> {
        let go = self.go.clone();
        async move { go.notified().await }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut inner = self.gate.inner();
        inner.admission.leave(self.ticket);
        inner.waiting.remove(&self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHARES: Shares = Shares { host: 4, network: 8, all: 12, reserved: 6 };

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn admit(admission: &mut Admission, source: &str) -> (Ticket, Option<(Ticket, Full)>) {
        let Admitted { ticket, evicted } = admission.admit(ip(source), false);
        (ticket, evicted)
    }

    /// Admits one connection from each of so many networks.
    fn admit_from_everywhere(admission: &mut Admission, count: usize) -> Vec<Ticket> {
        (0..count).map(|number| admit(admission, &format!("10.0.{number}.1")).0).collect()
    }

    #[test]
    fn one_host_that_takes_more_than_its_share_loses_its_own_oldest() {
        let mut admission = Admission::new(SHARES);
        let (other, _) = admit(&mut admission, "192.0.2.1");
        let own: Vec<_> = (0..4).map(|_| admit(&mut admission, "198.51.100.1").0).collect();
        for oldest in own {
            assert_eq!(admit(&mut admission, "198.51.100.1").1, Some((oldest, Full::Host)));
        }
        assert_eq!(admission.len(), 5);
        assert!(admission.places.contains_key(&other));
    }

    #[test]
    fn a_network_of_hosts_has_one_share() {
        let mut admission = Admission::new(SHARES);
        let hosts: Vec<_> =
            (0..8).map(|number| admit(&mut admission, &format!("198.51.100.{number}")).0).collect();
        assert_eq!(admit(&mut admission, "198.51.100.9").1, Some((hosts[0], Full::Network)));
        assert_eq!(admit(&mut admission, "192.0.2.1").1, None);
    }

    #[test]
    fn addresses_of_one_prefix_are_one_host() {
        let mut admission = Admission::new(SHARES);
        let first = (0..4).map(|number| admit(&mut admission, &format!("2001:db8::{number}")).0).min();
        assert_eq!(admit(&mut admission, "2001:db8::ffff:9").1, Some((first.unwrap(), Full::Host)));
        assert_eq!(admit(&mut admission, "2001:db8:0:1::1").1, None);
        let mapped = admit(&mut admission, "::ffff:192.0.2.1").0;
        assert!((0..3).all(|_| admit(&mut admission, "192.0.2.1").1.is_none()));
        assert_eq!(admit(&mut admission, "192.0.2.1").1, Some((mapped, Full::Host)));
    }

    #[test]
    fn whoever_has_said_nothing_goes_first() {
        let mut admission = Admission::new(SHARES);
        let all = admit_from_everywhere(&mut admission, 12);
        admission.speak(all[0]);
        admission.speak(all[0]);
        assert_eq!(admit(&mut admission, "10.1.0.1").1, Some((all[1], Full::All)));
        all.iter().for_each(|ticket| admission.speak(*ticket));
        assert!(admission.len() == 12 && admission.places[&all[0]].has_spoken);
    }

    #[test]
    fn what_is_reserved_is_for_those_who_are_known() {
        let mut admission = Admission::new(SHARES);
        assert_eq!(admit_from_everywhere(&mut admission, 12).len(), 12);
        for _ in 0..3 {
            assert_eq!(admission.admit(ip("192.0.2.1"), true).evicted, None);
        }
        // One host gets half of the reserved room; further connections share the open room.
        assert!(matches!(admission.admit(ip("192.0.2.1"), true).evicted, Some((_, Full::All))));
        assert_eq!(admission.admit(ip("192.0.2.2"), true).evicted, None);
        assert_eq!(admission.len(), 16);
    }

    #[test]
    fn whoever_has_shown_who_it_is_is_known_from_then_on() {
        let mut admission = Admission::new(SHARES);
        let (peer, _) = admit(&mut admission, "192.0.2.1");
        assert!(admission.prove(peer) && !admission.prove(peer));
        assert_eq!(admit_from_everywhere(&mut admission, 12).len(), 12);
        assert_eq!(admit(&mut admission, "192.0.2.1").1, None);
        for number in 0..2 * FAMILIAR {
            let number = number as u32;
            let Admitted { ticket, .. } = admission.admit(IpAddr::V4((0x0a00_0000 + number).into()), false);
            assert!(admission.prove(ticket));
        }
        assert_eq!(admission.familiar.len(), FAMILIAR);
    }

    #[tokio::test]
    async fn a_place_that_is_needed_is_told_so_and_is_free_once_dropped() {
        let gate = Gate::new(SHARES);
        let passes: Vec<_> = (0..4).map(|_| gate.enter(ip("192.0.2.1"), false)).collect();
        assert!(passes.iter().all(|(_, full)| full.is_none()));
        let (late, full) = gate.enter(ip("192.0.2.1"), false);
        assert_eq!(full, Some(Full::Host));
        passes[0].0.evicted().await;
        assert_eq!(gate.count(), 4);
        drop((late, passes));
        assert_eq!(gate.count(), 0);
        assert!(gate.inner().waiting.is_empty() && gate.inner().admission.groups.is_empty());
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Admit(u8, u8, bool),
        Speak(usize),
        Leave(usize),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0..3u8, 0..4u8, any::<bool>()).prop_map(|(net, host, known)| Step::Admit(net, host, known)),
            1 => (0..40usize).prop_map(Step::Speak),
            2 => (0..40usize).prop_map(Step::Leave),
        ]
    }

    proptest! {
        #[test]
        fn no_group_has_more_than_its_share_and_nobody_is_turned_away(
            steps in proptest::collection::vec(any_step(), 1..200),
        ) {
            let mut admission = Admission::new(SHARES);
            let mut inside: Vec<Ticket> = Vec::new();
            for step in steps {
                let at = |index: usize, inside: &[Ticket]| inside.get(index % inside.len().max(1)).copied();
                match step {
                    Step::Admit(net, host, is_known) => {
                        let admitted = admission.admit(IpAddr::from([10, 0, net, host]), is_known);
                        if let Some((evicted, _)) = admitted.evicted {
                            prop_assert!(inside.contains(&evicted));
                            inside.retain(|ticket| *ticket != evicted);
                        }
                        inside.push(admitted.ticket);
                    }
                    Step::Speak(index) => at(index, &inside).into_iter().for_each(|ticket| admission.speak(ticket)),
                    Step::Leave(index) => {
                        if let Some(ticket) = at(index, &inside) {
                            admission.leave(ticket);
                            inside.retain(|other| *other != ticket);
                        }
                    }
                }
                prop_assert_eq!(admission.len(), inside.len());
                for (group, queue) in &admission.groups {
                    let share = match group {
                        Group::Reserved => SHARES.reserved,
                        Group::ReservedHost(_) => SHARES.reserved / 2,
                        Group::Open(Full::Host, _) => SHARES.host,
                        Group::Open(Full::Network, _) => SHARES.network,
                        Group::Open(Full::All, _) => SHARES.all,
                    };
                    prop_assert!(!queue.is_empty() && queue.len() <= share, "{group:?}: {}", queue.len());
                }
            }
        }
    }
}
