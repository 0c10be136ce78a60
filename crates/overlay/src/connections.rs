//! The host connections that containers have by this router, and the policy that they are under. Both are behind one lock, so that no
//! connection is entered under a policy that has been replaced.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use shunt_sys::identity::normalise;
use shunt_sys::{Errno, peer};

use crate::errand::Theirs;
use crate::metrics::End;
use crate::policy::{Flow, Policy, Shape, Verdict};
use crate::reason::Reason;

/// So many: for most the overlay's socket is kept, which is a descriptor.
const MOST: usize = 65_536;

/// See the module.
#[derive(Debug)]
pub(crate) struct Connections {
    /// Asks the kernel about sockets of the host.
    asker: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    policy: Arc<Policy>,
    /// By the cookies of their sockets.
    connections: HashMap<u64, Connection>,
}

/// One end of a host connection: the program's, on this host.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) end: End,
    /// The network namespace of its program.
    pub(crate) namespace: u64,
    /// As the hosts have it.
    pub(crate) place: Place,
    /// As the programs have it.
    pub(crate) flow: Flow,
    /// The client's end of the overlay connection: as long as it is there no other gets its port.
    pub(crate) _overlay: Option<Arc<Theirs>>,
}

/// Where the kernel finds the socket of a host connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) cookie: u64,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
}

impl Place {
    pub(crate) fn new(cookie: u64, local: SocketAddr, remote: SocketAddr) -> Place {
        Place { cookie, local: normalise(local), remote: normalise(remote) }
    }
}

impl Connections {
    pub(crate) fn new(policy: Policy) -> Result<Connections, Errno> {
        let state = State { policy: Arc::new(policy), connections: HashMap::new() };
        Ok(Connections { asker: peer::open()?, state: Mutex::new(state) })
    }

    pub(crate) fn policy(&self) -> Arc<Policy> {
        self.state().policy.clone()
    }

    /// Whether a connection may be, and on the host network.
    pub(crate) fn permit(&self, flow: Flow) -> Result<Shape, Reason> {
        permit(&self.policy(), flow)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.state().connections.len() >= MOST
    }

    /// From now on it is under the policy, if that permits it.
    pub(crate) fn enter(&self, connection: Connection) -> Result<Shape, Reason> {
        let mut state = self.state();
        let shape = permit(&state.policy, connection.flow)?;
        state.connections.insert(connection.place.cookie, connection);
        Ok(shape)
    }

    /// Has another policy hold. What it does not permit is returned, by the network namespaces of the programs; nothing of it is permitted
    /// afterwards.
    pub(crate) fn replace(&self, policy: Policy) -> HashMap<u64, Vec<Place>> {
        let mut state = self.state();
        state.policy = Arc::new(policy);
        let mut forbidden: HashMap<u64, Vec<Place>> = HashMap::new();
        for connection in state.connections.values() {
            if permit(&state.policy, connection.flow).is_err() {
                forbidden.entry(connection.namespace).or_default().push(connection.place);
            }
        }
        forbidden
    }

    /// Forgets those that have ended.
    pub(crate) fn sweep(&self) {
        let places: Vec<Place> = self.state().connections.values().map(|it| it.place).collect();
        for place in places {
            // In doubt it is kept: the kernel may have had no room for the answer.
            let found = peer::find(&self.asker, place.local, place.remote);
            let lives =
                |found: Option<peer::Found>| found.is_some_and(|it| it.held && it.cookie == place.cookie);
            if !found.map_or(true, lives) {
                self.state().connections.remove(&place.cookie);
            }
        }
    }

    /// How many a rule has permitted; None is the default.
    pub(crate) fn by_rule(&self) -> HashMap<Option<usize>, usize> {
        let state = self.state();
        let mut counts = HashMap::new();
        for connection in state.connections.values() {
            *counts.entry(state.policy.rule(connection.flow)).or_default() += 1;
        }
        counts
    }

    pub(crate) fn count(&self, end: End) -> usize {
        self.state().connections.values().filter(|it| it.end == end).count()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics while it is locked")
    }
}

fn permit(policy: &Policy, flow: Flow) -> Result<Shape, Reason> {
    match policy.verdict(flow) {
        Verdict::Allow(shape) => Ok(shape),
        Verdict::Overlay => Err(Reason::PacketPolicy),
        Verdict::Deny(denial) => Err(denial.into()),
    }
}
