//! Translates a policy for connections between containers of one host
//! (docs/adr/0034-one-host-has-the-overlays-policy.md).

use std::ops::RangeInclusive;

use ipnet::IpNet;
use shunt_abi::local_policy::{self, LocalEnds, LocalPolicy, LocalRule, Prefix};

use super::resolved::Resolved;
use super::selector::Match;
use super::{Direction, Ends, InEffect, Ports, Rule, Shape, Verdict};

impl InEffect {
    /// Translates the policy. Connections may use shared memory if the policy allows them without a
    /// rate and without inspecting their packets. A traffic class does not matter here, since it
    /// applies to the host network.
    pub(crate) fn on_one_host(&self, overlay: &[IpNet]) -> LocalPolicy {
        let rules =
            |direction| self.policy.of_tcp(direction).flat_map(|(_, rule)| self.local(rule)).collect();
        LocalPolicy {
            version: local_policy::VERSION,
            prefixes: overlay.iter().copied().map(prefix).collect(),
            known: self.workloads.known().map(|(address, _)| prefix(address.into())).collect(),
            rules: rules(None),
            egress: rules(Some(Direction::Egress)),
            ingress: rules(Some(Direction::Ingress)),
            shared_by_default: is_shared(self.policy.default.verdict()),
        }
    }

    /// Translates a rule. Ports that have names become rules for each known pod, and one for all
    /// others, which it may match.
    fn local(&self, rule: &Rule) -> Vec<LocalRule> {
        let ends = |ends: &Option<Vec<Ends>>| ends.as_deref().map(|ends| self.ends(ends));
        let bounds = |it: &RangeInclusive<u16>| (*it.start(), *it.end());
        let whole = LocalRule {
            from: ends(&rule.from),
            to: ends(&rule.to),
            ports: None,
            source_ports: rule.source_ports.as_ref().map(|it| it.iter().map(bounds).collect()),
            shared: is_shared(rule.verdict()),
        };
        let Some(ports) = &rule.ports else { return vec![whole] };
        let mut numbers = Vec::new();
        let mut names = Vec::new();
        for it in ports {
            match it {
                Ports::Range(range) => numbers.push(bounds(range)),
                Ports::Named(name) => names.push(name),
            }
        }
        let mut rules = Vec::new();
        if !numbers.is_empty() {
            rules.push(LocalRule { ports: Some(numbers), ..whole.clone() });
        }
        if names.is_empty() {
            return rules;
        }
        for (address, workload) in self.workloads.known() {
            let ports = names.iter().filter_map(|name| workload.ports.get(*name)).flatten();
            let ports: Vec<_> = ports.map(|port| (*port, *port)).collect();
            let to = rule.to.as_ref().map(|to| to.iter().map(|it| it.has(address, &self.workloads)).max());
            let (prefixes, possible) = match to {
                None | Some(Some(Match::Yes)) => (vec![prefix(address.into())], Vec::new()),
                Some(Some(Match::Maybe)) => (Vec::new(), vec![prefix(address.into())]),
                Some(Some(Match::No) | None) => continue,
            };
            let to = Some(LocalEnds { prefixes, possible, unknown: false });
            rules.push(LocalRule { to, ports: Some(ports), ..whole.clone() });
        }
        let to = Some(LocalEnds { prefixes: Vec::new(), possible: Vec::new(), unknown: true });
        rules.push(LocalRule { to, ..whole });
        rules
    }

    fn ends(&self, ends: &[Ends]) -> LocalEnds {
        let Resolved { certain, possible, unknown } = self.resolve(ends);
        let prefixes = |nets: Vec<IpNet>| nets.into_iter().map(prefix).collect();
        LocalEnds { prefixes: prefixes(certain), possible: prefixes(possible), unknown }
    }
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
