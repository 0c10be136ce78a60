//! Bounds for what programs and strangers can make a router keep: conversations of a network
//! namespace, conversations that other routers begin, and connections without a proof of the key.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use shunt_control::{Gate, Pass, Shares};

use crate::lock::lock;

/// The largest number of conversations that one namespace may have.
const SHARE: usize = 1024;
/// The largest number of conversations that other routers may have begun.
const VISITORS: usize = 4096;
/// Bounds for connections that have not proved the key. The hosts of one overlay are usually on one
/// network, so the bound for a network is that for all.
const UNPROVEN: Shares = Shares { host: 2048, network: 4096, all: 4096, reserved: 0 };

/// The counts that are bounded.
#[derive(Debug)]
pub(crate) struct Quotas {
    counts: Mutex<Counts>,
    unproven: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Counts {
    /// The number of conversations of each namespace.
    shares: HashMap<u64, usize>,
    /// The number of conversations that other routers have begun.
    visitors: usize,
}

impl Quotas {
    pub(crate) fn new() -> Quotas {
        Quotas { counts: Mutex::default(), unproven: Gate::new(UNPROVEN) }
    }

    /// Reserves room for one more conversation of a namespace.
    pub(crate) fn share(self: &Arc<Quotas>, namespace: u64) -> Option<Share> {
        let mut counts = lock(&self.counts);
        let count = counts.shares.entry(namespace).or_default();
        if *count >= SHARE {
            return None;
        }
        *count += 1;
        Some(Share { quotas: self.clone(), namespace })
    }

    /// Returns `true` if a namespace has used up the half of its room that offers of other routers
    /// may take. The other half is kept free, so that the accepting program can still ask.
    pub(crate) fn is_busy(&self, namespace: u64) -> bool {
        lock(&self.counts).shares.get(&namespace).is_some_and(|count| *count > SHARE / 2)
    }

    /// Reserves room for one more conversation of another router.
    pub(crate) fn visit(self: &Arc<Quotas>) -> Option<Visit> {
        let mut counts = lock(&self.counts);
        if counts.visitors >= VISITORS {
            return None;
        }
        counts.visitors += 1;
        Some(Visit(self.clone()))
    }

    /// Admits a connection from a host that has not proved yet that it has the key. Another one may
    /// be evicted for it.
    pub(crate) fn enter(&self, host: IpAddr) -> Pass {
        self.unproven.enter(host, false).0
    }
}

/// Room for a conversation, from [`Quotas::share`].
#[derive(Debug)]
pub(crate) struct Share {
    quotas: Arc<Quotas>,
    namespace: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut counts = lock(&self.quotas.counts);
        if let Some(count) = counts.shares.get_mut(&self.namespace) {
            *count -= 1;
            if *count == 0 {
                counts.shares.remove(&self.namespace);
            }
        }
    }
}

/// Room for a conversation, from [`Quotas::visit`].
#[derive(Debug)]
pub(crate) struct Visit(Arc<Quotas>);

impl Drop for Visit {
    fn drop(&mut self) {
        lock(&self.0.counts).visitors -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_its_own_room_and_half_of_it_is_the_programs() {
        let quotas = Arc::new(Quotas::new());
        let mut shares: Vec<Share> = (0..SHARE / 2).filter_map(|_| quotas.share(1)).collect();
        assert!(!quotas.is_busy(1));
        shares.extend((SHARE / 2..SHARE).filter_map(|_| quotas.share(1)));
        assert!(shares.len() == SHARE && quotas.is_busy(1));
        assert!(quotas.share(1).is_none() && quotas.share(2).is_some() && !quotas.is_busy(2));
        shares.clear();
        assert!(quotas.share(1).is_some());
        assert!(lock(&quotas.counts).shares.is_empty());
    }

    #[test]
    fn other_routers_have_room_again_once_they_leave() {
        let quotas = Arc::new(Quotas::new());
        let visits: Vec<Visit> = (0..VISITORS).filter_map(|_| quotas.visit()).collect();
        assert!(visits.len() == VISITORS && quotas.visit().is_none());
        drop(visits);
        assert!(quotas.visit().is_some());
    }
}
