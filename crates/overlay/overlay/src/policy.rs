//! The policy: which connections of containers are permitted, and how they are treated. The first
//! rule that matches a connection decides; if none matches, the default does. `file` reads
//! policy.toml, and `shape` has the parameters that a rule sets in the host's kernel.

mod file;
mod shape;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use shunt_abi::local_policy::{self, LocalPolicy, LocalRule, Prefix};
use shunt_sys::Errno;

pub(crate) use shape::Shape;

/// A policy. Its parts are consistent, because it comes from a file that was checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Policy {
    default: Default,
    rules: Vec<Rule>,
}

/// The treatment of a connection that no rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Default {
    Allow,
    Deny,
    Drop,
}

/// The treatment of a connection that a rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Action {
    Allow,
    Deny,
    Drop,
    Overlay,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Rule {
    name: String,
    action: Action,
    /// `None` matches every container.
    from: Option<Vec<IpNet>>,
    to: Option<Vec<IpNet>>,
    /// The accepting container's ports. `None` matches every port.
    ports: Option<Vec<Ports>>,
    shape: Shape,
}

/// A range of ports, with both ends included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Ports(RangeInclusive<u16>);

/// A connection, as the policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    /// The address of the connecting container.
    pub(crate) source: IpAddr,
    /// The address and port that it connects to.
    pub(crate) destination: SocketAddr,
}

/// The policy's decision about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The connection is permitted, with this shape.
    Allow(Shape),
    /// The connection is permitted, but must stay on the overlay, where its packets can be
    /// inspected.
    Overlay,
    /// The connection is denied.
    Deny(Denial),
}

/// The way in which a program learns that a connection is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Denial {
    /// As from a host that refuses the connection.
    Refused,
    /// As from a network that drops the packets.
    TimedOut,
}

impl Denial {
    /// Returns the error of connect.
    pub(crate) fn error(self) -> Errno {
        match self {
            Denial::Refused => Errno::CONNREFUSED,
            Denial::TimedOut => Errno::TIMEDOUT,
        }
    }
}

impl Policy {
    /// Returns the policy of a router without a policy file: everything is permitted.
    pub(crate) fn open() -> Policy {
        Policy { default: Default::Allow, rules: Vec::new() }
    }

    pub(crate) fn verdict(&self, flow: Flow) -> Verdict {
        match self.rule(flow).map(|at| &self.rules[at]) {
            None => self.default.verdict(),
            Some(rule) => rule.verdict(),
        }
    }

    /// Returns the index of the rule that decides. `None` is the default.
    pub(crate) fn rule(&self, flow: Flow) -> Option<usize> {
        self.rules.iter().position(|rule| rule.matches(flow))
    }

    /// Translates the policy for connections between containers of this host. They may use shared
    /// memory if the policy allows them without a rate and without inspecting their packets. A
    /// traffic class does not matter here, since it applies to the host network.
    pub(crate) fn on_one_host(&self, overlay: &[IpNet]) -> LocalPolicy {
        let shared = |verdict| matches!(verdict, Verdict::Allow(Shape { rate: None, .. }));
        let rule = |rule: &Rule| LocalRule {
            from: rule.from.as_deref().map(prefixes),
            to: rule.to.as_deref().map(prefixes),
            ports: rule
                .ports
                .as_deref()
                .map(|ports| ports.iter().map(|Ports(it)| (*it.start(), *it.end())).collect()),
            shared: shared(rule.verdict()),
        };
        LocalPolicy {
            version: local_policy::VERSION,
            prefixes: prefixes(overlay),
            rules: self.rules.iter().map(rule).collect(),
            shared_by_default: shared(self.default.verdict()),
        }
    }

    pub(crate) fn rules(&self) -> usize {
        self.rules.len()
    }

    /// Returns the names of the rules, in their order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().map(|rule| rule.name.as_str())
    }
}

fn prefixes(nets: &[IpNet]) -> Vec<Prefix> {
    nets.iter().map(|net| Prefix::new(net.addr(), net.prefix_len())).collect()
}

