//! Offers that found no other end in time. Their connections are on TCP, and their processes do not
//! offer them again by themselves. When the other end is offered after all, the process gets a
//! message, and may offer its end anew. That happens when `shunt attach` enters the program at the
//! other end.
//!
//! ```text
//!   open ──GiveUp──> given up ──offer of the other end──> Wanted is sent, and the record removed
//!                       └──withdrawn, offered again, or the process has ended──> removed
//! ```
//!
//! A record is no more than a hint: the new offer is checked like every other. Pure: no I/O.

use std::collections::HashMap;

use shunt_kernel::sequence::Origin;

use crate::pairing::{Key, Offer, ProcessId};
use crate::principal::{Budget, Principal};

/// A registry of such offers. At most one per key, and per ticket of a process.
#[derive(Debug)]
pub(crate) struct GivenUp {
    /// Limits the number of records.
    budget: Budget,
    by_key: HashMap<Key, (Offer, Principal)>,
    by_origin: HashMap<Origin, Key>,
    by_process: HashMap<ProcessId, HashMap<u64, Key>>,
}

impl GivenUp {
    pub(crate) fn new(limit: usize) -> GivenUp {
        GivenUp {
            budget: Budget::new(limit),
            by_key: HashMap::new(),
            by_origin: HashMap::new(),
            by_process: HashMap::new(),
        }
    }

    /// Keeps a record of an offer, unless its principal or its process, which may have up to
    /// `limit`, has too many.
    pub(crate) fn keep(&mut self, offer: Offer, whose: Principal, limit: usize) {
        self.remove(&offer.key);
        self.withdraw(offer.process, offer.ticket);
        let has_room = self.by_process.get(&offer.process).map_or(0, HashMap::len) < limit;
        if !has_room || !self.budget.take(whose, 1) {
            return;
        }
        if let Some(origin) = offer.origin() {
            self.by_origin.insert(origin, offer.key);
        }
        self.by_process.entry(offer.process).or_default().insert(offer.ticket, offer.key);
        self.by_key.insert(offer.key, (offer, whose));
    }

    /// Removes and returns the record of the end that mirrors `offer`.
    pub(crate) fn take_other_end(&mut self, offer: &Offer) -> Option<Offer> {
        let by_origin = || {
            let mirrored = offer.origin()?.mirrored();
            mirrored.iter().find_map(|origin| self.by_origin.get(origin)).copied()
        };
        let mirrored = offer.key.mirrored();
        let key = if self.by_key.contains_key(&mirrored) { mirrored } else { by_origin()? };
        self.remove(&key)
    }

    /// Removes the record of a ticket.
    pub(crate) fn withdraw(&mut self, process: ProcessId, ticket: u64) {
        if let Some(key) = self.by_process.get(&process).and_then(|tickets| tickets.get(&ticket)).copied() {
            self.remove(&key);
        }
    }

    /// Removes all records of a process that has ended.
    pub(crate) fn forget(&mut self, process: ProcessId) {
        for key in self.by_process.remove(&process).unwrap_or_default().into_values() {
            self.remove(&key);
        }
    }

    fn remove(&mut self, key: &Key) -> Option<Offer> {
        let (offer, whose) = self.by_key.remove(key)?;
        self.budget.give(whose, 1);
        if let Some(origin) = offer.origin().filter(|origin| self.by_origin.get(origin) == Some(key)) {
            self.by_origin.remove(&origin);
        }
        if let Some(tickets) = self.by_process.get_mut(&offer.process) {
            tickets.remove(&offer.ticket);
            if tickets.is_empty() {
                self.by_process.remove(&offer.process);
            }
        }
        Some(offer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pairing::tests::{key, offer, with_origin};
    use crate::principal::Principal;
    use proptest::prelude::*;

    const LIMIT: usize = 3;

    fn whose() -> Principal {
        Principal::unknown(Some(7))
    }

    #[test]
    fn the_other_end_finds_a_record_by_addresses_or_by_sequence_numbers_once() {
        let mut given_up = GivenUp::new(100);
        given_up.keep(offer(1, 5, 50, key(0, 1, 2)), whose(), LIMIT);
        assert_eq!(given_up.take_other_end(&offer(2, 0, 51, key(0, 1, 2))), None, "the same end");
        assert_eq!(given_up.take_other_end(&offer(2, 0, 51, key(9, 2, 1))), None, "another namespace");
        let other = offer(2, 0, 51, key(0, 2, 1));
        assert_eq!(given_up.take_other_end(&other).map(|it| (it.process, it.ticket)), Some((1, 5)));
        assert_eq!(given_up.take_other_end(&other), None);
        given_up.keep(with_origin(offer(1, 6, 52, key(0, 1, 3)), 100, 500), whose(), LIMIT);
        let abroad = with_origin(offer(3, 0, 53, key(4, 8, 9)), 500, 101);
        assert_eq!(given_up.take_other_end(&abroad).map(|it| it.ticket), Some(6));
    }

    #[test]
    fn a_process_has_no_more_records_than_its_limit() {
        let mut given_up = GivenUp::new(100);
        for ticket in 0..10u16 {
            given_up.keep(offer(1, ticket.into(), 50, key(0, 1, 100 + ticket)), whose(), LIMIT);
        }
        assert_eq!(given_up.budget.all(), LIMIT);
        given_up.forget(1);
        assert_eq!(given_up.budget.all(), 0);
    }

    proptest! {
        #[test]
        fn the_maps_agree(steps in proptest::collection::vec((0..4u8, 0..3u64, 0..4u64, 1..4u16, 1..4u16, 0..3u32), 0..60)) {
            let mut given_up = GivenUp::new(100);
            for (step, process, ticket, local, remote, origin) in steps {
                let it = with_origin(offer(process, ticket, 0, key(0, local, remote)), origin, origin + 1);
                match step {
                    0 | 1 => given_up.keep(it, whose(), LIMIT),
                    2 => _ = given_up.take_other_end(&it),
                    _ => given_up.withdraw(process, ticket),
                }
                let count = given_up.by_key.len();
                prop_assert_eq!(given_up.budget.all(), count);
                prop_assert_eq!(given_up.by_process.values().map(HashMap::len).sum::<usize>(), count);
                prop_assert!(given_up.by_origin.values().all(|key| given_up.by_key.contains_key(key)));
                prop_assert!(given_up.by_process.values().all(|tickets| tickets.len() <= LIMIT));
            }
            (0..3).for_each(|process| given_up.forget(process));
            prop_assert!(given_up.by_key.is_empty() && given_up.by_origin.is_empty());
        }
    }
}
