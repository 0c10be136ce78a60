//! The table of connections that a router was asked about, and the policy that applies to them. One
//! lock guards both, so that no connection is entered under a policy that has been replaced
//! (`replace`).

mod replace;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::net::sockopt;
use shunt_sys::identity::normalise;
use shunt_sys::{Errno, peer};

use crate::blocking_pool::Theirs;
use crate::expected_gain::Way;
use crate::limits::{self, Limit, Limits};
use crate::metrics::End;
use crate::options::Options;
use crate::policy::{Doubt, Flow, InEffect, Shape, Verdict};
use crate::reason::Reason;

pub(crate) use replace::{Changes, Unclear};

/// The largest number of entries. Most entries keep the overlay's socket, which is a descriptor.
const MOST: usize = 65_536;
/// The number of connections for which the table is locked at a time, by threads that visit all.
/// The router's thread waits no longer than that takes: some microseconds.
const GROUP: usize = 64;

/// The table of connections, with their policy.
#[derive(Debug)]
pub(crate) struct Connections {
    /// A netlink socket for questions about the host's sockets.
    asker: OwnedFd,
    /// The classes of limits.
    limits: Arc<Limits>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    policy: Arc<InEffect>,
    /// Connections on the host network, by the cookies of their sockets.
    connections: HashMap<u64, Connection>,
    /// Connections on the overlay, by the cookies of their sockets, each with its reason.
    stayed: HashMap<u64, (Stayed, Reason)>,
}

/// One end of a host connection, which a program of this host has.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) end: End,
    /// The cookie of the program's network namespace, or 0 if an earlier router made the connection.
    pub(crate) namespace: u64,
    /// The addresses on the host network.
    pub(crate) place: Place,
    /// The addresses that the programs see.
    pub(crate) flow: Flow,
    /// The options that the program has set.
    pub(crate) own: Options,
    /// The client's port on the overlay.
    pub(crate) port: Option<KeptPort>,
}

/// The client's end of an overlay connection whose program has the host connection. While it is
/// open, no other socket gets its port.
///
/// With SO_LINGER of 0, a program frees the port immediately when it closes the connection, by a
/// reset. But a router can be killed before the server's program has accepted the overlay
/// connection, and must not reset it then. So the supervisor clears the option when the program
/// gets the host connection, and [`free`](KeptPort::free) does what the program wants.
#[derive(Debug)]
pub(crate) struct KeptPort {
    socket: Theirs,
    is_reset: bool,
}

impl KeptPort {
    /// Keeps the port of a socket that still has the program's options.
    pub(crate) fn of(socket: &Theirs) -> std::io::Result<KeptPort> {
        let is_reset = sockopt::socket_linger(socket)?.is_some_and(|time| time.is_zero());
        Ok(KeptPort { socket: socket.apart()?, is_reset })
    }

    /// Closes the socket, as the program has closed the host connection.
    fn free(self) {
        if self.is_reset {
            self.socket.reset();
        }
    }
}

/// One end of an overlay connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stayed {
    /// The cookie of the program's network namespace.
    pub(crate) namespace: u64,
    pub(crate) flow: Flow,
}

