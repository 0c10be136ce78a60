//! The policy: which connections of containers are permitted, and how they are treated. `file` reads
//! policy.toml, and `selector` selects containers by labels. `in_effect` decides about connections: it
//! looks the rules up in `index`, and `members` has those that select each container. `shape` has the
//! parameters that a rule sets in the host's kernel. `local` and `udp` translate the rules for the
//! broker and for the kernel, by the addresses that `resolved` finds.
//!
//! ```text
//! rules without a direction ── one matches ──────────────────────────► it decides
//!            │ none matches
//!            ├──► rules for egress:  the first that matches, or default ──┐
//!            └──► rules for ingress: the first that matches, or default ──┴► the stricter decides
//! ```

mod file;
mod in_effect;
mod index;
mod local;
mod members;
#[cfg(test)]
mod plain;
mod resolved;
mod selector;
mod shape;
mod udp;

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use shunt_sys::Errno;

#[cfg(test)]
use in_effect::stricter;
pub(crate) use in_effect::{Deciding, InEffect};
pub(crate) use selector::{Requirement, Requirements, Selector, Test};
pub(crate) use shape::Shape;
pub(crate) use udp::{UdpRule, UdpVerdict};

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
    #[serde(default)]
    protocol: Protocol,
    /// `None`: the rule comes before those with a direction, and decides alone.
    #[serde(default)]
    direction: Option<Direction>,
    /// `None` matches every address.
    from: Option<Vec<Ends>>,
    to: Option<Vec<Ends>>,
    /// The accepting container's ports. `None` matches every port.
    ports: Option<Vec<Ports>>,
    /// The connecting container's ports.
    #[serde(default)]
    source_ports: Option<Vec<RangeInclusive<u16>>>,
    shape: Shape,
}

/// The protocol of a rule. Rules for UDP are the kernel's ([`crate::udp`]).
#[derive(Clone, Copy, Debug, std::default::Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Protocol {
    #[default]
    Tcp,
    Udp,
}

/// The end of a connection for which a rule decides. Both have to permit it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Direction {
    /// The connecting container may connect there.
    Egress,
    /// The accepting container may be connected to.
    Ingress,
}

/// An entry of `from` or `to`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Ends {
    Prefix(IpNet),
    Except(Except),
    Selected(Selector),
}

/// The addresses of a prefix, without those of others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Except {
    prefix: IpNet,
    except: Vec<IpNet>,
}

/// An entry of `ports`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Ports {
    /// With both ends included.
    Range(RangeInclusive<u16>),
    /// The ports to which the accepting pod gives this name.
    Named(String),
}

/// A connection, as the policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    /// The address of the connecting container.
    pub(crate) source: IpAddr,
    /// Its port. `None` before the connection exists.
    pub(crate) source_port: Option<u16>,
    /// The address and port that it connects to.
    pub(crate) destination: SocketAddr,
}

impl Flow {
    /// Returns the connection between these ends.
    pub(crate) fn of(client: SocketAddr, server: SocketAddr) -> Flow {
        Flow { source: client.ip(), source_port: Some(client.port()), destination: server }
    }
}

/// The policy's decision about a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// The connection is permitted, with this shape.
    Allow(Shape),
    /// The connection is permitted, but must stay on the overlay, where its packets can be
    /// inspected.
    Overlay,
    /// The connection is denied.
    Deny(Denial),
    /// The rules differ in what they say, depending on something that is not known.
    Unclear(Doubt),
}

/// What a verdict depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Doubt {
    /// The labels of a container, which no source has named.
    Labels,
    /// The port of the connecting container, which does not have one yet.
    SourcePort,
}

/// The way in which a program learns that a connection is denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

    /// Returns a policy that keeps everything on the overlay, by a rule of that name.
    pub(crate) fn overlay(name: &str) -> Policy {
        let rule = Rule {
            name: name.to_owned(),
            action: Action::Overlay,
            protocol: Protocol::Tcp,
            direction: None,
            from: None,
            to: None,
            ports: None,
            source_ports: None,
            shape: Shape::default(),
        };
        Policy { default: Default::Allow, rules: vec![rule] }
    }

    /// Returns this policy with the rules of another one after its own.
    pub(crate) fn with(&self, other: &Policy) -> Policy {
        Policy { default: self.default, rules: [self.rules.as_slice(), &other.rules].concat() }
    }

    /// Returns `true` if a rule selects containers by their labels.
    fn uses_labels(&self) -> bool {
        let selects =
            |ends: &Option<Vec<Ends>>| ends.iter().flatten().any(|it| matches!(it, Ends::Selected(_)));
        let names = |rule: &Rule| rule.ports.iter().flatten().any(|it| matches!(it, Ports::Named(_)));
        self.rules.iter().any(|rule| selects(&rule.from) || selects(&rule.to) || names(rule))
    }

    /// Returns the names of ports that rules have.
    fn port_names(&self) -> BTreeSet<&str> {
        let ports = self.rules.iter().filter_map(|rule| rule.ports.as_ref()).flatten();
        let names = ports.filter_map(|it| match it {
            Ports::Named(name) => Some(name.as_str()),
            Ports::Range(_) => None,
        });
        names.collect()
    }

    /// Returns the rules for TCP with this direction, each with its position among all rules.
    fn of_tcp(&self, direction: Option<Direction>) -> impl Iterator<Item = (usize, &Rule)> {
        let is_wanted = move |rule: &Rule| rule.protocol == Protocol::Tcp && rule.direction == direction;
        self.rules.iter().enumerate().filter(move |(_, rule)| is_wanted(rule))
    }

    /// Returns the names of the rules that keep connections of this host's containers with each other
    /// off shared memory, although they permit them.
    pub(crate) fn off_shared_memory(&self) -> Vec<&str> {
        let is_kept_off = |rule: &&Rule| match rule.verdict() {
            Verdict::Allow(shape) => {
                rule.protocol == Protocol::Tcp && (shape.rate.is_some() || shape.container_rate.is_some())
            }
            verdict => verdict == Verdict::Overlay,
        };
        self.rules.iter().filter(is_kept_off).map(|rule| rule.name.as_str()).collect()
    }

    /// Returns `true` if a rule limits all connections of a container together.
    pub(crate) fn limits_containers(&self) -> bool {
        self.rules.iter().any(|rule| rule.shape.container_rate.is_some())
    }

    pub(crate) fn rules(&self) -> usize {
        self.rules.len()
    }

    /// Returns the names of the rules, in their order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.rules.iter().map(|rule| rule.name.as_str())
    }
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
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ports::Named(name) => write!(f, "{name}"),
            Ports::Range(it) if it.start() == it.end() => write!(f, "{}", it.start()),
            Ports::Range(it) => write!(f, "{}-{}", it.start(), it.end()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
