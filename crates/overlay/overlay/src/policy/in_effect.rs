//! Decides about connections by a policy and the known containers that it selects.
//!
//! A rule whose selector concerns an unknown container may match or not. The decision follows all
//! possibilities. If they lead to different verdicts, the verdict is [`Verdict::Unclear`], by which
//! a connection stays on the overlay. So labels that are not known never permit anything.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use super::index::{CHAINS, Identified, Index};
use super::members::Members;
use super::selector::Match;
use super::{Direction, Doubt, Ends, Flow, Policy, Shape, Verdict};
use crate::workloads::Workloads;

/// A policy, and the containers that it can select.
#[derive(Debug)]
pub(crate) struct InEffect {
    pub(crate) policy: Arc<Policy>,
    pub(crate) workloads: Arc<Workloads>,
    uses_labels: bool,
    /// The policy's rules.
    pub(super) index: Arc<Index>,
    /// The containers, as the index selects them.
    pub(super) members: Members,
}

/// What decides about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Deciding {
    /// `None`: in both directions.
    pub(crate) direction: Option<Direction>,
    /// The position of the rule. `None`: the default decides.
    pub(crate) rule: Option<usize>,
}

impl InEffect {
    /// Takes time that grows with the numbers of rules and of containers.
    pub(crate) fn new(policy: Arc<Policy>, workloads: Arc<Workloads>) -> InEffect {
        let index = Arc::new(Index::new(&policy));
        let members = Members::new(&index, &workloads, None);
        InEffect { uses_labels: policy.uses_labels(), policy, workloads, index, members }
    }

    /// Returns the same policy with other containers. Takes time that grows with the number of those
    /// that differ, and little time for each other one.
    pub(crate) fn with(&self, workloads: Arc<Workloads>) -> InEffect {
        let InEffect { policy, workloads: former, uses_labels, index, members } = self;
        let members = Members::new(index, &workloads, Some((members, former)));
        let (policy, index) = (policy.clone(), index.clone());
        InEffect { policy, workloads, uses_labels: *uses_labels, index, members }
    }

    /// Returns the policy of a router without a policy file: everything is permitted.
    pub(crate) fn open() -> InEffect {
        InEffect::new(Arc::new(Policy::open()), Arc::default())
    }

    /// Returns `true` if a rule selects containers by their labels.
    pub(crate) fn uses_labels(&self) -> bool {
        self.uses_labels
    }

    pub(crate) fn verdict(&self, flow: Flow) -> Verdict {
        let connection = self.identified(flow);
        let possible = self.possible(connection);
        match possible.as_slice() {
            [one] => *one,
            _ if flow.source_port.is_none() => self.without_port(connection),
            _ => Verdict::Unclear(Doubt::Labels),
        }
    }

    /// Decides for every port that a connection without one may get.
    fn without_port(&self, connection: Identified<'_>) -> Verdict {
        let Identified { flow, .. } = connection;
        let verdict = |port| self.verdict(Flow { source_port: Some(port), ..flow });
        let mut verdicts = self.distinct_ports(connection).into_iter().map(verdict);
        let first = verdicts.next().expect("it has port 0");
        verdicts.fold(first, |all, one| match (all, one) {
            (Verdict::Unclear(Doubt::Labels), _) | (_, Verdict::Unclear(Doubt::Labels)) => {
                Verdict::Unclear(Doubt::Labels)
            }
            (all, one) if all == one => all,
            _ => Verdict::Unclear(Doubt::SourcePort),
        })
    }

    /// Returns one source port of each range in which all ports match the same rules.
    fn distinct_ports(&self, connection: Identified<'_>) -> BTreeSet<u16> {
        let rules = CHAINS.into_iter().flat_map(|direction| self.index.deciding(direction, connection));
        let ranges = rules
            .map(|rule| &self.policy.rules[rule])
            .filter_map(|rule| rule.source_ports.as_ref())
            .flatten();
        let bounds = ranges.flat_map(|it| [Some(*it.start()), it.end().checked_add(1)]);
        bounds.flatten().chain([0]).collect()
    }

    /// Returns the rules that decide: one, or one for each direction. None: the default does.
    pub(crate) fn rules(&self, flow: Flow) -> Vec<usize> {
        self.deciding(flow).into_iter().filter_map(|it| it.rule).collect()
    }

    /// Returns what decides: a rule or the default, or that for each direction.
    pub(crate) fn deciding(&self, flow: Flow) -> Vec<Deciding> {
        let connection = self.identified(flow);
        let first = |direction| Deciding { direction, rule: self.index.first(direction, connection) };
        let all = first(None);
        if all.rule.is_some() || !self.has_directions(flow) {
            return vec![all];
        }
        let directed = [Direction::Egress, Direction::Ingress].map(|direction| first(Some(direction)));
        match directed.iter().all(|it| it.rule.is_none()) {
            true => vec![all],
            false => directed.to_vec(),
        }
    }

