//! The host connections that containers have by this router, and the policy that they are under. Both are behind one lock, so that no
//! connection is entered under a policy that has been replaced.

use std::collections::HashMap;
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
    /// As its program has set them.
    pub(crate) own: Options,
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

/// What another policy makes of the connections that there are.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// They are to end; by the network namespaces of their programs.
    pub(crate) forbidden: HashMap<u64, Vec<Place>>,
    /// They go on otherwise; by the cookies of their sockets.
    pub(crate) shapes: HashMap<u64, kernel::Shape>,
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

    /// From now on it is under the policy, if that permits it. Nobody but the router has its socket yet.
    pub(crate) fn enter(&self, connection: Connection, socket: &OwnedFd) -> Result<(), Reason> {
        let Connection { flow, own, .. } = connection;
        let mut shape = {
            let mut state = self.state();
            let shape = permit(&state.policy, flow)?;
            state.connections.insert(connection.place.cookie, connection);
            shape
        };
        loop {
            own.under(shape).set(socket).map_err(|_| Reason::Failed)?;
            // Another policy may have set it before that.
            match self.permit(flow)? {
                same if same == shape => return Ok(()),
                other => shape = other,
            }
        }
    }

    /// Has another policy hold. Nothing that it forbids is entered afterwards.
    pub(crate) fn replace(&self, policy: Policy) -> Changes {
        let mut state = self.state();
        let policy = Arc::new(policy);
        let former = std::mem::replace(&mut state.policy, policy.clone());
        let mut changes = Changes::default();
        for Connection { namespace, place, flow, own, .. } in state.connections.values() {
            let Ok(shape) = permit(&policy, *flow) else {
                changes.forbidden.entry(*namespace).or_default().push(*place);
                continue;
            };
            let before = own.under(permit(&former, *flow).unwrap_or_default());
            let after = own.under(shape);
            if after != before {
                changes.shapes.insert(place.cookie, after.instead_of(before));
            }
        }
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
