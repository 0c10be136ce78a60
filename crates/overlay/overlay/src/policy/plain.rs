//! Decides about connections by comparing them with one rule after the other, as the page for users
//! describes it. The index must decide the same.

use std::collections::{BTreeSet, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;

use ipnet::IpNet;
use shunt_abi::local_policy::LocalFlow;

use super::selector::Match;
use super::{
    Action, Default, Direction, Doubt, Ends, Except, Flow, InEffect, Policy, Ports, Protocol, Rule, Selector,
    Shape, Verdict, stricter,
};
use crate::random::Random;
use crate::workloads::{Identity, Labels, Workload, Workloads};

/// A policy, and the containers that it can select.
struct Plain<'a> {
    policy: &'a Policy,
    workloads: &'a Workloads,
}

impl Plain<'_> {
    fn verdict(&self, flow: Flow) -> Verdict {
        match Vec::from_iter(self.possible(flow)).as_slice() {
            [one] => *one,
            _ if flow.source_port.is_none() => self.without_port(flow),
            _ => Verdict::Unclear(Doubt::Labels),
        }
    }

    /// Decides for every port that a connection without one may get.
    fn without_port(&self, flow: Flow) -> Verdict {
        let ranges = self.policy.rules.iter().filter_map(|rule| rule.source_ports.as_ref()).flatten();
        let bounds = ranges.flat_map(|it| [Some(*it.start()), it.end().checked_add(1)]).flatten();
        let ports: BTreeSet<u16> = bounds.chain([0]).collect();
        let verdict = |port| self.verdict(Flow { source_port: Some(port), ..flow });
        let verdicts: HashSet<Verdict> = ports.into_iter().map(verdict).collect();
        match Vec::from_iter(&verdicts).as_slice() {
            [one] => **one,
            _ if verdicts.contains(&Verdict::Unclear(Doubt::Labels)) => Verdict::Unclear(Doubt::Labels),
            _ => Verdict::Unclear(Doubt::SourcePort),
        }
    }

    fn rules(&self, flow: Flow) -> Vec<usize> {
        let first = |direction| {
            let mut rules = self.policy.of_tcp(direction);
            rules.find(|(_, rule)| self.matches(rule, flow) == Match::Yes).map(|(at, _)| at)
        };
        match first(None) {
            Some(rule) => vec![rule],
            None if !self.has_directions(flow) => Vec::new(),
            None => {
                [Direction::Egress, Direction::Ingress].into_iter().filter_map(|it| first(Some(it))).collect()
            }
        }
    }

    fn possible(&self, flow: Flow) -> HashSet<Verdict> {
        let (mut possible, is_open) = self.chain(None, flow);
        if !is_open {
            return possible;
        }
        if !self.has_directions(flow) {
            possible.insert(self.policy.default.verdict());
            return possible;
        }
        let [egress, ingress] = [Direction::Egress, Direction::Ingress].map(|direction| {
            let (mut possible, is_open) = self.chain(Some(direction), flow);
            possible.extend(is_open.then_some(self.policy.default.verdict()));
            possible
        });
        for of_client in &egress {
            possible.extend(ingress.iter().map(|of_server| stricter(*of_client, *of_server)));
        }
        possible
    }

    /// Returns the verdicts of the rules with that direction, and whether possibly none matches.
    fn chain(&self, direction: Option<Direction>, flow: Flow) -> (HashSet<Verdict>, bool) {
        let mut possible = HashSet::new();
        for (_, rule) in self.policy.of_tcp(direction) {
            match self.matches(rule, flow) {
                Match::No => {}
                Match::Maybe => drop(possible.insert(rule.verdict())),
                Match::Yes => {
                    possible.insert(rule.verdict());
                    return (possible, false);
                }
            }
        }
        (possible, true)
    }

    fn has_directions(&self, Flow { source, destination, .. }: Flow) -> bool {
        let is_hosts = |address| self.workloads.is_hosts(address);
        source != destination.ip() && !is_hosts(source) && !is_hosts(destination.ip())
    }

    fn matches(&self, rule: &Rule, flow: Flow) -> Match {
        let ports = match &rule.ports {
            None => Match::Yes,
            Some(ports) => ports.iter().map(|it| self.has_port(it, flow.destination)).max().unwrap(),
        };
        let source_ports = match (&rule.source_ports, flow.source_port) {
            (None, _) => Match::Yes,
            (Some(_), None) => Match::Maybe,
            (Some(ports), Some(port)) => Match::of(ports.iter().any(|range| range.contains(&port))),
        };
        let within = |ends: &Option<Vec<Ends>>, address: IpAddr| match ends {
            None => Match::Yes,
            Some(ends) => ends.iter().map(|it| it.has(address, self.workloads)).max().unwrap(),
        };
        let (from, to) = (within(&rule.from, flow.source), within(&rule.to, flow.destination.ip()));
        ports.and(source_ports).and(from).and(to)
    }

    fn has_port(&self, ports: &Ports, destination: SocketAddr) -> Match {
        match (ports, self.workloads.of(destination.ip())) {
            (Ports::Range(range), _) => Match::of(range.contains(&destination.port())),
            (Ports::Named(_), Identity::Unknown) => Match::Maybe,
            (Ports::Named(_), Identity::Outside) => Match::No,
            (Ports::Named(name), Identity::Known(workload)) => {
                Match::of(workload.ports.get(name).is_some_and(|it| it.contains(&destination.port())))
            }
        }
    }
}