    /// Returns the rules that may decide: more than those that do, if something is not known.
    pub(crate) fn possible_rules(&self, flow: Flow) -> Vec<usize> {
        let connection = self.identified(flow);
        let is_open = self.index.possible(None, connection).is_open && self.has_directions(flow);
        let chains = if is_open { &CHAINS[..] } else { &CHAINS[..1] };
        chains.iter().flat_map(|direction| self.index.deciding(*direction, connection)).collect()
    }

    fn identified(&self, flow: Flow) -> Identified<'_> {
        let selected = |address| self.members.of(address, &self.workloads);
        Identified { flow, source: selected(flow.source), destination: selected(flow.destination.ip()) }
    }

    /// Returns the different verdicts that are possible, at least one.
    fn possible(&self, connection: Identified<'_>) -> Vec<Verdict> {
        let all = self.index.possible(None, connection);
        let mut possible = all.verdicts;
        if !all.is_open {
            return possible;
        }
        if !self.has_directions(connection.flow) {
            add(&mut possible, self.policy.default.verdict());
            return possible;
        }
        let [egress, ingress] = [Direction::Egress, Direction::Ingress].map(|direction| {
            let mut of_direction = self.index.possible(Some(direction), connection);
            if of_direction.is_open {
                add(&mut of_direction.verdicts, self.policy.default.verdict());
            }
            of_direction.verdicts
        });
        for of_client in egress {
            for of_server in &ingress {
                add(&mut possible, stricter(of_client, *of_server));
            }
        }
        possible
    }

    /// Returns `true` if rules with a direction apply. As in Kubernetes, a container may always
    /// connect to itself, and this host to its containers and back.
    fn has_directions(&self, Flow { source, destination, .. }: Flow) -> bool {
        source != destination.ip()
            && ![source, destination.ip()].iter().any(|it| self.workloads.is_hosts(*it))
    }
}

fn add(possible: &mut Vec<Verdict>, verdict: Verdict) {
    if !possible.contains(&verdict) {
        possible.push(verdict);
    }
}

/// Returns the verdict of two that both have to permit a connection.
pub(super) fn stricter(one: Verdict, other: Verdict) -> Verdict {
    match (one, other) {
        (Verdict::Deny(_), _) => one,
        (_, Verdict::Deny(_)) => other,
        (Verdict::Allow(one), Verdict::Allow(other)) => Verdict::Allow(Shape {
            rate: [one.rate, other.rate].into_iter().flatten().min(),
            container_rate: [one.container_rate, other.container_rate].into_iter().flatten().min(),
            dscp: one.dscp.or(other.dscp),
            priority: one.priority.or(other.priority),
        }),
        (Verdict::Allow(_), other) => other,
        (one, _) => one,
    }
}

