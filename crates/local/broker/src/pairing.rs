//! Open offers, and the rules by which two of them are one connection. Pure: no I/O, and every
//! look-up is by hash.
//!
//! ```text
//!   offered ──no match──> open ──match──> paired, or waiting for a link
//!                          └──withdrawn, replaced, ambiguous or dead──> removed
//! ```
//!
//! Example within a namespace: process 1 offers a socket from 127.0.0.1:4000 to 127.0.0.1:80, and
//! the offer is left open. Process 2 offers one from 127.0.0.1:80 to 127.0.0.1:4000. The addresses
//! mirror each other, so [`Offers::look`] returns [`Finding::Counterpart`]. If the initial sequence
//! numbers are known and do not mirror each other, it returns [`Finding::Unlike`].
//!
//! Example across namespaces: the client's SYN has the sequence number 100, and the first byte of
//! the server the number 500. The client's origin is (sent 100, received 500), and that of the
//! server (sent 500, received 101). These match whatever the addresses are.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Instant;

use shunt_kernel::sequence::{Origin, Seen};

use crate::principal::{Budget, Principal};

/// The id of a process in the broker: one per control connection, never reused.
pub(crate) type ProcessId = u64;

/// The namespace and addresses of a socket. Within one network namespace and without address
/// translation, the two ends of a connection have mirrored addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) netns: u64,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
}

impl Key {
    pub(crate) fn mirrored(self) -> Key {
        Key { netns: self.netns, local: self.remote, remote: self.local }
    }
}

/// A socket that a process offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) process: ProcessId,
    pub(crate) ticket: u64,
    pub(crate) cookie: u64,
    pub(crate) key: Key,
    /// The initial sequence numbers, if the kernel could report them. They are mirrored at the
    /// other end, in any namespace.
    pub(crate) seen: Option<Seen>,
    /// The time of the offer.
    pub(crate) since: Instant,
}

impl Offer {
    pub(crate) fn origin(&self) -> Option<Origin> {
        self.seen.map(|seen| seen.origin)
    }

    /// Returns whether the initial sequence numbers of both mirror each other, or are unknown.
    pub(crate) fn may_mirror(&self, other: &Offer) -> bool {
        match (self.origin(), other.origin()) {
            (Some(one), Some(two)) => one.mirrored().contains(&two),
            _ => true,
        }
    }
}

/// The match of an offer among the open offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// None: the offer can be left open.
    Nothing,
    /// The other end, which stays open until it is removed.
    Counterpart(Offer),
    /// An offer with mirrored addresses that is nevertheless not the other end, by its sequence
    /// numbers. It stays open.
    Unlike(Offer),
    /// An offer of another socket with the same addresses, which stays open. One of the two sockets
    /// is dead.
    Occupied(Offer),
    /// Several pairs are possible. Contains all offers that could be part of one; they stay open.
    Ambiguous(Vec<Offer>),
    /// An offer of this socket by another process. That offer has been removed.
    Shared(Offer),
}

/// A registry of open offers. At most one per key, per cookie, and per ticket of a process.
#[derive(Debug)]
pub(crate) struct Offers {
    /// Limits the number of open offers.
    budget: Budget,
    /// The principal of each process.
    owners: HashMap<ProcessId, Principal>,
    by_key: HashMap<Key, Offer>,
    /// Two sockets with equal initial sequence numbers are practically impossible. If there are
    /// two, neither is paired.
    by_origin: HashMap<Origin, Vec<Key>>,
    by_cookie: HashMap<u64, Key>,
    by_process: HashMap<ProcessId, HashMap<u64, Key>>,
}

impl Offers {
    pub(crate) fn new(limit: usize) -> Offers {
        Offers {
            budget: Budget::new(limit),
            owners: HashMap::new(),
            by_key: HashMap::new(),
            by_origin: HashMap::new(),
            by_cookie: HashMap::new(),
            by_process: HashMap::new(),
        }
    }

