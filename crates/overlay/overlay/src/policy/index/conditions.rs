//! The parts of rules, each as a look-up: which rules name this address, or this port?

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::ops::RangeInclusive;

use super::ranges::{Range, Ranges};
use super::rule_set::{Builder, Condition, RuleSet, Words};
use crate::policy::resolved::without;
use crate::policy::selector::Match;
use crate::policy::{Ends, Except, Ports, Selector};
use crate::workloads::{Identity, Workload};

/// The rules of which something holds, and the other ones of which it may hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) certain: RuleSet,
    pub(super) possible: RuleSet,
}

/// `from` or `to` of a chain's rules.
#[derive(Debug)]
pub(super) struct EndsIndex {
    /// The rules that match every address.
    any: RuleSet,
    prefixes: Ranges<IpAddr>,
    /// The rules that select containers by labels.
    selecting: RuleSet,
    /// The selectors by the namespace that they name, each once, with its rules.
    selectors: HashMap<Option<String>, Vec<(Selector, RuleSet)>>,
}

impl EndsIndex {
    /// Creates the look-up of each rule's entries.
    pub(super) fn new<'a>(rules: impl Iterator<Item = Option<&'a [Ends]>>) -> EndsIndex {
        let mut any = Builder::default();
        let mut prefixes = Vec::new();
        let mut selecting = Builder::default();
        let mut by_selector: HashMap<&Selector, Builder> = HashMap::new();
        for (rule, ends) in rules.enumerate() {
            let Some(ends) = ends else {
                any.insert(rule);
                continue;
            };
            for it in ends {
                match it {
                    Ends::Prefix(net) => prefixes.push((Range::of_prefix(*net), rule)),
                    Ends::Except(Except { prefix, except }) => {
                        let left = without(*prefix, except);
                        prefixes.extend(left.into_iter().map(|net| (Range::of_prefix(net), rule)));
                    }
                    Ends::Selected(selector) => {
                        selecting.insert(rule);
                        by_selector.entry(selector).or_default().insert(rule);
                    }
                }
            }
        }
        let mut selectors: HashMap<Option<String>, Vec<(Selector, RuleSet)>> = HashMap::new();
        for (selector, rules) in by_selector {
            let of_namespace = selectors.entry(selector.namespace.clone()).or_default();
            of_namespace.push((selector.clone(), rules.build()));
        }
        EndsIndex {
            any: any.build(),
            prefixes: Ranges::new(prefixes.into_iter()),
            selecting: selecting.build(),
            selectors,
        }
    }

    /// Returns `true` if a rule selects containers by labels.
    pub(super) fn selects(&self) -> bool {
        !self.selecting.is_empty()
    }

    /// Returns the rules that select a container by labels.
    pub(super) fn selecting(&self, workload: &Workload) -> Found {
        let (mut certain, mut possible) = (Builder::default(), Builder::default());
        let of_its_namespace = workload.namespace.is_some().then(|| self.selectors.get(&workload.namespace));
        let groups = [self.selectors.get(&None), of_its_namespace.flatten()];
        for (selector, rules) in groups.into_iter().flatten().flatten() {
            match selector.matches(Identity::Known(workload)) {
                Match::No => {}
                Match::Maybe => possible.add(rules),
                Match::Yes => certain.add(rules),
            }
        }
        Found { certain: certain.build(), possible: possible.build() }
    }

    /// Returns the condition that an address is among the entries. `by_labels` are the rules that
    /// select its container; `None`: it is not known.
    pub(super) fn condition<'a>(&'a self, address: IpAddr, by_labels: Option<&'a Found>) -> Condition<'a> {
        let prefixes = self.prefixes.of(address).words();
        let (certain, possible) = match by_labels {
            Some(found) => (found.certain.words(), found.possible.words()),
            None => (Words::default(), self.selecting.words()),
        };
        Condition { certain: [self.any.words(), prefixes, certain], possible }
    }
}

