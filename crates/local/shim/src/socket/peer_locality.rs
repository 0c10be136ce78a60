//! When a connection is offered whose peer may be on this host or on another, as between
//! containers. Its addresses do not show which.
//!
//! An offer costs some tens of microseconds, so offers must be rare in relation to the operations
//! that they could save (L7). The process remembers peers by a hash of their address. After each
//! offer that was not paired, the next connection with that peer is offered after four times as
//! many operations. After one that was paired, the number is the smallest again.
//!
//! Example: a service calls a database on another host, with a new connection each time. The first
//! is offered after 32 operations, the next after 128, and from the fifth on after 4096.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU8, Ordering::*};

use crate::base::process;
use crate::socket::endpoint::Endpoint;

/// Operations before the first offer to a peer.
const SHORTEST: u32 = 32;
/// The most operations before an offer. An offer is then less than a thousandth of the work.
const LONGEST: u32 = 4096;
/// The size of the table. If many distant peers fill it, new peers share their entries and are
/// offered late as well.
const SLOTS: usize = 256;

/// Offers in a row that were not paired, by the hash of the peer's address.
static IN_VAIN: [AtomicU8; SLOTS] = [const { AtomicU8::new(0) }; SLOTS];

/// Returns the number of operations after which a connection with this peer is offered.
pub(crate) fn patience(peer: IpAddr) -> u32 {
    if process::offers_at_once() {
        return 1;
    }
    let in_vain = u32::from(IN_VAIN[slot(peer)].load(Relaxed));
    (SHORTEST << (2 * in_vain.min(8))).min(LONGEST)
}

/// Returns the number of operations until the next check of a condition that may change, given the
/// number before the last one.
pub(crate) fn longer(operations: u32) -> u32 {
    let least = if process::offers_at_once() { 1 } else { SHORTEST };
    operations.saturating_mul(4).clamp(least, LONGEST)
}

/// Records the offer of an endpoint whose peer may be on another host.
pub(crate) fn offered(endpoint: &Endpoint, peer: IpAddr) {
    endpoint.offer.set_distance(slot(peer));
}

/// Records that the offer was paired.
pub(crate) fn paired(endpoint: &Endpoint) {
    if let Some(in_vain) = taken_from(endpoint) {
        in_vain.store(0, Relaxed);
    }
}

/// Records that the offer was not paired before it ended.
pub(crate) fn unpaired(endpoint: &Endpoint) {
    if let Some(in_vain) = taken_from(endpoint) {
        in_vain.store(in_vain.load(Relaxed).saturating_add(1), Relaxed);
    }
}

fn taken_from(endpoint: &Endpoint) -> Option<&'static AtomicU8> {
    IN_VAIN.get(endpoint.offer.take_distance()?)
}

fn slot(peer: IpAddr) -> usize {
    // FNV-1a. Any hash that spreads the addresses will do.
    let add = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    let hash = match peer {
        IpAddr::V4(v4) => v4.octets().into_iter().fold(0x811c_9dc5, add),
        IpAddr::V6(v6) => v6.octets().into_iter().fold(0x811c_9dc5, add),
    };
    (hash ^ hash >> 16) as usize % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distant_peers_are_offered_ever_later_and_near_ones_soon() {
        let peer = IpAddr::from([10, 1, 2, 3]);
        let endpoint = Endpoint::default();
        let mut watched = Vec::new();
        for _ in 0..300 {
            watched.push(patience(peer));
            offered(&endpoint, peer);
            unpaired(&endpoint);
            // Only an offer counts.
            unpaired(&endpoint);
        }
        assert_eq!(watched[..5], [32, 128, 512, 2048, 4096]);
        assert_eq!(watched[299], LONGEST);
        offered(&endpoint, peer);
        paired(&endpoint);
        assert_eq!(patience(peer), SHORTEST);
    }
}