/// The addresses and the cookie by which the kernel finds a socket.
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
    /// Creates an empty table with a policy that permits everything.
    pub(crate) fn new(limits: Arc<Limits>) -> Result<Connections, Errno> {
        let policy = Arc::new(InEffect::open());
        let state = State { policy, connections: HashMap::new(), stayed: HashMap::new() };
        Ok(Connections { asker: peer::open()?, limits, state: Mutex::new(state) })
    }

    pub(crate) fn policy(&self) -> Arc<InEffect> {
        self.state().policy.clone()
    }

    /// Returns the shape of a connection if the policy permits it on the host network.
    pub(crate) fn permit(&self, flow: Flow) -> Result<Shape, Reason> {
        permit(&self.policy(), flow)
    }

    /// Checks that the policy permits a connection that has no source port yet, or may permit it
    /// when it has one. The caller then asks again.
    pub(crate) fn may_permit(&self, flow: Flow) -> Result<(), Reason> {
        match self.policy().verdict(flow) {
            Verdict::Unclear(Doubt::SourcePort) => Ok(()),
            verdict => permission(verdict).map(drop),
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.state().connections.len() >= MOST
    }

    /// Adds connections that exist already, regardless of the policy. The next policy applies to
    /// them too.
    pub(crate) fn adopt(&self, connections: impl Iterator<Item = Connection>) {
        let mut state = self.state();
        state.connections.extend(connections.map(|connection| (connection.place.cookie, connection)));
    }

    /// Adds a connection if the policy permits it, and sets its options accordingly. The router
    /// must be the only process that has the socket.
    pub(crate) fn enter(&self, connection: Connection, socket: &OwnedFd) -> Result<(), Reason> {
        let Connection { end, flow, own, .. } = connection;
        let mut shape = {
            let mut state = self.state();
            let shape = self.classed(permit(&state.policy, flow)?, end, flow)?;
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
            // A new policy may have changed the socket's options before this thread set them.
            match self.classed(self.permit(flow)?, end, flow)? {
                same if same == shape => return Ok(()),
                other => shape = other,
            }
        }
    }

    /// Returns the limits that open connections need under a policy. Not for the router's thread.
    pub(crate) fn limits_under(&self, policy: &InEffect) -> BTreeSet<Limit> {
        let limit = |(end, flow)| match policy.verdict(flow) {
            Verdict::Allow(shape) => Some((limits::container(end, flow), shape.container_rate?)),
            _ => None,
        };
        self.copied(|it| (it.end, it.flow)).into_iter().filter_map(limit).collect()
    }

    /// Returns the shape with the class of the limit that it demands. Fails if there is no such class.
    fn classed(&self, shape: Shape, end: End, flow: Flow) -> Result<Shape, Reason> {
        let Some(rate) = shape.container_rate else { return Ok(shape) };
        let class = self.limits.class((limits::container(end, flow), rate)).ok_or(Reason::Limit)?;
        Ok(Shape { priority: Some(class), ..shape })
    }

    /// Returns `true` if the socket is one of the host's network.
    pub(crate) fn has_socket(&self, place: Place) -> bool {
        let found = peer::find(&self.asker, place.local, place.remote);
        found.is_ok_and(|found| found.is_some_and(|found| found.cookie == place.cookie))
    }

    /// Returns the network namespace and the destination of a client's connection.
    pub(crate) fn way(&self, cookie: u64) -> Option<Way> {
        let state = self.state();
        let connection = state.connections.get(&cookie).filter(|it| it.end == End::Client)?;
        Some((connection.namespace, connection.flow.destination))
    }

    /// Removes a connection that was not established after all.
    pub(crate) fn forget(&self, cookie: u64) {
        let forgotten = self.state().connections.remove(&cookie);
        // The kept overlay socket is closed after the lock is released.
        drop(forgotten);
    }

    /// Records that a socket stays on the overlay, and returns the reason. If the policy denies the
    /// connection by now, returns that reason instead and records nothing.
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

    /// Returns `true` if the overlay table is half full, so that ended connections should be
    /// removed.
    pub(crate) fn has_many_stayed(&self) -> bool {
        self.state().stayed.len() > MOST / 2
    }

    /// Forgets connections on the overlay that are not in `open`.
    pub(crate) fn retain_stayed(&self, open: &HashSet<u64>) {
        self.state().stayed.retain(|cookie, _| open.contains(cookie));
    }

    /// Forgets connections that have ended.
    pub(crate) fn sweep(&self) {
        for place in self.copied(|it| it.place) {
            // If the kernel gives no answer, the connection is kept: it may have lacked memory for
            // one.
            let found = peer::find(&self.asker, place.local, place.remote);
            let lives =
                |found: Option<peer::Found>| found.is_some_and(|it| it.held && it.cookie == place.cookie);
            if !found.map_or(true, lives) {
                let ended = self.state().connections.remove(&place.cookie);
                ended.and_then(|it| it.port).into_iter().for_each(KeptPort::free);
            }
        }
        self.state().shrink();
    }

    /// Returns the number of connections that each rule of a policy permits. `None` is the default. If
    /// the rules of both directions permit a connection, it counts for both. Not for the router's
    /// thread.
    pub(crate) fn by_rule(&self, policy: &InEffect) -> HashMap<Option<usize>, usize> {
        let mut counts = HashMap::new();
        for flow in self.copied(|it| it.flow) {
            let rules = policy.rules(flow);
            let default = rules.is_empty().then_some(None);
            for rule in rules.into_iter().map(Some).chain(default) {
                *counts.entry(rule).or_default() += 1;
            }
        }
        counts
    }

    /// Returns the connections on the host network: end, host addresses and program addresses.
    pub(crate) fn on_host(&self) -> Vec<(End, Place, Flow)> {
        self.copied(|it| (it.end, it.place, it.flow))
    }

    /// Copies something of each connection.
    fn copied<T>(&self, copy: impl Fn(&Connection) -> T) -> Vec<T> {
        let cookies: Vec<u64> = self.state().connections.keys().copied().collect();
        let mut copied = Vec::with_capacity(cookies.len());
        for group in cookies.chunks(GROUP) {
            let state = self.state();
            copied.extend(group.iter().filter_map(|cookie| state.connections.get(cookie)).map(&copy));
        }
        copied
    }

    /// Returns the connections on the overlay, by network namespace and cookie. Some may have
    /// ended.
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
    /// Shrinks the maps after a peak. A map's removed entries leave tombstones that fill it, so
    /// that it would grow again.
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

fn permit(policy: &InEffect, flow: Flow) -> Result<Shape, Reason> {
    permission(policy.verdict(flow))
}

fn permission(verdict: Verdict) -> Result<Shape, Reason> {
    match verdict {
        Verdict::Allow(shape) => Ok(shape),
        Verdict::Overlay => Err(Reason::PacketPolicy),
        Verdict::Deny(denial) => Err(denial.into()),
        Verdict::Unclear(_) => Err(Reason::UnknownLabels),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_needed_for_many_is_given_back() {
        let connections = Connections::new(Arc::default()).unwrap();
        let flow = Flow::of("10.50.1.2:40000".parse().unwrap(), "10.50.2.2:80".parse().unwrap());
        let address: SocketAddr = "192.168.77.1:7450".parse().unwrap();
        for cookie in 0..5_000 {
            let place = Place::new(cookie, address, address);
            let own = Options::unset(false);
            let one = Connection { end: End::Client, namespace: 1, place, flow, own, port: None };
            connections.adopt(std::iter::once(one));
            connections.stay(cookie, Stayed { namespace: 1, flow }, Reason::Options);
        }
        // No such socket exists.
        connections.sweep();
        connections.retain_stayed(&HashSet::new());
        connections.sweep();
        let state = connections.state();
        assert_eq!((state.connections.len(), state.stayed.len()), (0, 0));
        assert!(state.connections.capacity() < 100, "{}", state.connections.capacity());
        assert!(state.stayed.capacity() < 100, "{}", state.stayed.capacity());
    }
}
