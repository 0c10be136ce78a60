//! The connections that supervised programs have, as far as the router of their host has been asked about them, and the policy that they
//! are under. Both are behind one lock, so that no connection is entered under a policy that has been replaced.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use shunt_kernel::shape as kernel;
use shunt_sys::identity::normalise;
use shunt_sys::{Errno, peer};

use crate::errand::Theirs;
use crate::metrics::End;
use crate::options::Options;
use crate::policy::{Flow, Policy, Shape, Verdict};
use crate::reason::Reason;
use crate::worth::Way;

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
    /// On the host network, by the cookies of their sockets.
    connections: HashMap<u64, Connection>,
    /// On the overlay, by the cookies of their sockets, and why.
    stayed: HashMap<u64, (Stayed, Reason)>,
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
    /// As its program has set them.
    pub(crate) own: Options,
    /// The client's end of the overlay connection: as long as it is there no other gets its port.
    pub(crate) _overlay: Option<Theirs>,
}

/// One end of an overlay connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stayed {
    /// The network namespace of its program.
    pub(crate) namespace: u64,
    pub(crate) flow: Flow,
}

/// Where the kernel finds the socket of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) cookie: u64,
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
}

/// What another policy makes of the connections that there are.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// On the host network, and to end; by the network namespaces of their programs.
    pub(crate) forbidden: HashMap<u64, Vec<Place>>,
    /// The same on the overlay.
    pub(crate) stayed: HashMap<u64, HashSet<u64>>,
    /// They go on otherwise; by the cookies of their sockets.
    pub(crate) shapes: HashMap<u64, kernel::Shape>,
}

impl Place {
    pub(crate) fn new(cookie: u64, local: SocketAddr, remote: SocketAddr) -> Place {
        Place { cookie, local: normalise(local), remote: normalise(remote) }
    }
}