impl Default {
    fn verdict(self) -> Verdict {
        match self {
            Default::Allow => Verdict::Allow(Shape::default()),
            Default::Deny => Verdict::Deny(Denial::Refused),
            Default::Drop => Verdict::Deny(Denial::TimedOut),
        }
    }
}

impl Rule {
    fn verdict(&self) -> Verdict {
        match self.action {
            Action::Allow => Verdict::Allow(self.shape),
            Action::Overlay => Verdict::Overlay,
            Action::Deny => Verdict::Deny(Denial::Refused),
            Action::Drop => Verdict::Deny(Denial::TimedOut),
        }
    }

    fn matches(&self, flow: Flow) -> bool {
        let within = |prefixes: &Option<Vec<IpNet>>, address: &IpAddr| {
            prefixes.as_ref().is_none_or(|prefixes| prefixes.iter().any(|prefix| prefix.contains(address)))
        };
        let port = flow.destination.port();
        within(&self.from, &flow.source)
            && within(&self.to, &flow.destination.ip())
            && self.ports.as_ref().is_none_or(|ports| ports.iter().any(|Ports(range)| range.contains(&port)))
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.start(), self.0.end()) {
            (first, last) if first == last => write!(f, "{first}"),
            (first, last) => write!(f, "{first}-{last}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn flow(source: &str, destination: &str) -> Flow {
        Flow { source: source.parse().unwrap(), destination: destination.parse().unwrap() }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let policy = Policy::parse(
            "f".as_ref(),
            "default = 'drop'\n[labels]\nweb = ['10.50.1.0/30', '10.50.3.7', 'fd00:50:7::/48']\n\
             [[rule]]\nname = 'admin'\naction = 'allow'\nfrom = ['10.50.1.1']\nports = [22]\n\
             [[rule]]\nname = 'ssh'\naction = 'deny'\nports = [22, '2200-2299']\n\
             [[rule]]\nname = 'inspected'\naction = 'overlay'\nto = ['10.50.9.0/24', 'fd00:50:9::2']\n\
             [[rule]]\nname = 'web'\naction = 'allow'\nfrom = ['web']\nrate = '8mbit'\n",
        )
        .unwrap();
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
        assert_eq!(policy.rule(flow("10.50.1.4", "10.50.2.2:80")), None);
        assert_eq!(Policy::open().verdict(flow("1.2.3.4", "5.6.7.8:9")), Verdict::Allow(Shape::default()));
    }

    #[test]
    fn only_what_nobody_is_to_see_or_slow_down_is_shared_on_one_host() {
        let policy = Policy::parse(
            "f".as_ref(),
            "default = 'deny'\n[[rule]]\nname = 'a'\naction = 'overlay'\nfrom = ['10.50.1.1']\nports = ['80-90']\n\
             [[rule]]\nname = 'b'\naction = 'allow'\nto = ['10.50.1.0/24']\nrate = '1gbit'\n\
             [[rule]]\nname = 'c'\naction = 'allow'\nto = ['10.50.2.0/24']\ndscp = 'ef'\npriority = 3\n",
        )
        .unwrap();
        let local = policy.on_one_host(&["10.50.0.0/16".parse().unwrap()]);
        let allows = |source: &str, destination: &str| {
            let Flow { source, destination } = flow(source, destination);
            local.allows(&[local_policy::LocalFlow { source, destination }])
        };
        assert!(!allows("10.50.1.1", "10.50.2.2:80") && allows("10.50.1.1", "10.50.2.2:91"));
        assert!(!allows("10.50.1.3", "10.50.1.2:1") && !allows("10.50.1.3", "10.50.3.2:1"));
        let open = Policy::open().on_one_host(&["10.50.0.0/16".parse().unwrap()]);
        assert!(open.shared_by_default && open.rules.is_empty());
    }

    #[test]
    fn a_policy_is_the_same_at_the_other_end_of_the_control_socket() {
        let policy = Policy::parse(
            "f".as_ref(),
            "[[rule]]\nname = 'a'\naction = 'allow'\nto = ['10.50.0.0/16']\nports = ['1-9']\n\
             rate = '1gbit'\ndscp = 'ef'\npriority = '1:20'\n",
        )
        .unwrap();
        let line = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<Policy>(&line).unwrap(), policy);
    }
}