impl Ends {
    pub(super) fn has(&self, address: IpAddr, workloads: &Workloads) -> Match {
        match self {
            Ends::Prefix(prefix) => Match::of(prefix.contains(&address)),
            Ends::Except(it) => Match::of(
                it.prefix.contains(&address) && !it.except.iter().any(|prefix| prefix.contains(&address)),
            ),
            Ends::Selected(selector) => selector.matches(workloads.of(address)),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::policy::Denial;
    use crate::workloads::{Labels, Workload};

    pub(in crate::policy) fn flow(source: &str, destination: &str) -> Flow {
        Flow {
            source: source.parse().unwrap(),
            source_port: Some(40_000),
            destination: destination.parse().unwrap(),
        }
    }

    /// Returns a policy for an overlay with the containers web, db and other on 10.50.1.2, 10.50.2.2
    /// and 10.50.2.3, and the host's own address 10.50.1.1.
    pub(in crate::policy) fn in_effect(text: &str) -> InEffect {
        let overlay = ["10.50.0.0/16", "fd00:50::/32"].map(|it| it.parse().unwrap()).to_vec();
        let mut workloads = Workloads::new(overlay, HashSet::from(["10.50.1.1".parse().unwrap()]));
        for (address, app) in [("10.50.1.2", "web"), ("10.50.2.2", "db"), ("10.50.2.3", "other")] {
            let labels = Labels::from([("app".to_owned(), app.to_owned())]);
            let workload = Workload {
                name: app.to_owned(),
                namespace: Some("shop".to_owned()),
                labels,
                namespace_labels: None,
                ports: [("sql".to_owned(), [5432].into())].into(),
            };
            workloads.add(address.parse().unwrap(), Arc::new(workload));
        }
        let policy = Policy::parse("f".as_ref(), text).unwrap();
        InEffect::new(Arc::new(policy), Arc::new(workloads))
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let policy = in_effect(
            "default = 'drop'\n[labels]\nweb = ['10.50.1.0/30', '10.50.3.7', 'fd00:50:7::/48']\n\
             [[rule]]\nname = 'admin'\naction = 'allow'\nfrom = ['10.50.1.1']\nports = [22]\n\
             [[rule]]\nname = 'ssh'\naction = 'deny'\nports = [22, '2200-2299']\n\
             [[rule]]\nname = 'inspected'\naction = 'overlay'\nto = ['10.50.9.0/24', 'fd00:50:9::2']\n\
             [[rule]]\nname = 'web'\naction = 'allow'\nfrom = ['web']\nrate = '8mbit'\n",
        );
        let verdict = |source, destination| policy.verdict(flow(source, destination));
        assert_eq!(verdict("10.50.1.1", "10.50.2.2:22"), Verdict::Allow(Shape::default()));
        assert_eq!(verdict("10.50.1.2", "10.50.2.2:22"), Verdict::Deny(Denial::Refused));
        assert_eq!(verdict("10.50.1.1", "10.50.2.2:2299"), Verdict::Deny(Denial::Refused));
        assert_eq!(verdict("10.50.1.1", "10.50.9.2:80"), Verdict::Overlay);
        let limited = Verdict::Allow(Shape { rate: Some(1_000_000), ..Shape::default() });
        assert_eq!(verdict("10.50.1.2", "10.50.2.2:2300"), limited);
        assert_eq!(verdict("10.50.3.7", "10.50.2.2:80"), limited);
        assert_eq!(verdict("10.50.1.4", "10.50.2.2:80"), Verdict::Deny(Denial::TimedOut));
        assert_eq!(verdict("fd00:50:1::2", "[fd00:50:2::2]:22"), Verdict::Deny(Denial::Refused));
        assert_eq!(verdict("fd00:50:1::2", "[fd00:50:9::2]:80"), Verdict::Overlay);
        assert_eq!(verdict("fd00:50:7::2", "[fd00:50:2::2]:80"), limited);
        assert_eq!(verdict("fd00:50:1::2", "[fd00:50:2::2]:80"), Verdict::Deny(Denial::TimedOut));
        assert!(policy.rules(flow("10.50.1.4", "10.50.2.2:80")).is_empty());
        assert_eq!(InEffect::open().verdict(flow("1.2.3.4", "5.6.7.8:9")), Verdict::Allow(Shape::default()));
    }

    #[test]
    fn a_selector_decides_only_about_containers_that_are_known() {
        let policy = in_effect(
            "default = 'deny'\n[[rule]]\nname = 'a'\naction = 'allow'\nfrom = [{ labels = 'app=web' }]\n\
             to = [{ labels = 'app in (db, cache)', namespace = 'shop' }]\nports = ['sql']\n",
        );
        let verdict = |source, destination| policy.verdict(flow(source, destination));
        let (allow, deny) = (Verdict::Allow(Shape::default()), Verdict::Deny(Denial::Refused));
        let unclear = Verdict::Unclear(Doubt::Labels);
        assert_eq!(verdict("10.50.1.2", "10.50.2.2:5432"), allow);
        assert_eq!(verdict("10.50.1.2", "10.50.2.2:5433"), deny);
        assert_eq!(verdict("10.50.1.2", "10.50.2.3:5432"), deny);
        assert_eq!(verdict("10.50.1.2", "10.50.2.9:5432"), unclear);
        assert_eq!(verdict("10.50.1.9", "10.50.2.2:5432"), unclear);
        assert_eq!(verdict("10.50.1.9", "10.50.2.2:5433"), deny, "whatever its labels are");
        assert_eq!(verdict("10.50.1.2", "10.50.2.9:80"), unclear, "it may have that name");
        assert_eq!(verdict("10.50.1.9", "10.50.2.3:5432"), deny, "the other end is known");
        assert_eq!(verdict("203.0.113.9", "10.50.2.2:5432"), deny, "it is no container");
        let open = in_effect(
            "[[rule]]\nname = 'a'\naction = 'deny'\nfrom = [{ labels = 'app=web' }]\n\
             [[rule]]\nname = 'b'\naction = 'deny'\nto = ['10.50.2.3']\n",
        );
        let verdict = |source, destination| open.verdict(flow(source, destination));
        assert_eq!(verdict("10.50.1.2", "10.50.2.2:80"), deny);
        assert_eq!(verdict("10.50.1.9", "10.50.2.2:80"), unclear);
        assert_eq!(verdict("10.50.1.9", "10.50.2.3:80"), deny, "by one rule or the other");
        assert_eq!(verdict("10.50.2.3", "10.50.2.2:80"), allow);
    }

    #[test]
    fn both_directions_have_to_permit_a_connection() {
        let policy = in_effect(
            "[[rule]]\nname = 'first'\naction = 'drop'\nports = [23]\n\
             [[rule]]\nname = 'in'\naction = 'allow'\ndirection = 'ingress'\nfrom = [{ labels = 'app=web' }]\n\
             to = [{ labels = 'app=db' }]\nrate = '16kbit'\n\
             [[rule]]\nname = 'no'\naction = 'deny'\ndirection = 'ingress'\nto = [{ labels = 'app=db' }]\n\
             [[rule]]\nname = 'out'\naction = 'allow'\ndirection = 'egress'\nfrom = [{ labels = 'app=web' }]\n\
             ports = [80]\ndscp = 'ef'\nrate = '8mbit'\n\
             [[rule]]\nname = 'nothing else'\naction = 'deny'\ndirection = 'egress'\nfrom = [{ labels = 'app=web' }]\n",
        );
        let verdict = |source, destination| policy.verdict(flow(source, destination));
        let (allow, deny) = (Verdict::Allow(Shape::default()), Verdict::Deny(Denial::Refused));
        let both = Verdict::Allow(Shape { rate: Some(2_000), dscp: Some(46), ..Shape::default() });
        assert_eq!(verdict("10.50.1.2", "10.50.2.2:80"), both);
        assert_eq!(policy.rules(flow("10.50.1.2", "10.50.2.2:80")), [3, 1]);
        assert_eq!(verdict("10.50.1.2", "10.50.2.2:81"), deny, "by egress");
        assert_eq!(verdict("10.50.2.3", "10.50.2.2:80"), deny, "by ingress");
        assert_eq!(verdict("10.50.2.2", "10.50.2.3:80"), allow, "no rule is about it");
        assert_eq!(verdict("10.50.2.3", "10.50.2.2:23"), Verdict::Deny(Denial::TimedOut), "before both");
        assert_eq!(policy.rules(flow("10.50.2.3", "10.50.2.2:23")), [0]);
        assert_eq!(verdict("10.50.2.9", "10.50.2.2:80"), Verdict::Unclear(Doubt::Labels));
        for (source, destination) in
            [("10.50.2.2", "10.50.2.2:80"), ("10.50.1.1", "10.50.2.2:80"), ("10.50.1.2", "10.50.1.1:1")]
        {
            assert_eq!(verdict(source, destination), allow, "a container and itself, or its host");
            assert!(policy.rules(flow(source, destination)).is_empty());
        }
        assert_eq!(verdict("10.50.1.1", "10.50.2.2:23"), Verdict::Deny(Denial::TimedOut));
    }

    #[test]
    fn a_source_port_that_is_not_known_yet_leaves_open_only_what_depends_on_it() {
        let policy = in_effect(
            "[[rule]]\nname = 'a'\naction = 'allow'\nsource-ports = ['1-1023']\nports = [111]\n\
             [[rule]]\nname = 'b'\naction = 'deny'\nports = [111, 112]\n\
             [[rule]]\nname = 'c'\naction = 'deny'\nsource-ports = [65535]\nfrom = [{ labels = 'app=web' }]\n",
        );
        let of = |source_port, source, destination| {
            policy.verdict(Flow { source_port, ..flow(source, destination) })
        };
        let (allow, deny) = (Verdict::Allow(Shape::default()), Verdict::Deny(Denial::Refused));
        assert_eq!(of(Some(1023), "10.50.2.2", "10.50.1.2:111"), allow);
        assert_eq!(of(Some(1024), "10.50.2.2", "10.50.1.2:111"), deny);
        assert_eq!(of(Some(65535), "10.50.1.2", "10.50.2.2:80"), deny);
        assert_eq!(of(None, "10.50.2.2", "10.50.1.2:111"), Verdict::Unclear(Doubt::SourcePort));
        assert_eq!(of(None, "10.50.2.2", "10.50.1.2:112"), deny);
        assert_eq!(of(None, "10.50.2.2", "10.50.1.2:80"), allow);
        assert_eq!(of(None, "10.50.1.2", "10.50.2.2:80"), Verdict::Unclear(Doubt::SourcePort));
        assert_eq!(of(None, "10.50.1.9", "10.50.2.2:80"), Verdict::Unclear(Doubt::Labels));
    }
}
