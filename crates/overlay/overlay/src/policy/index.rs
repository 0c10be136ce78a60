//! The rules of a policy as look-ups, so that the time of a verdict hardly depends on their number.
//! `chain` has the rules of one direction, `conditions` looks up the rules that name an address or a
//! port, in `ranges`, and `rule_set` finds the rules that are in all the sets found.
//!
//! ```text
//!                             EndsIndex          PortsIndex
//! connection ── source ──────► from ─┐
//!            ── destination ──► to ──┼── sets of rules ── joined ──► the first rule that matches
//!            ── ports ───────► ports ┘
//!                      ▲
//!  container ── Selected: the rules that select it by its labels, found once
//! ```
//!
//! An index depends on the policy only. What depends on a container's labels is in [`Selected`],
//! which is made anew for the containers whose labels have changed ([`super::members`]).

mod chain;
mod conditions;
mod ranges;
mod rule_set;

use super::{Direction, Flow, Policy};
use crate::workloads::Workload;
use chain::Chain;
pub(super) use chain::Possible;

/// The chains of a policy: the rules without a direction come first.
pub(super) const CHAINS: [Option<Direction>; 3] = [None, Some(Direction::Egress), Some(Direction::Ingress)];

/// The rules for TCP of a policy.
#[derive(Debug)]
pub(super) struct Index([Chain; CHAINS.len()]);

/// The rules that select a container by its labels, or a port of it by its name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Selected([chain::Selected; CHAINS.len()]);

/// Rules by their positions in the policy: those of which `from` selects a container, and `to`.
#[derive(Debug, Default)]
pub(super) struct SelectedRules {
    pub(super) from: Vec<usize>,
    pub(super) to: Vec<usize>,
}

/// A connection, and the rules that select its containers. `None`: the container is not known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identified<'a> {
    pub(super) flow: Flow,
    pub(super) source: Option<&'a Selected>,
    pub(super) destination: Option<&'a Selected>,
}

impl Index {
    pub(super) fn new(policy: &Policy) -> Index {
        Index(CHAINS.map(|direction| Chain::new(policy, direction)))
    }

    /// Returns `true` if a rule selects containers by labels, or ports by name.
    pub(super) fn uses_labels(&self) -> bool {
        self.0.iter().any(Chain::uses_labels)
    }

    /// Returns the rules that select a container.
    pub(super) fn selecting(&self, workload: &Workload) -> Selected {
        Selected(self.0.each_ref().map(|chain| chain.selecting(workload)))
    }

    /// Returns the rules that select a container for certain, and those that may select it.
    pub(super) fn selected(&self, selected: &Selected) -> [SelectedRules; 2] {
        let mut both = [SelectedRules::default(), SelectedRules::default()];
        for (chain, selected) in self.0.iter().zip(&selected.0) {
            let [certain, possible] = &mut both;
            chain.selected(selected, certain, possible);
        }
        both
    }

    /// Returns the verdicts that are possible by the rules with this direction.
    pub(super) fn possible(&self, direction: Option<Direction>, connection: Identified<'_>) -> Possible {
        let at = position(direction);
        self.0[at].possible(connection.in_chain(at))
    }

    /// Returns the first rule with this direction that matches for certain.
    pub(super) fn first(&self, direction: Option<Direction>, connection: Identified<'_>) -> Option<usize> {
        let at = position(direction);
        self.0[at].first(connection.in_chain(at))
    }

    /// Returns the rules with this direction that may decide.
    pub(super) fn deciding(&self, direction: Option<Direction>, connection: Identified<'_>) -> Vec<usize> {
        let at = position(direction);
        self.0[at].deciding(connection.in_chain(at))
    }
}

impl<'a> Identified<'a> {
    fn in_chain(&self, at: usize) -> chain::Identified<'a> {
        let of_chain = |selected: Option<&'a Selected>| selected.map(|it| &it.0[at]);
        chain::Identified {
            flow: self.flow,
            source: of_chain(self.source),
            destination: of_chain(self.destination),
        }
    }
}

fn position(direction: Option<Direction>) -> usize {
    match direction {
        None => 0,
        Some(Direction::Egress) => 1,
        Some(Direction::Ingress) => 2,
    }
}