/// `ports` of a chain's rules.
#[derive(Debug)]
pub(super) struct PortsIndex {
    /// The rules that match every port.
    any: RuleSet,
    numbers: Ranges<u16>,
    /// The rules with names, by name.
    names: HashMap<String, RuleSet>,
    /// The rules with names.
    naming: RuleSet,
}

impl PortsIndex {
    pub(super) fn new<'a>(rules: impl Iterator<Item = Option<&'a [Ports]>>) -> PortsIndex {
        let mut any = Builder::default();
        let mut numbers = Vec::new();
        let mut naming = Builder::default();
        let mut names: HashMap<&str, Builder> = HashMap::new();
        for (rule, ports) in rules.enumerate() {
            let Some(ports) = ports else {
                any.insert(rule);
                continue;
            };
            for it in ports {
                match it {
                    Ports::Range(range) => numbers.push((range_of(range), rule)),
                    Ports::Named(name) => {
                        naming.insert(rule);
                        names.entry(name).or_default().insert(rule);
                    }
                }
            }
        }
        PortsIndex {
            any: any.build(),
            numbers: Ranges::new(numbers.into_iter()),
            names: names.into_iter().map(|(name, rules)| (name.to_owned(), rules.build())).collect(),
            naming: naming.build(),
        }
    }

    /// Returns `true` if a rule has a port's name.
    pub(super) fn has_names(&self) -> bool {
        !self.naming.is_empty()
    }

    /// Returns the rules with a name that a container gives to a port, by port.
    pub(super) fn named(&self, workload: &Workload) -> BTreeMap<u16, RuleSet> {
        let mut by_port: BTreeMap<u16, Builder> = BTreeMap::new();
        for (name, ports) in &workload.ports {
            let Some(rules) = self.names.get(name) else { continue };
            for port in ports {
                by_port.entry(*port).or_default().add(rules);
            }
        }
        by_port.into_iter().map(|(port, rules)| (port, rules.build())).collect()
    }

    /// Returns the condition that a port is among the entries. `named` are the rules with a name for
    /// ports of the container; `None`: it is not known.
    pub(super) fn condition<'a>(
        &'a self,
        port: u16,
        named: Option<&'a BTreeMap<u16, RuleSet>>,
    ) -> Condition<'a> {
        let (certain, possible) = match named {
            Some(named) => (named.get(&port).map_or_else(Words::default, RuleSet::words), Words::default()),
            None => (Words::default(), self.naming.words()),
        };
        Condition { certain: [self.any.words(), self.numbers.of(port).words(), certain], possible }
    }
}

/// `source-ports` of a chain's rules.
#[derive(Debug)]
pub(super) struct SourcePortsIndex {
    /// The rules that match every port.
    any: RuleSet,
    numbers: Ranges<u16>,
    /// The rules that do not.
    limited: RuleSet,
}

impl SourcePortsIndex {
    pub(super) fn new<'a>(
        rules: impl Iterator<Item = Option<&'a [RangeInclusive<u16>]>> + Clone,
    ) -> SourcePortsIndex {
        let with = |limited: bool| {
            let all = rules.clone().enumerate();
            all.filter_map(move |(rule, ports)| (ports.is_some() == limited).then_some(rule)).collect()
        };
        let ranges = rules
            .clone()
            .enumerate()
            .flat_map(|(rule, ports)| ports.into_iter().flatten().map(move |range| (range_of(range), rule)));
        SourcePortsIndex { any: with(false), numbers: Ranges::new(ranges), limited: with(true) }
    }

    /// Returns the condition that a port is among the entries. `None`: it is not known.
    pub(super) fn condition(&self, port: Option<u16>) -> Condition<'_> {
        let (certain, possible) = match port {
            Some(port) => (self.numbers.of(port).words(), Words::default()),
            None => (Words::default(), self.limited.words()),
        };
        Condition { certain: [self.any.words(), certain, Words::default()], possible }
    }
}

fn range_of(range: &RangeInclusive<u16>) -> Range<u16> {
    Range { first: *range.start(), end: range.end().checked_add(1) }
}