    /// Registers a process.
    pub(crate) fn join(&mut self, process: ProcessId, whose: Principal) {
        self.owners.insert(process, whose);
    }

    /// Changes the principal of a process, and moves the charge for its offers.
    pub(crate) fn becomes(&mut self, process: ProcessId, whose: Principal) {
        let count = self.count(process);
        if let Some(before) = self.owners.insert(process, whose) {
            self.budget.give(before, count);
            self.budget.force(whose, count);
        }
    }

    /// Returns whether a process, which may have up to `limit` open offers, may leave one more
    /// open.
    pub(crate) fn has_room(&self, process: ProcessId, limit: usize) -> bool {
        let owner = self.owners.get(&process);
        self.count(process) < limit && owner.is_some_and(|owner| self.budget.allows(*owner, 1))
    }

    /// Returns all open offers.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Offer> {
        self.by_key.values()
    }

    /// Returns whether this offer is open.
    pub(crate) fn contains(&self, offer: &Offer) -> bool {
        self.by_key.get(&offer.key) == Some(offer)
    }

    /// Returns the match of `offer`. Removes an older offer of this socket by the same process.
    pub(crate) fn look(&mut self, offer: &Offer) -> Finding {
        if let Some(older) = self.by_cookie.get(&offer.cookie).copied().and_then(|key| self.remove(&key))
            && older.process != offer.process
        {
            return Finding::Shared(older);
        }
        if let Some(older) = self.by_key.get(&offer.key) {
            return Finding::Occupied(*older);
        }
        match self.by_key.get(&offer.key.mirrored()) {
            Some(other) if offer.may_mirror(other) => Finding::Counterpart(*other),
            Some(other) => Finding::Unlike(*other),
            None => offer.origin().map_or(Finding::Nothing, |origin| self.look_by_origin(origin)),
        }
    }

    /// Matches by initial sequence numbers, across namespaces and address translation. Returns the
    /// only offer that mirrors `origin`, if no third offer could be either of the two.
    fn look_by_origin(&self, origin: Origin) -> Finding {
        let with =
            |origin: &Origin| self.by_origin.get(origin).into_iter().flatten().map(|key| self.by_key[key]);
        let candidates: Vec<_> = origin.mirrored().iter().flat_map(with).collect();
        match candidates[..] {
            [] => Finding::Nothing,
            [other] if !self.by_origin.contains_key(&origin) => Finding::Counterpart(other),
            _ => Finding::Ambiguous(candidates.into_iter().chain(with(&origin)).collect()),
        }
    }

    /// Leaves `offer` open. Removes any offer with its key, cookie or ticket.
    pub(crate) fn insert(&mut self, offer: Offer) {
        self.withdraw(offer.process, offer.ticket);
        self.remove(&offer.key);
        if let Some(key) = self.by_cookie.get(&offer.cookie).copied() {
            self.remove(&key);
        }
        if let Some(owner) = self.owners.get(&offer.process) {
            self.budget.force(*owner, 1);
        }
        self.by_key.insert(offer.key, offer);
        if let Some(origin) = offer.origin() {
            self.by_origin.entry(origin).or_default().push(offer.key);
        }
        self.by_cookie.insert(offer.cookie, offer.key);
        self.by_process.entry(offer.process).or_default().insert(offer.ticket, offer.key);
    }

    /// Removes the offer with these addresses.
    pub(crate) fn remove(&mut self, key: &Key) -> Option<Offer> {
        let offer = self.by_key.remove(key)?;
        self.unindex(&offer);
        if let Some(tickets) = self.by_process.get_mut(&offer.process) {
            tickets.remove(&offer.ticket);
            if tickets.is_empty() {
                self.by_process.remove(&offer.process);
            }
        }
        Some(offer)
    }

    /// Removes the offer of a process with this ticket.
    pub(crate) fn withdraw(&mut self, process: ProcessId, ticket: u64) -> Option<Offer> {
        let key = *self.by_process.get(&process)?.get(&ticket)?;
        self.remove(&key)
    }

    /// Removes all offers of a process.
    pub(crate) fn forget(&mut self, process: ProcessId) {
        for key in self.by_process.remove(&process).unwrap_or_default().into_values() {
            if let Some(offer) = self.by_key.remove(&key) {
                self.unindex(&offer);
            }
        }
        self.owners.remove(&process);
    }

    fn unindex(&mut self, offer: &Offer) {
        if let Some(owner) = self.owners.get(&offer.process) {
            self.budget.give(*owner, 1);
        }
        self.by_cookie.remove(&offer.cookie);
        if let Some(origin) = offer.origin()
            && let Some(keys) = self.by_origin.get_mut(&origin)
        {
            keys.retain(|key| *key != offer.key);
            if keys.is_empty() {
                self.by_origin.remove(&origin);
            }
        }
    }

    /// Returns the number of open offers of a process.
    pub(crate) fn count(&self, process: ProcessId) -> usize {
        self.by_process.get(&process).map_or(0, HashMap::len)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::principal::tests::ROOT;
    use proptest::prelude::*;
    use shunt_kernel::sequence::Place;
    use std::sync::LazyLock;

    fn offers() -> Offers {
        let mut offers = Offers::new(1000);
        (0..4).for_each(|process| offers.join(process, ROOT));
        offers
    }

    pub(crate) fn key(netns: u64, local: u16, remote: u16) -> Key {
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        Key { netns, local: address(local), remote: address(remote) }
    }

    pub(crate) fn offer(process: ProcessId, ticket: u64, cookie: u64, key: Key) -> Offer {
        static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
        Offer { process, ticket, cookie, key, seen: None, since: *BEGAN }
    }

    pub(crate) fn with_origin(offer: Offer, sent: u32, received: u32) -> Offer {
        Offer { seen: Some(Seen { origin: Origin { sent, received }, place: Place::default() }), ..offer }
    }

    #[test]
    fn mirrored_addresses_in_one_namespace_meet() {
        let mut offers = offers();
        let first = offer(1, 1, 10, key(0, 80, 999));
        offers.insert(first);
        assert_eq!(offers.look(&offer(2, 1, 11, key(0, 999, 80))), Finding::Counterpart(first));
        assert_eq!(offers.look(&offer(2, 1, 11, key(5, 999, 80))), Finding::Nothing);
        assert_eq!(offers.look(&offer(2, 1, 11, key(0, 999, 81))), Finding::Nothing);
    }

    #[test]
    fn mirrored_addresses_of_other_streams_do_not_meet() {
        let mut offers = offers();
        let opener = with_origin(offer(1, 1, 10, key(0, 999, 80)), 100, 500);
        let acceptor = offer(2, 1, 11, key(0, 80, 999));
        offers.insert(opener);
        for (sent, received) in [(500, 100), (500, 102), (501, 101), (499, 102), (498, 101), (7, 9)] {
            assert_eq!(offers.look(&with_origin(acceptor, sent, received)), Finding::Unlike(opener));
        }
        assert_eq!(offers.look(&with_origin(acceptor, 500, 101)), Finding::Counterpart(opener));
        // This one called `connect` too.
        assert_eq!(offers.look(&with_origin(acceptor, 499, 101)), Finding::Counterpart(opener));
        // If the kernel could not report the numbers of one of the two, the addresses decide.
        assert_eq!(offers.look(&acceptor), Finding::Counterpart(opener));
    }

    #[test]
    fn mirrored_origins_meet_across_namespaces() {
        let mut offers = offers();
        // The opener's SYN was number 100, the acceptor's first byte is number 500.
        let opener = with_origin(offer(1, 1, 10, key(1, 999, 80)), 100, 500);
        let acceptor = with_origin(offer(2, 1, 11, key(2, 8080, 4321)), 500, 101);
        offers.insert(opener);
        assert_eq!(offers.look(&acceptor), Finding::Counterpart(opener));
        offers.forget(1);
        offers.insert(acceptor);
        assert_eq!(offers.look(&opener), Finding::Counterpart(acceptor));
        // One number is off by one, both ends accepted, or the numbers are unknown.
        for (sent, received) in [(100, 502), (101, 500), (99, 500), (102, 500), (101, 499)] {
            assert_eq!(offers.look(&with_origin(opener, sent, received)), Finding::Nothing);
        }
        assert_eq!(offers.look(&Offer { seen: None, ..opener }), Finding::Nothing);
        assert_eq!(offers.remove(&acceptor.key), Some(acceptor));
        assert!(offers.by_origin.is_empty());
    }

    #[test]
    fn whatever_could_be_two_pairs_is_none() {
        let opener = |cookie, netns| with_origin(offer(1, cookie, cookie, key(netns, 999, 80)), 100, 500);
        let acceptor = |cookie, netns| with_origin(offer(2, cookie, cookie, key(netns, 80, 9)), 500, 101);
        let mut offers = offers();
        offers.insert(opener(10, 1));
        offers.insert(opener(11, 2));
        let finding = offers.look(&acceptor(20, 3));
        assert_eq!(finding, Finding::Ambiguous(vec![opener(10, 1), opener(11, 2)]));
        offers.remove(&opener(11, 2).key);
        offers.insert(acceptor(21, 4));
        let finding = offers.look(&acceptor(20, 3));
        assert_eq!(finding, Finding::Ambiguous(vec![opener(10, 1), acceptor(21, 4)]));
        // Without the other candidates it is not ambiguous any more.
        offers.remove(&acceptor(21, 4).key);
        assert_eq!(offers.look(&acceptor(20, 3)), Finding::Counterpart(opener(10, 1)));
    }

    #[test]
    fn the_same_socket_again_replaces_or_is_shared() {
        let mut offers = offers();
        let first = offer(1, 1, 10, key(0, 80, 999));
        offers.insert(first);
        let again = offer(1, 2, 10, key(0, 80, 999));
        assert_eq!(offers.look(&again), Finding::Nothing);
        offers.insert(again);
        assert_eq!(offers.withdraw(1, 1), None);
        assert_eq!(offers.look(&offer(3, 7, 10, key(0, 80, 999))), Finding::Shared(again));
        assert_eq!(offers.count(1), 0);
    }

    #[test]
    fn reused_addresses_are_told_apart_by_cookie() {
        let mut offers = offers();
        let old = offer(1, 1, 10, key(0, 80, 999));
        offers.insert(old);
        let new = offer(2, 1, 20, key(0, 80, 999));
        assert_eq!(offers.look(&new), Finding::Occupied(old));
        offers.insert(new);
        assert_eq!((offers.count(1), offers.count(2)), (0, 1));
    }

    /// Reference implementation that scans a list.
    #[derive(Default)]
    struct Oracle(Vec<Offer>);

    impl Oracle {
        fn look(&mut self, offer: &Offer) -> Finding {
            let same = |other: &&Offer| other.cookie == offer.cookie;
            if let Some(older) = self.0.iter().find(same).copied() {
                self.0.retain(|other| other.cookie != offer.cookie);
                if older.process != offer.process {
                    return Finding::Shared(older);
                }
            }
            let at = |key: Key| self.0.iter().find(|other| other.key == key).copied();
            if let Some(older) = at(offer.key) {
                return Finding::Occupied(older);
            }
            if let Some(other) = at(offer.key.mirrored()) {
                let (one, two) = (offer.origin(), other.origin());
                let begins = |end: u32, by: u32| end == by || end.wrapping_add(1) == by;
                let differ = one.zip(two).is_some_and(|(one, two)| {
                    let forth = begins(one.sent, two.received) && begins(two.sent, one.received);
                    // The acknowledged numbers include one SYN, or both.
                    !forth || one.sent == two.received && two.sent == one.received
                });
                return if differ { Finding::Unlike(other) } else { Finding::Counterpart(other) };
            }
            let Some(origin) = offer.origin() else { return Finding::Nothing };
            let having =
                |origin: Origin| self.0.iter().filter(move |other| other.origin() == Some(origin)).copied();
            let candidates: Vec<_> = origin.mirrored().into_iter().flat_map(having).collect();
            let rivals: Vec<_> = having(origin).collect();
            match (&candidates[..], &rivals[..]) {
                ([], _) => Finding::Nothing,
                ([other], []) => Finding::Counterpart(*other),
                _ => Finding::Ambiguous([candidates, rivals].concat()),
            }
        }

        fn insert(&mut self, offer: Offer) {
            self.0.retain(|other| {
                let ticket = (other.process, other.ticket) != (offer.process, offer.ticket);
                ticket && other.key != offer.key && other.cookie != offer.cookie
            });
            self.0.push(offer);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Look(Offer),
        Insert(Offer),
        Withdraw(ProcessId, u64),
        Remove(Key),
        Forget(ProcessId),
    }

    fn any_key() -> impl Strategy<Value = Key> {
        (0..2u64, 1..4u16, 1..4u16).prop_map(|(netns, local, remote)| key(netns, local, remote))
    }

    fn any_offer() -> impl Strategy<Value = Offer> {
        let origin = proptest::option::of((0..3u32, 0..3u32));
        (0..3u64, 0..4u64, 0..6u64, any_key(), origin).prop_map(|(process, ticket, cookie, key, origin)| {
            let offer = offer(process, ticket, cookie, key);
            origin.map_or(offer, |(sent, received)| with_origin(offer, sent, received))
        })
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => any_offer().prop_map(Step::Look),
            4 => any_offer().prop_map(Step::Insert),
            2 => (0..3u64, 0..4u64).prop_map(|(process, ticket)| Step::Withdraw(process, ticket)),
            1 => any_key().prop_map(Step::Remove),
            1 => (0..3u64).prop_map(Step::Forget),
        ]
    }

    proptest! {
        #[test]
        fn the_maps_agree_with_a_list(steps in proptest::collection::vec(any_step(), 0..80)) {
            let (mut offers, mut oracle) = (offers(), Oracle::default());
            for step in steps {
                match step {
                    Step::Look(offer) => prop_assert_eq!(offers.look(&offer), oracle.look(&offer)),
                    Step::Insert(offer) => { offers.insert(offer); oracle.insert(offer); }
                    Step::Withdraw(process, ticket) => {
                        offers.withdraw(process, ticket);
                        oracle.0.retain(|other| (other.process, other.ticket) != (process, ticket));
                    }
                    Step::Remove(key) => { offers.remove(&key); oracle.0.retain(|other| other.key != key); }
                    Step::Forget(process) => {
                        offers.forget(process);
                        offers.join(process, ROOT);
                        oracle.0.retain(|other| other.process != process);
                    }
                }
                prop_assert_eq!(offers.budget.all(), oracle.0.len());
                let origins: usize = offers.by_origin.values().map(Vec::len).sum();
                prop_assert_eq!(origins, oracle.0.iter().filter(|offer| offer.seen.is_some()).count());
                let held: usize = offers.by_process.values().map(HashMap::len).sum();
                prop_assert_eq!(offers.by_key.len(), oracle.0.len());
                prop_assert_eq!(offers.by_cookie.len(), oracle.0.len());
                prop_assert_eq!(held, oracle.0.len());
                prop_assert!(oracle.0.iter().all(|offer| offers.by_key.get(&offer.key) == Some(offer)));
            }
        }
    }
}