/// The addresses of the connections that are compared: of containers that are known or not, of the
/// host, and others.
const ADDRESSES: [&str; 12] = [
    "10.50.1.1",
    "10.50.1.2",
    "10.50.1.3",
    "10.50.2.2",
    "10.50.2.3",
    "10.50.2.4",
    "10.50.255.255",
    "10.51.0.0",
    "203.0.113.9",
    "fd00:50::2",
    "fd00:50::3",
    "2001:db8::1",
];
const PREFIXES: [&str; 9] = [
    "0.0.0.0/0",
    "10.50.0.0/16",
    "10.50.1.0/24",
    "10.50.1.2/31",
    "10.50.2.2/32",
    "10.51.0.0/16",
    "::/0",
    "fd00:50::/32",
    "fd00:50::2/128",
];
const PORTS: [u16; 6] = [1, 80, 81, 5432, 6000, 65535];

/// Returns containers for about two thirds of the addresses. Some are named twice.
fn workloads(random: &mut Random) -> Workloads {
    let overlay = ["10.50.0.0/16", "fd00:50::/32"].map(|it| it.parse().unwrap()).to_vec();
    let hosts = HashSet::from([ADDRESSES[0].parse().unwrap()]);
    let mut workloads = Workloads::new(overlay, hosts);
    for address in ADDRESSES {
        if !random.one_in(3) {
            workloads.add(address.parse().unwrap(), Arc::new(workload(random)));
        }
        if random.one_in(8) {
            workloads.add(address.parse().unwrap(), Arc::new(workload(random)));
        }
    }
    workloads
}

fn workload(random: &mut Random) -> Workload {
    let labels = |random: &mut Random| -> Labels {
        let pair = |random: &mut Random| (random.of(&["app", "tier"]), random.of(&["a", "b"]));
        random.list(2, pair).into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    };
    let port = |random: &mut Random| (random.of(&["sql", "http"]).to_owned(), [random.of(&PORTS)].into());
    Workload {
        name: "it".to_owned(),
        namespace: (!random.one_in(4)).then(|| random.of(&["shop", "mail"]).to_owned()),
        labels: labels(random),
        namespace_labels: (!random.one_in(3)).then(|| labels(random)),
        ports: random.list(2, port).into_iter().collect(),
    }
}

/// Returns a policy. Some have hundreds of rules, most of which concern other ports.
fn policy(random: &mut Random) -> Policy {
    let mut rules = Vec::new();
    let filler = if random.one_in(12) { 150 } else { 0 };
    for _ in 0..random.below(9) {
        let unrelated = random.below(filler + 1);
        rules.extend((0..unrelated).map(|_| Rule { ports: Some(vec![Ports::Range(7..=9)]), ..rule(random) }));
        rules.push(rule(random));
    }
    Policy { default: random.of(&[Default::Allow, Default::Deny, Default::Drop]), rules }
}

fn rule(random: &mut Random) -> Rule {
    let optional = |random: &mut Random, most| random.below(most);
    let rate = (!random.one_in(3)).then_some(2_000 * (1 + random.below(2)));
    Rule {
        name: "it".to_owned(),
        action: random.of(&[Action::Allow, Action::Allow, Action::Deny, Action::Drop, Action::Overlay]),
        protocol: if optional(random, 12) == 0 { Protocol::Udp } else { Protocol::Tcp },
        direction: random.of(&[None, Some(Direction::Egress), Some(Direction::Ingress)]),
        from: some_of(random, ends),
        to: some_of(random, ends),
        ports: some_of(random, ports),
        source_ports: if random.one_in(4) { some_of(random, range) } else { None },
        shape: Shape { rate, ..Shape::default() },
    }
}

/// Returns one or two values, or `None`.
fn some_of<T>(random: &mut Random, one: impl Fn(&mut Random) -> T) -> Option<Vec<T>> {
    match random.below(3) {
        0 => None,
        count => Some((0..count).map(|_| one(random)).collect()),
    }
}

fn ends(random: &mut Random) -> Ends {
    let net = |random: &mut Random| random.of(&PREFIXES).parse::<IpNet>().unwrap();
    match random.below(4) {
        0 => Ends::Prefix(net(random)),
        1 => {
            let prefix = net(random);
            let except = random.list(2, net).into_iter().filter(|it| prefix.contains(it)).collect();
            Ends::Except(Except { prefix, except })
        }
        _ => Ends::Selected(selector(random)),
    }
}

fn selector(random: &mut Random) -> Selector {
    let texts =
        ["app=a", "app!=a", "tier in (a,b)", "!tier", "app,tier=b", "kubernetes.io/metadata.name=shop"];
    let requirements = |random: &mut Random| random.of(&texts).parse().unwrap();
    Selector {
        labels: random.one_in(2).then(|| requirements(random)),
        namespace: random.one_in(2).then(|| random.of(&["shop", "mail"]).to_owned()),
        namespace_labels: random.one_in(3).then(|| requirements(random)),
    }
}

