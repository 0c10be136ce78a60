//! Replaces the policy of the table, and finds the connections that the new one forbids.
//!
//! ```text
//!  the router's thread                        another thread
//!  replace: swaps the policy, and notes
//!  which connections there are  ────────────► compare, for a group of them at a time:
//!                                               copies them, under the lock
//!                                               decides by both policies
//!                                               removes the forbidden ones, under the lock
//!  the caller ends these ◄─────────────────── Changes
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

impl Replaced {
    /// Compares the connections with another policy than the one in effect.
    pub(crate) fn with(self, policy: Arc<InEffect>) -> Replaced {
        Replaced { policy, ..self }
    }
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
        let Connection { end, namespace, place, flow, own, port: _ } = *connection;
        Known { end, namespace, place, flow, own }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Policy;
    use crate::reason::Reason;
    use crate::workloads::{Labels, Workload, Workloads};

    /// Returns a policy for an overlay in which the first containers, of 10.50.1.1 onwards, have these
    /// labels `app`.
    fn policy(text: &str, apps: &[&str]) -> Arc<InEffect> {
        let policy = Policy::parse("f".as_ref(), text).unwrap();
        let mut workloads = Workloads::new(vec!["10.50.0.0/16".parse().unwrap()], HashSet::new());
        for (at, app) in apps.iter().enumerate() {
            let workload = Workload {
                name: (*app).to_owned(),
                namespace: None,
                labels: Labels::from([("app".to_owned(), (*app).to_owned())]),
                namespace_labels: None,
                ports: [].into(),
            };
            workloads.add(format!("10.50.1.{}", at + 1).parse().unwrap(), Arc::new(workload));
        }
        Arc::new(InEffect::new(Arc::new(policy), Arc::new(workloads)))
    }

    fn flow(client: &str) -> Flow {
        let client = format!("{client}:40000").parse().unwrap();
        Flow::of(client, "10.50.2.2:80".parse().unwrap())
    }

    /// Adds a connection of that client for each cookie, to both tables.
    fn add(connections: &Connections, clients: &[(u64, &str)]) {
        for (cookie, client) in clients {
            let place = Place::new(*cookie, "192.0.2.1:1".parse().unwrap(), "192.0.2.2:1".parse().unwrap());
            let (flow, own) = (flow(client), Options::unset(false));
            let connection = Connection { end: End::Client, namespace: 7, place, flow, own, port: None };
            connections.adopt(std::iter::once(connection));
            connections.stay(*cookie, Stayed { namespace: 7, flow }, Reason::Options);
        }
    }

    fn left(connections: &Connections) -> (Vec<u64>, Vec<u64>) {
        let state = connections.state();
        let sorted = |cookies: &mut dyn Iterator<Item = u64>| {
            let mut cookies: Vec<u64> = cookies.collect();
            cookies.sort_unstable();
            cookies
        };
        (sorted(&mut state.connections.keys().copied()), sorted(&mut state.stayed.keys().copied()))
    }

    const WEB: &str =
        "default = 'deny'\n[[rule]]\nname = 'a'\naction = 'allow'\nfrom = [{ labels = 'app=web' }]\n";

    #[test]
    fn forbidden_connections_leave_the_table() {
        for (unclear, unknown_continues) in [(Unclear::Continue, true), (Unclear::End, false)] {
            let connections = Connections::new(Arc::default()).unwrap();
            // A known client that is selected, one that is not, and one that is not known.
            add(&connections, &[(1, "10.50.1.1"), (2, "10.50.1.2"), (3, "10.50.1.3")]);
            let replaced = connections.replace(policy(WEB, &["web", "db"]));
            let changes = connections.compare(&replaced, unclear);
            let on_host: Vec<u64> = if unknown_continues { vec![1, 3] } else { vec![1] };
            assert_eq!(left(&connections), (on_host, vec![1, 3]), "{unclear:?}");
            assert_eq!(changes.stayed, HashMap::from([(7, HashSet::from([2]))]));
            let ended: HashSet<u64> = changes.forbidden[&7].iter().map(|place| place.cookie).collect();
            assert_eq!(ended.contains(&3), !unknown_continues);
            assert!(ended.contains(&2) && !ended.contains(&1));
        }
    }

    #[test]
    fn a_connection_that_is_entered_after_the_swap_is_not_compared() {
        let connections = Connections::new(Arc::default()).unwrap();
        let replaced = connections.replace(policy(WEB, &["web", "db"]));
        assert_eq!(connections.permit(flow("10.50.1.2")), Err(Reason::Denied), "from the swap on");
        add(&connections, &[(2, "10.50.1.2")]);
        let changes = connections.compare(&replaced, Unclear::End);
        assert!(changes.forbidden.is_empty() && changes.stayed.is_empty());
    }

    #[test]
    fn more_connections_than_a_group_are_all_compared() {
        let connections = Connections::new(Arc::default()).unwrap();
        let all: Vec<(u64, &str)> = (0..GROUP as u64 * 3 + 1).map(|cookie| (cookie, "10.50.1.1")).collect();
        add(&connections, &all);
        let slow = "[[rule]]\nname = 'a'\naction = 'allow'\nrate = '8mbit'\n";
        let replaced = connections.replace(policy(slow, &[]));
        assert_eq!(connections.compare(&replaced, Unclear::End).shapes.len(), all.len());
        let replaced = connections.replace(policy("default = 'deny'", &[]));
        let changes = connections.compare(&replaced, Unclear::End);
        assert_eq!((changes.forbidden[&7].len(), changes.stayed[&7].len()), (all.len(), all.len()));
        assert_eq!(left(&connections), (vec![], vec![]));
    }
}