impl Connections {
    /// With a policy that permits everything.
    pub(crate) fn new() -> Result<Connections, Errno> {
        let policy = Arc::new(Policy::open());
        let state = State { policy, connections: HashMap::new(), stayed: HashMap::new() };
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

    /// These are there, whatever the policy says; the next one is for them as well.
    pub(crate) fn adopt(&self, connections: impl Iterator<Item = Connection>) {
        let mut state = self.state();
        state.connections.extend(connections.map(|connection| (connection.place.cookie, connection)));
    }

    /// From now on it is under the policy, if that permits it. Nobody but the router has its socket yet.
    pub(crate) fn enter(&self, connection: Connection, socket: &OwnedFd) -> Result<(), Reason> {
        let Connection { flow, own, .. } = connection;
        let mut shape = {
            let mut state = self.state();
            let shape = permit(&state.policy, flow)?;
            state.connections.insert(connection.place.cookie, connection);
            shape
        };
        let mut set = own;
        loop {
            let wanted = own.under(shape);
            if wanted != set {
                wanted.set(socket).map_err(|_| Reason::Failed)?;
                set = wanted;
            }
            // Another policy may have set it before that.
            match self.permit(flow)? {
                same if same == shape => return Ok(()),
                other => shape = other,
            }
        }
    }

    /// From which network namespace a client's connection is, and to where. None: it is none.
    pub(crate) fn way(&self, cookie: u64) -> Option<Way> {
        let state = self.state();
        let connection = state.connections.get(&cookie).filter(|it| it.end == End::Client)?;
        Some((connection.namespace, connection.flow.destination))
    }

    /// It has not come to be.
    pub(crate) fn forget(&self, cookie: u64) {
        let forgotten = self.state().connections.remove(&cookie);
        // What is kept of the overlay is closed without the lock.
        drop(forgotten);
    }

    /// A socket stays on the overlay for a reason, or, if the policy forbids that by now, for another: there is to be no connection.
    pub(crate) fn stay(&self, cookie: u64, stayed: Stayed, reason: Reason) -> Reason {
        let mut state = self.state();
        if let Verdict::Deny(denial) = state.policy.verdict(stayed.flow) {
            return denial.into();
        }
        if reason.denial().is_none() && state.stayed.len() < MOST {
            state.stayed.insert(cookie, (stayed, reason));
        }
        reason
    }

    /// Whether it is time to look which of those on the overlay have ended.
    pub(crate) fn has_many_stayed(&self) -> bool {
        self.state().stayed.len() > MOST / 2
    }

    /// Forgets those on the overlay that are none of these.
    pub(crate) fn retain_stayed(&self, open: &HashSet<u64>) {
        self.state().stayed.retain(|cookie, _| open.contains(cookie));
    }

    /// Has another policy hold. What it forbids is forgotten here, and whoever asks has to end it; none such is entered afterwards.
    pub(crate) fn replace(&self, policy: Policy) -> Changes {
        let mut state = self.state();
        let State { policy: holds, connections, stayed } = &mut *state;
        let former = std::mem::replace(holds, Arc::new(policy));
        let mut changes = Changes::default();
        connections.retain(|cookie, Connection { namespace, place, flow, own, .. }| {
            let Ok(shape) = permit(holds, *flow) else {
                changes.forbidden.entry(*namespace).or_default().push(*place);
                return false;
            };
            let before = own.under(permit(&former, *flow).unwrap_or_default());
            let after = own.under(shape);
            if after != before {
                changes.shapes.insert(*cookie, after.instead_of(before));
            }
            true
        });
        stayed.retain(|cookie, (Stayed { namespace, flow }, _)| {
            let is_forbidden = matches!(holds.verdict(*flow), Verdict::Deny(_));
            if is_forbidden {
                changes.stayed.entry(*namespace).or_default().insert(*cookie);
            }
            !is_forbidden
        });
        changes
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
        self.state().shrink();
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

    /// Those on the host network: whose end, where the kernel has it, and as the programs have it.
    pub(crate) fn on_host(&self) -> Vec<(End, Place, Flow)> {
        self.state().connections.values().map(|it| (it.end, it.place, it.flow)).collect()
    }

    /// Those that stayed on the overlay, by network namespaces and cookies. Some of them have ended.
    pub(crate) fn on_overlay(&self) -> HashMap<u64, HashMap<u64, (Flow, Reason)>> {
        let mut by_namespace: HashMap<u64, HashMap<u64, (Flow, Reason)>> = HashMap::new();
        for (cookie, (Stayed { namespace, flow }, reason)) in &self.state().stayed {
            by_namespace.entry(*namespace).or_default().insert(*cookie, (*flow, *reason));
        }
        by_namespace
    }

    pub(crate) fn count(&self, end: End) -> usize {
        self.state().connections.values().filter(|it| it.end == end).count()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics while it is locked")
    }
}

impl State {
    /// Gives back room that was needed when there were far more: what has been removed from a map fills it for good, and has it grow.
    fn shrink(&mut self) {
        let State { connections, stayed, .. } = self;
        if connections.len() < connections.capacity() / 4 {
            connections.shrink_to(2 * connections.len());
        }
        if stayed.len() < stayed.capacity() / 4 {
            stayed.shrink_to(2 * stayed.len());
        }
    }
}

fn permit(policy: &Policy, flow: Flow) -> Result<Shape, Reason> {
    match policy.verdict(flow) {
        Verdict::Allow(shape) => Ok(shape),
        Verdict::Overlay => Err(Reason::PacketPolicy),
        Verdict::Deny(denial) => Err(denial.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_needed_for_many_is_given_back() {
        let connections = Connections::new().unwrap();
        let flow =
            Flow { source: "10.50.1.2".parse().unwrap(), destination: "10.50.2.2:80".parse().unwrap() };
        let address: SocketAddr = "192.168.77.1:7450".parse().unwrap();
        for cookie in 0..5_000 {
            let place = Place::new(cookie, address, address);
            let own = Options::unset(false);
            let one = Connection { end: End::Client, namespace: 1, place, flow, own, _overlay: None };
            connections.adopt(std::iter::once(one));
            connections.stay(cookie, Stayed { namespace: 1, flow }, Reason::Options);
        }
        // None of them is there.
        connections.sweep();
        connections.retain_stayed(&HashSet::new());
        connections.sweep();
        let state = connections.state();
        assert_eq!((state.connections.len(), state.stayed.len()), (0, 0));
        assert!(state.connections.capacity() < 100, "{}", state.connections.capacity());
        assert!(state.stayed.capacity() < 100, "{}", state.stayed.capacity());
    }
}
