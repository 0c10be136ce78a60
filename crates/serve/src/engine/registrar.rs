//! Changes of the backends that the service itself asks for, by `shunt_register`.
//!
//! ```text
//! callback ── Effect::Register ──► ask ── a queue, bounded ──► next: the thread of the control socket,
//!                                   │                          which changes the list as for `register`
//!                                   └── not permitted, or no address: counted as refused
//! ```
//!
//! The operator names the networks whose addresses a service may register. Without one it may change
//! nothing. It cannot register Unix sockets, which an address of the network does not protect.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::backends::MAX_WEIGHT;
use super::counts::Count;

/// A change that a service asks for, with the address as it wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Add(Arc<[u8]>, u32),
    Remove(Arc<[u8]>),
}

/// A change that the operator permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permitted {
    Add(SocketAddr, u32),
    Remove(SocketAddr),
}

/// The queue of changes.
#[derive(Debug, Default)]
pub(crate) struct Registrar {
    pub(crate) networks: Vec<IpNet>,
    queue: Mutex<VecDeque<Permitted>>,
    notify: Notify,
    done: Count,
    refused: Count,
}

/// The most changes that wait.
const QUEUED: usize = 1024;

impl Registrar {
    /// Queues a change, or counts it as refused.
    pub(crate) fn ask(&self, change: Change) {
        let Some(permitted) = self.permit(&change) else { return self.refuse("it is not permitted") };
        let mut queue = self.queue();
        if queue.len() >= QUEUED {
            drop(queue);
            return self.refuse("too many changes wait");
        }
        queue.push_back(permitted);
        self.notify.notify_one();
    }

    fn permit(&self, change: &Change) -> Option<Permitted> {
        let address = |bytes: &[u8]| {
            let address: SocketAddr = std::str::from_utf8(bytes).ok()?.trim().parse().ok()?;
            let ip = address.ip().to_canonical();
            self.networks.iter().any(|network| network.contains(&ip)).then_some(address)
        };
        match change {
            Change::Add(bytes, weight) => {
                Some(Permitted::Add(address(bytes)?, (*weight).clamp(1, MAX_WEIGHT)))
            }
            Change::Remove(bytes) => Some(Permitted::Remove(address(bytes)?)),
        }
    }

    /// Waits for the next change.
    pub(crate) async fn next(&self) -> Permitted {
        loop {
            if let Some(change) = self.queue().pop_front() {
                return change;
            }
            self.notify.notified().await;
        }
    }

    /// Counts a change that was made.
    pub(crate) fn made(&self) {
        self.done.add(1);
    }

    pub(crate) fn refuse(&self, why: &str) {
        self.refused.add(1);
        tracing::warn!(why, "the service may not change its backends like that");
    }

    /// Returns the counts, for the status.
    pub(crate) fn counts(&self) -> Value {
        json!({ "done": self.done.value(), "refused": self.refused.value() })
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<Permitted>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_networks_are_permitted() {
        let networks = ["10.1.0.0/16", "2001:db8::/32"].map(|network| network.parse().unwrap());
        let registrar = Registrar { networks: networks.to_vec(), ..Registrar::default() };
        let permits = |text: &str| registrar.permit(&Change::Add(text.as_bytes().into(), 1)).is_some();
        for text in ["10.1.2.3:80", "[2001:db8::1]:80", "[::ffff:10.1.2.3]:80", " 10.1.2.3:80\n"] {
            assert!(permits(text), "{text}");
        }
        for text in
            ["10.2.2.3:80", "[2001:db9::1]:80", "unix:/run/some", "10.1.2.3", "", "name:80", "127.0.0.1:1"]
        {
            assert!(!permits(text), "{text}");
        }
        let nothing = Registrar::default();
        nothing.ask(Change::Remove(b"10.1.2.3:80"[..].into()));
        assert_eq!(nothing.counts(), json!({ "done": 0, "refused": 1 }));
    }

    #[test]
    fn the_queue_is_bounded() {
        let registrar = Registrar { networks: vec!["0.0.0.0/0".parse().unwrap()], ..Registrar::default() };
        for _ in 0..QUEUED + 3 {
            registrar.ask(Change::Add(b"10.1.2.3:80"[..].into(), 1000));
        }
        assert_eq!(registrar.counts()["refused"], 3);
        let address = "10.1.2.3:80".parse().unwrap();
        assert_eq!(registrar.queue().pop_front(), Some(Permitted::Add(address, 100)));
    }
}
