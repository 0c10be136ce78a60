//! Translates a policy for connections between containers of one host
//! (docs/adr/0034-one-host-has-the-overlays-policy.md).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use ipnet::IpNet;
use shunt_abi::local_policy::{self, LocalContainer, LocalEnds, LocalPolicy, LocalPorts, LocalRule, Prefix};

use super::index::Selected;
use super::resolved::without;
use super::{Direction, Ends, Except, InEffect, Ports, Rule, Selector, Shape, Verdict};
use crate::workloads::{Identity, Workload};

/// The groups of containers that rules select: one for each different list of selectors.
#[derive(Debug, Default)]
struct Groups<'a> {
    numbers: HashMap<Vec<&'a Selector>, u32>,
    /// The groups of `from` and of `to` of each rule of the policy.
    from: Vec<Option<u32>>,
    to: Vec<Option<u32>>,
}

impl InEffect {
    /// Translates the policy. Connections may use shared memory if the policy allows them without a
    /// rate and without inspecting their packets. A traffic class does not matter here, since it
    /// applies to the host network.
    pub(crate) fn on_one_host(&self, overlay: &[IpNet]) -> LocalPolicy {
        let groups = Groups::of(&self.policy.rules);
        let rules = |direction| {
            let all = self.policy.of_tcp(direction);
            all.map(|(at, rule)| local(rule, groups.from[at], groups.to[at])).collect()
        };
        LocalPolicy {
            version: local_policy::VERSION,
            prefixes: overlay.iter().copied().map(prefix).collect(),
            hosts: self.workloads.hosts().collect(),
            known: self.containers(&groups),
            rules: rules(None),
            egress: rules(Some(Direction::Egress)),
            ingress: rules(Some(Direction::Ingress)),
            shared_by_default: is_shared(self.policy.default.verdict()),
        }
    }

    /// Returns the known containers with their groups. Containers with the same labels are in the
    /// same groups.
    fn containers(&self, groups: &Groups<'_>) -> BTreeMap<IpAddr, LocalContainer> {
        let mut made: HashMap<*const Selected, LocalContainer> = HashMap::new();
        let names = self.policy.port_names();
        let container = |(address, selected): (IpAddr, &Arc<Selected>)| {
            let Identity::Known(workload) = self.workloads.of(address) else { return None };
            let container = made.entry(Arc::as_ptr(selected));
            let container = container.or_insert_with(|| {
                let [certain, possible] = self.groups_of(selected, groups);
                let possible = possible.difference(&certain).copied().collect();
                LocalContainer {
                    groups: certain.into_iter().collect(),
                    possible,
                    ports: named_ports(workload, &names),
                }
            });
            Some((address, container.clone()))
        };
        self.members.iter().filter_map(container).collect()
    }

    /// Returns the groups that a container is in, and those that it may be in.
    fn groups_of(&self, selected: &Selected, groups: &Groups<'_>) -> [BTreeSet<u32>; 2] {
        self.index.selected(selected).map(|rules| {
            let from = rules.from.into_iter().filter_map(|rule| groups.from[rule]);
            let to = rules.to.into_iter().filter_map(|rule| groups.to[rule]);
            from.chain(to).collect()
        })
    }
}

impl<'a> Groups<'a> {
    fn of(rules: &'a [Rule]) -> Groups<'a> {
        let mut groups = Groups::default();
        for rule in rules {
            let from = groups.number(rule.from.as_deref());
            groups.from.push(from);
            let to = groups.number(rule.to.as_deref());
            groups.to.push(to);
        }
        groups
    }

    /// Returns the group that the selectors among these entries make.
    fn number(&mut self, ends: Option<&'a [Ends]>) -> Option<u32> {
        let selectors = ends.into_iter().flatten().filter_map(|it| match it {
            Ends::Selected(selector) => Some(selector),
            Ends::Prefix(_) | Ends::Except(_) => None,
        });
        let selectors: Vec<&Selector> = selectors.collect();
        let next = self.numbers.len() as u32;
        (!selectors.is_empty()).then(|| *self.numbers.entry(selectors).or_insert(next))
    }
}

fn local(rule: &Rule, from: Option<u32>, to: Option<u32>) -> LocalRule {
    let bounds = |it: &RangeInclusive<u16>| (*it.start(), *it.end());
    LocalRule {
        from: rule.from.as_deref().map(|it| ends(it, from)),
        to: rule.to.as_deref().map(|it| ends(it, to)),
        ports: rule.ports.as_deref().map(ports),
        source_ports: rule.source_ports.as_ref().map(|it| it.iter().map(bounds).collect()),
        shared: is_shared(rule.verdict()),
    }
}

fn ends(ends: &[Ends], group: Option<u32>) -> LocalEnds {
    let prefixes = ends.iter().flat_map(|it| match it {
        Ends::Prefix(net) => vec![*net],
        Ends::Except(Except { prefix, except }) => without(*prefix, except),
        Ends::Selected(_) => Vec::new(),
    });
    LocalEnds { prefixes: prefixes.map(prefix).collect(), group }
}

fn ports(ports: &[Ports]) -> LocalPorts {
    let mut local = LocalPorts::default();
    for it in ports {
        match it {
            Ports::Range(range) => local.numbers.push((*range.start(), *range.end())),
            Ports::Named(name) => local.names.push(name.clone()),
        }
    }
    local
}

/// Returns the ports of a container to which it gives one of these names.
fn named_ports(workload: &Workload, names: &BTreeSet<&str>) -> BTreeMap<String, Vec<u16>> {
    let named = workload.ports.iter().filter(|(name, _)| names.contains(name.as_str()));
    named.map(|(name, ports)| (name.clone(), ports.iter().copied().collect())).collect()
}

fn is_shared(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Allow(Shape { rate: None, container_rate: None, .. }))
}