fn ports(random: &mut Random) -> Ports {
    match random.below(3) {
        0 => Ports::Named(random.of(&["sql", "http"]).to_owned()),
        _ => Ports::Range(range(random)),
    }
}

fn range(random: &mut Random) -> RangeInclusive<u16> {
    let (one, other) = (random.of(&PORTS), random.of(&PORTS));
    one.min(other)..=one.max(other)
}

fn flow(random: &mut Random) -> Flow {
    Flow {
        source: random.of(&ADDRESSES).parse().unwrap(),
        source_port: (!random.one_in(3)).then(|| random.of(&PORTS)),
        destination: SocketAddr::new(random.of(&ADDRESSES).parse().unwrap(), random.of(&PORTS)),
    }
}

#[test]
fn the_index_decides_as_a_comparison_with_each_rule() {
    let mut random = Random(0x5eed);
    let mut counts = std::collections::HashMap::new();
    for _ in 0..1_000 {
        let policy = Arc::new(policy(&mut random));
        let workloads = Arc::new(workloads(&mut random));
        let in_effect = InEffect::new(policy.clone(), workloads.clone());
        let plain = Plain { policy: &policy, workloads: &workloads };
        for _ in 0..40 {
            let flow = flow(&mut random);
            let verdict = plain.verdict(flow);
            assert_eq!(in_effect.verdict(flow), verdict, "{flow:?} {policy:#?} {workloads:#?}");
            assert_eq!(in_effect.rules(flow), plain.rules(flow), "{flow:?} {policy:#?} {workloads:#?}");
            *counts.entry(std::mem::discriminant(&verdict)).or_insert(0) += 1;
            if let Verdict::Unclear(doubt) = verdict {
                *counts.entry(std::mem::discriminant(&verdict)).or_insert(0) +=
                    i32::from(doubt == Doubt::Labels);
            }
        }
    }
    // No kind of verdict is rare.
    assert!(counts.len() == 4 && counts.values().all(|count| *count > 1_000), "{counts:?}");
}

/// The policy for the broker permits shared memory if the verdict allows a connection without a rate,
/// and does not if the verdict denies it or keeps it on the overlay.
#[test]
fn what_is_shared_on_one_host_is_allowed() {
    let mut random = Random(0xbeef);
    let overlay = ["10.50.0.0/16", "fd00:50::/32"].map(|it| it.parse().unwrap());
    let (mut shared, mut kept_off) = (0, 0);
    for _ in 0..1_000 {
        let in_effect = InEffect::new(Arc::new(policy(&mut random)), Arc::new(workloads(&mut random)));
        let local = in_effect.on_one_host(&overlay);
        for _ in 0..20 {
            let flow = Flow { source_port: Some(random.of(&PORTS)), ..flow(&mut random) };
            let ends = [flow.source, flow.destination.ip()];
            if !ends.iter().any(|end| overlay.iter().any(|it: &IpNet| it.contains(end))) {
                continue;
            }
            let source = SocketAddr::new(flow.source, flow.source_port.unwrap());
            let allows = local.allows(&[LocalFlow { source, destination: flow.destination }]);
            match in_effect.verdict(flow) {
                Verdict::Allow(Shape { rate: None, .. }) => assert!(allows, "{flow:?} {in_effect:#?}"),
                Verdict::Unclear(_) => {}
                verdict => assert!(!allows, "{flow:?} {verdict:?} {in_effect:#?}"),
            }
            *(if allows { &mut shared } else { &mut kept_off }) += 1;
        }
    }
    assert!(shared > 500 && kept_off > 500, "{shared} {kept_off}");
}

#[test]
fn other_containers_change_what_a_new_policy_with_them_has() {
    let mut random = Random(0xfeed);
    for _ in 0..300 {
        let policy = Arc::new(policy(&mut random));
        let mut in_effect = InEffect::new(policy.clone(), Arc::new(workloads(&mut random)));
        for _ in 0..3 {
            let next = Arc::new(some_changed(&mut random, &in_effect.workloads));
            in_effect = in_effect.with(next.clone());
            let made = InEffect::new(policy.clone(), next);
            for _ in 0..20 {
                let flow = flow(&mut random);
                assert_eq!(in_effect.verdict(flow), made.verdict(flow));
                assert_eq!(in_effect.rules(flow), made.rules(flow));
            }
        }
    }
}

/// Returns containers of which about a third differs.
fn some_changed(random: &mut Random, former: &Workloads) -> Workloads {
    let changed = workloads(random);
    let mut kept = Workloads::new(vec!["10.50.0.0/16".parse().unwrap()], HashSet::new());
    for address in ADDRESSES.map(|it| it.parse().unwrap()) {
        let of = if random.one_in(3) { &changed } else { former };
        if let Identity::Known(workload) = of.of(address) {
            kept.add(address, Arc::new(workload.clone()));
        }
    }
    kept
}
