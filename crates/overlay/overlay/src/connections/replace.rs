//! Replaces the policy of the table, and finds the connections that the new one forbids.
//!
//! ```text
//!  the router's thread                        another thread
//!  replace: swaps the policy, and notes
//!  which connections there are  ────────────► compare, for a group of them at a time:
//!                                               copies them, under the lock
//!                                               decides by both policies
//!                                               removes what is forbidden, under the lock
//!  the caller ends what was removed ◄──────── Changes
//! ```
//!
//! A connection that is entered after the swap has been judged by the new policy. So each connection is
//! judged by it, and the lock is never held for longer than a group takes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use shunt_kernel::shape as kernel;

use super::{Connection, Connections, GROUP, Place, State, Stayed, permission, permit};
use crate::metrics::End;
use crate::options::Options;
use crate::policy::{Flow, InEffect, Verdict};

/// A policy that has been replaced, and the cookies of the connections that there were.
#[derive(Debug)]
pub(crate) struct Replaced {
    former: Arc<InEffect>,
    policy: Arc<InEffect>,
    connections: Vec<u64>,
    stayed: Vec<u64>,
}

/// The consequences of a policy change for the current connections.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Connections on the host network that must end, by the network namespaces of their programs.
    pub(crate) forbidden: HashMap<u64, Vec<Place>>,
    /// The cookies of overlay connections that must end, by the network namespaces of their
    /// programs.
    pub(crate) stayed: HashMap<u64, HashSet<u64>>,
    /// New socket options for connections that continue, by the cookies of their sockets.
    pub(crate) shapes: HashMap<u64, kernel::Shape>,
}

/// What becomes of connections on the host network about which a policy is unclear, because
/// containers are not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unclear {
    /// They continue: the same policy has permitted them.
    Continue,
    /// They end: another policy has permitted them.
    End,
}

/// A copy of what decides about a connection on the host network.
#[derive(Clone, Copy, Debug)]
struct Known {
    end: End,
    namespace: u64,
    place: Place,
    flow: Flow,
    own: Options,
}

/// What a policy change does to a connection on the host network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Unchanged,
    Shaped(kernel::Shape),
    Forbidden,
}

impl Connections {
    /// Replaces the policy, or its containers. No connection that it forbids is entered afterwards.
    pub(crate) fn replace(&self, policy: Arc<InEffect>) -> Replaced {
        let mut state = self.state();
        let State { policy: holds, connections, stayed } = &mut *state;
        Replaced {
            former: std::mem::replace(holds, policy.clone()),
            policy,
            connections: connections.keys().copied().collect(),
            stayed: stayed.keys().copied().collect(),
        }
    }

    /// Removes the connections that the new policy forbids; the caller has to end them. Not for the
    /// router's thread.
    pub(crate) fn compare(&self, replaced: &Replaced, unclear: Unclear) -> Changes {
        let mut changes = Changes::default();
        for group in replaced.connections.chunks(GROUP) {
            self.compare_connections(group, replaced, unclear, &mut changes);
        }
        for group in replaced.stayed.chunks(GROUP) {
            self.compare_stayed(group, &replaced.policy, &mut changes);
        }
        changes
    }

    fn compare_connections(
        &self,
        cookies: &[u64],
        replaced: &Replaced,
        unclear: Unclear,
        changes: &mut Changes,
    ) {
        let known: Vec<(u64, Known)> = {
            let state = self.state();
            let known = |cookie: &u64| Some((*cookie, Known::of(state.connections.get(cookie)?)));
            cookies.iter().filter_map(known).collect()
        };
        let mut forbidden = Vec::new();
        for (cookie, known) in known {
            match self.fate(&known, replaced, unclear) {
                Fate::Unchanged => {}
                Fate::Shaped(shape) => drop(changes.shapes.insert(cookie, shape)),
                Fate::Forbidden => {
                    forbidden.push(cookie);
                    changes.forbidden.entry(known.namespace).or_default().push(known.place);
                }
            }
        }
        let removed: Vec<Connection> = {
            let mut state = self.state();
            forbidden.iter().filter_map(|cookie| state.connections.remove(cookie)).collect()
        };
        // The kept overlay sockets are closed after the lock is released.
        drop(removed);
    }

    fn fate(&self, known: &Known, replaced: &Replaced, unclear: Unclear) -> Fate {
        let Known { end, flow, own, .. } = *known;
        let verdict = replaced.policy.verdict(flow);
        if unclear == Unclear::Continue && matches!(verdict, Verdict::Unclear(_)) {
            return Fate::Unchanged;
        }
        let classed = |shape| self.classed(shape, end, flow);
        let Ok(shape) = permission(verdict).and_then(classed) else { return Fate::Forbidden };
        let before = permit(&replaced.former, flow).and_then(classed).unwrap_or_default();
        let (before, after) = (own.under(before), own.under(shape));
        if after == before { Fate::Unchanged } else { Fate::Shaped(after.instead_of(before)) }
    }

    fn compare_stayed(&self, cookies: &[u64], policy: &InEffect, changes: &mut Changes) {
        let known: Vec<(u64, Stayed)> = {
            let state = self.state();
            let known = |cookie: &u64| Some((*cookie, state.stayed.get(cookie)?.0));
            cookies.iter().filter_map(known).collect()
        };
        let is_denied = |(_, stayed): &(_, Stayed)| matches!(policy.verdict(stayed.flow), Verdict::Deny(_));
        let forbidden: Vec<_> = known.into_iter().filter(is_denied).collect();
        let mut state = self.state();
        for (cookie, Stayed { namespace, .. }) in forbidden {
            state.stayed.remove(&cookie);
            changes.stayed.entry(namespace).or_default().insert(cookie);
        }
    }
}

impl Known {
    fn of(connection: &Connection) -> Known {
        let Connection { end, namespace, place, flow, own, _overlay: _ } = *connection;
        Known { end, namespace, place, flow, own }
    }
}
