//! A rate limit for each client address, which both engines apply to each message.
//!
//! A bucket is one word: the time, in nanoseconds, at which it will be full again (the generic cell
//! rate algorithm). A message moves it `interval` later. If it would be more than `burst` away from
//! now, the message is refused instead, and the word stays.
//!
//! ```text
//! interval 100 ms, burst 300 ms     word      message at 0    at 0    at 0    at 0      at 100
//!                                   past ->   100             200     300     refused   400
//! ```
//!
//! The buckets are behind the service's state, in memory that the kernel has too: `shunt_is_over` in
//! engine.bpf.h does the same. Addresses are hashed to buckets, so their number is fixed. Two
//! addresses share one with a probability of one in [`Limit::BUCKETS`].

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::SeqCst;

use rustix::net::{getpeername, sockopt};

use super::events::nanoseconds;
use crate::service::store::Store;

/// A rate limit, and the place of its buckets.
#[derive(Clone, Debug)]
pub struct Limit {
    /// Nanoseconds between two messages at the limit.
    pub(crate) interval: u64,
    /// Nanoseconds that a bucket holds.
    pub(crate) burst: u64,
    /// The offset of the buckets.
    pub(crate) at: usize,
    seed: RandomState,
}

impl Limit {
    const BUCKETS: u64 = 1 << 18;
    /// The alignment of the buckets: the size of an element of the memory.
    const PIECE: usize = 512;

    /// Allows each address `rate` messages per second, and `burst` of them together. The service has
    /// `state` bytes.
    pub fn new(rate: f64, burst: u64, state: usize) -> Limit {
        let interval = ((1e9 / rate) as u64).max(1);
        Limit {
            interval,
            burst: interval.saturating_mul(burst.max(1)).min(u64::MAX / 4),
            at: state.next_multiple_of(Limit::PIECE),
            seed: RandomState::new(),
        }
    }

    /// Returns the size of the memory for the service's state and the buckets.
    pub fn size(&self) -> usize {
        self.at + 8 * Limit::BUCKETS as usize
    }

    /// Returns the bucket of an address. An IPv6 host has a network of 64 bits.
    pub(crate) fn bucket(&self, address: IpAddr) -> u64 {
        let hash = match address.to_canonical() {
            IpAddr::V4(address) => self.seed.hash_one(address),
            IpAddr::V6(address) => self.seed.hash_one(&address.octets()[..8]),
        };
        hash % Limit::BUCKETS
    }

    /// Returns the bucket of a connection's peer.
    pub(crate) fn bucket_of(&self, client: &OwnedFd) -> u64 {
        let peer = getpeername(client).ok().flatten().and_then(|peer| SocketAddr::try_from(peer).ok());
        match (peer, sockopt::socket_peercred(client)) {
            (Some(peer), _) => self.bucket(peer.ip()),
            // At a Unix socket, each user has a bucket.
            (None, Ok(peer)) => self.seed.hash_one(peer.uid.as_raw()) % Limit::BUCKETS,
            (None, Err(_)) => 0,
        }
    }

    /// Takes a message out of a bucket. Returns false if the bucket is empty.
    pub(crate) fn allows(&self, store: &Store, bucket: u64) -> bool {
        self.allows_at(store, bucket, nanoseconds())
    }

    fn allows_at(&self, store: &Store, bucket: u64, now: u64) -> bool {
        let Some(word) = store.at(self.at + 8 * bucket as usize) else { return true };
        let take = |full: u64| {
            let next = full.max(now) + self.interval;
            (next - now <= self.burst).then_some(next)
        };
        word.fetch_update(SeqCst, SeqCst, take).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_has_its_burst_and_then_its_rate() {
        let limit = Limit::new(10.0, 3, 1000);
        let store = Store::new(limit.size(), false).unwrap();
        let mut now = 1_000_000_000;
        let allowed = |now| (0..10).filter(|_| limit.allows_at(&store, 7, now)).count();
        assert_eq!(allowed(now), 3);
        now += 99_000_000;
        assert_eq!(allowed(now), 0);
        now += 1_000_000;
        assert_eq!(allowed(now), 1);
        now += 10_000_000_000;
        assert_eq!(allowed(now), 3);
        assert!(limit.allows_at(&store, 8, now));
    }

    #[test]
    fn addresses_have_their_own_buckets() {
        let limit = Limit::new(10.0, 3, 0);
        let bucket = |address: &str| limit.bucket(address.parse().unwrap());
        assert_eq!(bucket("10.0.0.1"), bucket("::ffff:10.0.0.1"));
        assert_eq!(bucket("2001:db8::1"), bucket("2001:db8::ffff:1"));
        assert_ne!(bucket("10.0.0.1"), bucket("10.0.0.2"));
    }
}
