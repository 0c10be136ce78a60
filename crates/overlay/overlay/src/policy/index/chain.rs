//! The rules of one direction, or those without a direction.

use std::collections::{BTreeMap, HashMap};

use super::SelectedRules;
use super::conditions::{EndsIndex, Found, PortsIndex, SourcePortsIndex};
use super::rule_set::{Builder, Joined, RuleSet, Words, positions};
use crate::policy::{Direction, Flow, Policy, Rule, Verdict};
use crate::workloads::Workload;

/// The rules of a chain, in their order. The first that matches decides.
#[derive(Debug)]
pub(super) struct Chain {
    /// The position of each rule in the policy.
    rules: Vec<usize>,
    /// The verdict of each rule, by its position in `verdicts`.
    verdict_of: Vec<usize>,
    /// The different verdicts, each with its rules.
    verdicts: Vec<(Verdict, RuleSet)>,
    from: EndsIndex,
    to: EndsIndex,
    ports: PortsIndex,
    source_ports: SourcePortsIndex,
}

/// The rules of a chain that select a container by its labels, or a port of it by its name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Selected {
    from: Found,
    to: Found,
    ports: BTreeMap<u16, RuleSet>,
}

/// A connection, and the rules of the chain that select its containers. `None`: the container is not
/// known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identified<'a> {
    pub(super) flow: Flow,
    pub(super) source: Option<&'a Selected>,
    pub(super) destination: Option<&'a Selected>,
}

/// The verdicts of a chain for a connection.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::policy) struct Possible {
    /// The different verdicts of the rules that may decide.
    pub(in crate::policy) verdicts: Vec<Verdict>,
    /// Possibly none of the rules matches.
    pub(in crate::policy) is_open: bool,
}

impl Chain {
    pub(super) fn new(policy: &Policy, direction: Option<Direction>) -> Chain {
        let rules: Vec<(usize, &Rule)> = policy.of_tcp(direction).collect();
        let all = rules.iter().map(|(_, rule)| *rule);
        let (verdict_of, verdicts) = verdicts(all.clone());
        Chain {
            rules: rules.iter().map(|(at, _)| *at).collect(),
            verdict_of,
            verdicts,
            from: EndsIndex::new(all.clone().map(|rule| rule.from.as_deref())),
            to: EndsIndex::new(all.clone().map(|rule| rule.to.as_deref())),
            ports: PortsIndex::new(all.clone().map(|rule| rule.ports.as_deref())),
            source_ports: SourcePortsIndex::new(all.map(|rule| rule.source_ports.as_deref())),
        }
    }

    /// Returns `true` if a rule selects containers by labels, or ports by name.
    pub(super) fn uses_labels(&self) -> bool {
        self.from.selects() || self.to.selects() || self.ports.has_names()
    }

    /// Returns the rules that select a container.
    pub(super) fn selecting(&self, workload: &Workload) -> Selected {
        Selected {
            from: self.from.selecting(workload),
            to: self.to.selecting(workload),
            ports: self.ports.named(workload),
        }
    }

    /// Adds the positions of the rules that select a container for certain, and of those that may, in
    /// the policy.
    pub(super) fn selected(
        &self,
        selected: &Selected,
        certain: &mut SelectedRules,
        possible: &mut SelectedRules,
    ) {
        let rules = |set: &RuleSet| set.iter().map(|rule| self.rules[rule]).collect::<Vec<_>>();
        certain.from.extend(rules(&selected.from.certain));
        certain.to.extend(rules(&selected.to.certain));
        possible.from.extend(rules(&selected.from.possible));
        possible.to.extend(rules(&selected.to.possible));
    }

    /// Returns the verdicts that are possible.
    pub(super) fn possible(&self, connection: Identified<'_>) -> Possible {
        let mut seen: Vec<(usize, Words<'_>)> = Vec::new();
        let mut is_open = true;
        for matching in self.matching(connection) {
            let mut deciding = matching.deciding();
            // Rules with a verdict that is possible anyway need not be visited.
            for (_, rules) in &mut seen {
                deciding &= !rules.word(matching.at);
            }
            while let Some(rule) = positions(matching.at, deciding).next() {
                let verdict = self.verdict_of[rule];
                let mut rules = self.verdicts[verdict].1.words();
                deciding &= !rules.word(matching.at);
                seen.push((verdict, rules));
            }
            if matching.certain != 0 {
                is_open = false;
                break;
            }
        }
        let verdicts = seen.into_iter().map(|(verdict, _)| self.verdicts[verdict].0).collect();
        Possible { verdicts, is_open }
    }

    /// Returns the position of the first rule that matches for certain, in the policy.
    pub(super) fn first(&self, connection: Identified<'_>) -> Option<usize> {
        self.matching(connection).find_map(|it| it.first()).map(|rule| self.rules[rule])
    }

    /// Returns the positions of the rules that may decide, in the policy.
    pub(super) fn deciding(&self, connection: Identified<'_>) -> Vec<usize> {
        let mut deciding = Vec::new();
        for matching in self.matching(connection) {
            deciding.extend(positions(matching.at, matching.deciding()).map(|rule| self.rules[rule]));
            if matching.certain != 0 {
                break;
            }
        }
        deciding
    }

    fn matching<'a>(&'a self, connection: Identified<'a>) -> Joined<'a, 4> {
        let Identified { flow: Flow { source, source_port, destination }, source: from, destination: to } =
            connection;
        Joined::new([
            self.to.condition(destination.ip(), to.map(|it| &it.to)),
            self.from.condition(source, from.map(|it| &it.from)),
            self.ports.condition(destination.port(), to.map(|it| &it.ports)),
            self.source_ports.condition(source_port),
        ])
    }
}

/// Returns the verdict of each rule, as a position among the different verdicts, and those.
fn verdicts<'a>(rules: impl Iterator<Item = &'a Rule>) -> (Vec<usize>, Vec<(Verdict, RuleSet)>) {
    let mut known = HashMap::new();
    let mut verdicts: Vec<(Verdict, Builder)> = Vec::new();
    let mut verdict_of = Vec::new();
    for (rule, verdict) in rules.map(Rule::verdict).enumerate() {
        let at = *known.entry(verdict).or_insert_with(|| {
            verdicts.push((verdict, Builder::default()));
            verdicts.len() - 1
        });
        verdicts[at].1.insert(rule);
        verdict_of.push(at);
    }
    (verdict_of, verdicts.into_iter().map(|(verdict, rules)| (verdict, rules.build())).collect())
}