fn prefix(net: IpNet) -> Prefix {
    Prefix::new(net.addr(), net.prefix_len())
}

#[cfg(test)]
mod tests {
    use super::super::in_effect::tests::{flow, in_effect};
    use super::*;
    use shunt_abi::local_policy::LocalFlow;
    use std::net::SocketAddr;

    /// Returns whether a connection may use shared memory.
    fn allows(policy: &InEffect, source: &str, destination: &str) -> bool {
        let local = policy.on_one_host(&["10.50.0.0/16".parse().unwrap()]);
        let flow = flow(source, destination);
        let source = SocketAddr::new(flow.source, flow.source_port.unwrap());
        local.allows(&[LocalFlow { source, destination: flow.destination }])
    }

    #[test]
    fn only_what_nobody_is_to_see_or_slow_down_is_shared_on_one_host() {
        let policy = in_effect(
            "default = 'deny'\n[[rule]]\nname = 'a'\naction = 'overlay'\nfrom = ['10.50.1.1']\nports = ['80-90']\n\
             [[rule]]\nname = 'b'\naction = 'allow'\nto = ['10.50.1.0/24']\nrate = '1gbit'\n\
             [[rule]]\nname = 'c'\naction = 'allow'\nto = ['10.50.2.0/24']\ndscp = 'ef'\npriority = 3\n",
        );
        let allows = |source, destination| allows(&policy, source, destination);
        assert!(!allows("10.50.1.1", "10.50.2.2:80") && allows("10.50.1.1", "10.50.2.2:91"));
        assert!(!allows("10.50.1.3", "10.50.1.2:1") && !allows("10.50.1.3", "10.50.3.2:1"));
        let open = InEffect::open().on_one_host(&["10.50.0.0/16".parse().unwrap()]);
        assert!(open.shared_by_default && open.rules.is_empty());
    }

    /// Every pair of known and unknown containers uses shared memory exactly if the verdict is
    /// `allow` without a rate.
    #[test]
    fn what_is_shared_on_one_host_is_what_is_allowed_for_certain() {
        let policies = [
            "default = 'deny'\n[[rule]]\nname = 'a'\naction = 'allow'\nfrom = [{ labels = 'app=web' }]\n\
             to = [{ labels = 'app=db' }, '10.50.2.7']\n",
            "[[rule]]\nname = 'a'\naction = 'deny'\nto = [{ labels = 'app=db', namespace-labels = 'team=x' }]\n",
            "[[rule]]\nname = 'a'\naction = 'allow'\ndirection = 'ingress'\nfrom = [{ labels = 'app=web' }]\n\
             to = [{ labels = 'app=db' }]\n\
             [[rule]]\nname = 'b'\naction = 'deny'\ndirection = 'ingress'\nto = [{ labels = 'app=db' }]\n\
             [[rule]]\nname = 'c'\naction = 'deny'\ndirection = 'egress'\nfrom = [{ labels = 'app=other' }]\n",
            "[[rule]]\nname = 'a'\naction = 'deny'\nto = [{ labels = 'app!=other' }]\nports = ['sql', 81]\n",
            "default = 'deny'\n[[rule]]\nname = 'a'\naction = 'allow'\nto = [{ labels = 'app!=other' }]\nports = ['sql']\n",
            "[[rule]]\nname = 'a'\naction = 'deny'\nsource-ports = ['1-39999', '40001-65535']\n\
             [[rule]]\nname = 'b'\naction = 'allow'\n\
             from = [{ prefix = '10.50.0.0/16', except = ['10.50.2.0/24', '10.50.1.9'] }]\n\
             [[rule]]\nname = 'c'\naction = 'allow'\nrate = '1mbit'\nfrom = [{ labels = 'app' }]\n\
             [[rule]]\nname = 'd'\naction = 'deny'\nfrom = ['10.50.2.9', '10.50.1.9']\n",
        ];
        let addresses = ["10.50.1.2", "10.50.2.2", "10.50.2.3", "10.50.1.9", "10.50.2.9", "10.50.2.7"];
        for text in policies {
            let policy = in_effect(text);
            for (at, source) in addresses.iter().enumerate() {
                for destination in
                    addresses.iter().enumerate().filter_map(|(it, address)| (it != at).then_some(address))
                {
                    let destination = format!("{destination}:5432");
                    let verdict = policy.verdict(flow(source, &destination));
                    let shared = allows(&policy, source, &destination);
                    assert_eq!(shared, is_shared(verdict), "{text}{source} {destination} {verdict:?}");
                }
            }
        }
    }
}
