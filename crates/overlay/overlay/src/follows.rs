//! Asks that follow their connections. To a service's container a client's router sends its Ask
//! only after the SYN, because the client's kernel chooses the container then. So the server's
//! program may accept the connection before the Ask has arrived, and the connection would stay on
//! the overlay.
//!
//! The server's router learns for each listener and client's host that Asks come late there, and
//! then lets the accept of an unannounced connection wait for its Ask, up to `patience-ms`.
//! Connections of programs without shunt, which have no Ask, would wait in vain. So each wait costs
//! a *credit*, which only late Asks earn:
//!
//! | state | event | then |
//! | --- | --- | --- |
//! | none | an Ask is late: its connection had been accepted, and stayed | [`LATE`] credits |
//! | some credits | a connection is accepted without an Ask | it waits, and one credit is taken |
//! | | that wait was not in vain: it has been promised | two credits are given back |
//! | | an Ask is late | [`LATE`] more, at most [`MOST`] |
//! | no credit | a connection is accepted without an Ask | it does not wait |
//! | any | [`LIFETIME`] without a late Ask, or a wait that was not in vain | none |
//!
//! So there are at most [`LATE`] waits in vain for each late Ask, and one for each that was not in
//! vain.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::promises::Client;

/// A listening address, and the name of a client there.
pub(crate) type Key = (SocketAddr, Client);

/// The waits in vain that a late Ask permits.
const LATE: u8 = 4;
/// The largest number of credits.
const MOST: u8 = 64;
/// The time for which the credits are valid.
const LIFETIME: Duration = Duration::from_secs(600);
/// The largest number of keys.
const KEYS: usize = 16_384;

/// The credits of all listeners and hosts.
#[derive(Debug, Default)]
pub(crate) struct Follows(HashMap<Key, Credits>);

#[derive(Clone, Copy, Debug)]
struct Credits {
    left: u8,
    until: Instant,
}

impl Follows {
    /// Notes that an Ask has come after its connection had been accepted, and had stayed.
    pub(crate) fn late(&mut self, key: Key, now: Instant) {
        self.add(key, LATE, now);
    }

    /// Returns `true` if a connection may wait for its Ask, and takes a credit.
    pub(crate) fn wait(&mut self, key: Key, now: Instant) -> bool {
        let Some(credits) = self.0.get_mut(&key) else { return false };
        if credits.left == 0 || now >= credits.until {
            return false;
        }
        credits.left -= 1;
        true
    }

    /// Notes that a wait was not in vain.
    pub(crate) fn came(&mut self, key: Key, now: Instant) {
        self.add(key, 2, now);
    }

    /// Forgets old credits.
    pub(crate) fn sweep(&mut self, now: Instant) {
        self.0.retain(|_, credits| now < credits.until);
    }

    fn add(&mut self, key: Key, more: u8, now: Instant) {
        if self.0.len() >= KEYS && !self.0.contains_key(&key) {
            return;
        }
        let credits = self.0.entry(key).or_insert(Credits { left: 0, until: now });
        credits.left = credits.left.saturating_add(more).min(MOST);
        credits.until = now + LIFETIME;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(host: u8) -> Key {
        ("10.50.2.2:80".parse().unwrap(), Client::Host([192, 168, 0, host].into()))
    }

    #[test]
    fn connections_wait_only_where_asks_come_late() {
        let (mut follows, now) = (Follows::default(), Instant::now());
        assert!(!follows.wait(key(1), now));
        follows.late(key(1), now);
        assert!(follows.wait(key(1), now) && !follows.wait(key(2), now));
    }

    #[test]
    fn a_few_waits_in_vain_end_the_waiting() {
        let (mut follows, now) = (Follows::default(), Instant::now());
        follows.late(key(1), now);
        let waits = (0..100).filter(|_| follows.wait(key(1), now)).count();
        assert_eq!(waits, usize::from(LATE));
        follows.late(key(1), now);
        assert!(follows.wait(key(1), now), "it has been late again");
    }

    #[test]
    fn waits_that_are_not_in_vain_go_on_and_pay_for_as_many_others() {
        let (mut follows, now) = (Follows::default(), Instant::now());
        follows.late(key(1), now);
        for _ in 0..1000 {
            assert!(follows.wait(key(1), now));
            follows.came(key(1), now);
            assert!(follows.wait(key(1), now), "one in vain for each");
        }
        for _ in 0..1000 {
            follows.came(key(1), now);
        }
        let waits = (0..1000).filter(|_| follows.wait(key(1), now)).count();
        assert_eq!(waits, usize::from(MOST));
    }

    #[test]
    fn credits_expire() {
        let (mut follows, now) = (Follows::default(), Instant::now());
        follows.late(key(1), now);
        assert!(follows.wait(key(1), now + LIFETIME / 2));
        follows.came(key(1), now + LIFETIME / 2);
        assert!(follows.wait(key(1), now + LIFETIME));
        assert!(!follows.wait(key(1), now + 2 * LIFETIME));
        follows.sweep(now + 2 * LIFETIME);
        assert!(follows.0.is_empty());
    }
}
