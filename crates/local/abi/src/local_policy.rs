//! The connections between containers of one host that may take shared memory. The router of an
//! overlay publishes this policy in a file for the broker. The router has the whole policy; this is
//! the part that applies where no packets exist.
//!
//! The broker consults it for connections between network namespaces. It does not affect a
//! connection outside the overlay.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The version of the file. A broker that does not know it keeps connections between namespaces on
/// TCP.
pub const VERSION: u32 = 3;

/// The policy of an overlay. The first rule that matches a connection decides.
///
/// A rule that selects containers by their labels names a group. The router decides which containers
/// are in a group, so the broker needs no labels, and a container is listed once and not with each
/// rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalPolicy {
    /// [`VERSION`].
    pub version: u32,
    /// The addresses of the overlay.
    pub prefixes: Vec<Prefix>,
    /// The addresses of the host itself, which are no containers'.
    pub hosts: BTreeSet<IpAddr>,
    /// The containers that are known, by address. Any other one of the overlay may be in each group.
    pub known: BTreeMap<IpAddr, LocalContainer>,
    /// The rules, in their order.
    pub rules: Vec<LocalRule>,
    /// The rules for the client, if none of `rules` matches. Not for connections of the host, and of a
    /// container with itself.
    pub egress: Vec<LocalRule>,
    /// The rules for the server, likewise. Both have to permit shared memory.
    pub ingress: Vec<LocalRule>,
    /// Whether a connection that no rule matches may take shared memory.
    pub shared_by_default: bool,
}

/// What rules need to know about a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalContainer {
    /// The groups that it is in, in ascending order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<u32>,
    /// The other groups that it may be in, in ascending order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub possible: Vec<u32>,
    /// The ports with names that rules have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub ports: BTreeMap<String, Vec<u16>>,
}

/// A rule, without the parts that do not matter here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalRule {
    /// Addresses of the client. None: every address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<LocalEnds>,
    /// Addresses of the server. None: every address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<LocalEnds>,
    /// Ports of the server. None: every port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<LocalPorts>,
    /// Ports of the client, as ranges of first and last port. None: every port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_ports: Option<Vec<(u16, u16)>>,
    /// Whether the connections of this rule may take shared memory.
    pub shared: bool,
}

/// The addresses that a rule matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalEnds {
    /// The addresses with these prefixes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefixes: Vec<Prefix>,
    /// The containers in this group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
}

/// The ports that a rule matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalPorts {
    /// Ranges of first and last port.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<(u16, u16)>,
    /// The ports to which the server's container gives these names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
}

/// A connection, as one of its ends sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalFlow {
    /// The address of the end that called connect.
    pub source: SocketAddr,
    /// The address of the end that accepted.
    pub destination: SocketAddr,
}

/// Addresses that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Prefix {
    address: IpAddr,
    bits: u8,
}

impl LocalPolicy {
    /// Returns whether a connection may take shared memory. Its two ends may see different
    /// addresses; the policy must allow the connection as each end sees it.
    pub fn allows(&self, seen: &[LocalFlow]) -> bool {
        seen.iter().all(|flow| !self.covers(*flow) || self.shares(*flow))
    }

    /// Returns whether a connection belongs to the overlay.
    fn covers(&self, flow: LocalFlow) -> bool {
        [flow.source.ip(), flow.destination.ip()].into_iter().any(|end| self.is_on_overlay(end))
    }

    fn is_on_overlay(&self, address: IpAddr) -> bool {
        within(&self.prefixes, address)
    }

    /// Returns whether all rules that may decide agree to shared memory.
    fn shares(&self, flow: LocalFlow) -> bool {
        let ends = [self.end(flow.source), self.end(flow.destination)];
        match chain(&self.rules, ends) {
            Decided::Shared => true,
            Decided::NotShared => false,
            Decided::Open if ends.iter().any(|it| self.hosts.contains(&it.address)) => self.shared_by_default,
            Decided::Open if ends[0].address == ends[1].address => self.shared_by_default,
            Decided::Open => {
                [&self.egress, &self.ingress].into_iter().all(|rules| match chain(rules, ends) {
                    Decided::Shared => true,
                    Decided::NotShared => false,
                    Decided::Open => self.shared_by_default,
                })
            }
        }
    }

    fn end(&self, end: SocketAddr) -> End<'_> {
        let address = end.ip().to_canonical();
        let container = match self.known.get(&address) {
            _ if self.hosts.contains(&address) => Container::None,
            Some(known) => Container::Known(known),
            None if self.is_on_overlay(address) => Container::Unknown,
            None => Container::None,
        };
        End { address, port: end.port(), container }
    }
}

/// An end of a connection.
#[derive(Clone, Copy, Debug)]
struct End<'a> {
    address: IpAddr,
    port: u16,
    container: Container<'a>,
}

/// The container that has an address.
#[derive(Clone, Copy, Debug)]
enum Container<'a> {
    /// The address is the host's, or not one of the overlay's.
    None,
    Unknown,
    Known(&'a LocalContainer),
}

/// Returns the result of the first rule that matches. A rule that may match, and does not permit
/// shared memory, decides too.
fn chain(rules: &[LocalRule], ends: [End<'_>; 2]) -> Decided {
    for rule in rules {
        match (rule.matches(ends), rule.shared) {
            (Matches::No, _) | (Matches::Maybe, true) => {}
            (_, false) => return Decided::NotShared,
            (Matches::Yes, true) => return Decided::Shared,
        }
    }
    Decided::Open
}

impl LocalRule {
    fn matches(&self, [client, server]: [End<'_>; 2]) -> Matches {
        let ports = self.ports.as_ref().map_or(Matches::Yes, |ports| ports.have(server));
        let source_ports = self.source_ports.as_ref().is_none_or(|ports| has(ports, client.port));
        let ends = |ends: &Option<LocalEnds>, end| ends.as_ref().map_or(Matches::Yes, |it| it.have(end));
        // Most rules do not match, by the cheapest of their parts.
        match ports.min(Matches::of(source_ports)) {
            Matches::No => Matches::No,
            matches => matches.min(ends(&self.to, server)).min(ends(&self.from, client)),
        }
    }
}

impl LocalEnds {
    fn have(&self, end: End<'_>) -> Matches {
        let has = |groups: &[u32], group| groups.binary_search(group).is_ok();
        match (&self.group, end.container) {
            _ if within(&self.prefixes, end.address) => Matches::Yes,
            (None, _) | (Some(_), Container::None) => Matches::No,
            (Some(_), Container::Unknown) => Matches::Maybe,
            (Some(group), Container::Known(it)) if has(&it.groups, group) => Matches::Yes,
            (Some(group), Container::Known(it)) if has(&it.possible, group) => Matches::Maybe,
            (Some(_), Container::Known(_)) => Matches::No,
        }
    }
}

impl LocalPorts {
    fn have(&self, end: End<'_>) -> Matches {
        match end.container {
            _ if has(&self.numbers, end.port) => Matches::Yes,
            _ if self.names.is_empty() => Matches::No,
            Container::None => Matches::No,
            Container::Unknown => Matches::Maybe,
            Container::Known(it) => {
                let mut named = self.names.iter().filter_map(|name| it.ports.get(name)).flatten();
                Matches::of(named.any(|port| *port == end.port))
            }
        }
    }
}

fn has(ranges: &[(u16, u16)], port: u16) -> bool {
    ranges.iter().any(|(first, last)| (*first..=*last).contains(&port))
}

/// Does a rule match a connection?
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Matches {
    No,
    Maybe,
    Yes,
}

impl Matches {
    fn of(matches: bool) -> Matches {
        if matches { Matches::Yes } else { Matches::No }
    }
}

/// The result of a list of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decided {
    Shared,
    NotShared,
    /// Possibly none of the rules matches.
    Open,
}

fn within(prefixes: &[Prefix], address: IpAddr) -> bool {
    prefixes.iter().any(|prefix| prefix.contains(address))
}

impl Prefix {
    /// Returns the prefix of the first `bits` bits of `address`.
    pub fn new(address: IpAddr, bits: u8) -> Prefix {
        Prefix { address, bits }
    }

    /// Returns whether an address has this prefix. An IPv4-mapped address counts as IPv4.
    fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let differ = u32::from(own) ^ u32::from(other);
                differ.checked_shr(32 - u32::from(self.bits)).unwrap_or(0) == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let differ = u128::from(own) ^ u128::from(other);
                differ.checked_shr(128 - u32::from(self.bits)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Prefix, String> {
        let wrong = || format!("{text:?} is no prefix");
        let (address, bits) = text.split_once('/').ok_or_else(wrong)?;
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.parse().ok().filter(|bits| *bits <= most).ok_or_else(wrong)?;
        Ok(Prefix { address, bits })
    }
}

impl TryFrom<String> for Prefix {
    type Error = String;

    fn try_from(text: String) -> Result<Prefix, String> {
        text.parse()
    }
}

impl From<Prefix> for String {
    fn from(prefix: Prefix) -> String {
        prefix.to_string()
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(source: &str, destination: &str) -> LocalFlow {
        let source = SocketAddr::new(source.parse().unwrap(), 40_000);
        LocalFlow { source, destination: destination.parse().unwrap() }
    }

    fn prefixes(texts: &[&str]) -> Vec<Prefix> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn policy() -> LocalPolicy {
        let rule = |from: Option<&[&str]>, ports: Option<Vec<(u16, u16)>>, shared| LocalRule {
            from: from.map(|it| LocalEnds { prefixes: prefixes(it), group: None }),
            to: None,
            ports: ports.map(|numbers| LocalPorts { numbers, names: Vec::new() }),
            source_ports: None,
            shared,
        };
        LocalPolicy {
            version: VERSION,
            prefixes: prefixes(&["10.50.0.0/16", "fd00:50::/32"]),
            hosts: BTreeSet::new(),
            known: BTreeMap::new(),
            rules: vec![
                rule(Some(&["10.50.1.2/32"]), Some(vec![(80, 80), (6000, 6010)]), true),
                rule(Some(&["10.50.1.0/24", "fd00:50:1::/48"]), None, false),
            ],
            egress: Vec::new(),
            ingress: Vec::new(),
            shared_by_default: true,
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let policy = policy();
        let allows = |source, destination| policy.allows(&[flow(source, destination)]);
        assert!(allows("10.50.1.2", "10.50.1.9:80") && allows("10.50.1.2", "10.50.1.9:6005"));
        assert!(!allows("10.50.1.2", "10.50.1.9:81") && !allows("10.50.1.3", "10.50.1.9:80"));
        assert!(!allows("::ffff:10.50.1.3", "[::ffff:10.50.1.9]:80"));
        assert!(!allows("fd00:50:1::3", "[fd00:50:2::1]:80") && allows("fd00:50:2::1", "[fd00:50:1::3]:80"));
        assert!(allows("10.50.2.1", "10.50.1.3:80"), "by default");
        // Outside the overlay.
        let closed = LocalPolicy { rules: Vec::new(), shared_by_default: false, ..policy.clone() };
        assert!(closed.allows(&[flow("172.17.0.2", "172.17.0.3:80")]));
        assert!(!closed.allows(&[flow("172.17.0.2", "10.50.0.3:80")]));
    }

    #[test]
    fn both_ends_have_to_see_a_connection_that_may_be_shared() {
        // The addresses that one end sees are translated.
        let translated = [flow("10.50.2.1", "192.168.0.1:8080"), flow("10.50.1.1", "10.50.2.9:80")];
        assert!(!policy().allows(&translated) && policy().allows(&translated[..1]));
    }

    #[test]
    fn a_rule_with_a_group_matches_the_containers_in_it() {
        let group = Some(LocalEnds { prefixes: prefixes(&["10.50.9.0/24"]), group: Some(7) });
        let ports = LocalPorts { numbers: vec![(80, 80)], names: vec!["sql".to_owned()] };
        let rule = |shared| LocalRule {
            from: None,
            to: group.clone(),
            ports: Some(ports.clone()),
            source_ports: None,
            shared,
        };
        let container = |groups: &[u32], possible: &[u32]| LocalContainer {
            groups: groups.to_vec(),
            possible: possible.to_vec(),
            ports: [("sql".to_owned(), vec![5432])].into(),
        };
        let known = [
            ("10.50.1.1", container(&[1, 7, 9], &[])),
            ("10.50.1.2", container(&[9], &[])),
            ("10.50.1.3", container(&[], &[7])),
            ("10.50.9.1", container(&[], &[])),
        ];
        let known: BTreeMap<IpAddr, LocalContainer> =
            known.into_iter().map(|(address, it)| (address.parse().unwrap(), it)).collect();
        let with = |shared| LocalPolicy {
            known: known.clone(),
            rules: vec![rule(shared)],
            shared_by_default: !shared,
            ..policy()
        };
        let (permits, forbids) = (with(true), with(false));
        // Whether the rule matches for certain, and whether it may.
        for (destination, certain, possible) in [
            ("10.50.1.1:80", true, true),
            ("10.50.1.1:5432", true, true),
            ("10.50.1.1:81", false, false),
            ("[::ffff:10.50.1.1]:80", true, true),
            ("10.50.1.2:80", false, false),
            ("10.50.1.3:5432", false, true),
            ("10.50.1.4:80", false, true),
            ("10.50.1.4:81", false, true),
            ("10.50.9.1:5432", true, true),
            ("10.50.9.2:5432", false, true),
            ("203.0.113.9:80", false, false),
        ] {
            let flow = [flow("10.50.1.2", destination)];
            assert_eq!(permits.allows(&flow), certain, "{destination}");
            assert_eq!(forbids.allows(&flow), !possible, "{destination}");
        }
    }

    #[test]
    fn rules_with_a_direction_are_not_about_the_host_and_a_container_with_itself() {
        let of_all = |shared| LocalRule { from: None, to: None, ports: None, source_ports: None, shared };
        for by_default in [true, false] {
            let policy = LocalPolicy {
                hosts: ["10.50.1.1".parse().unwrap()].into(),
                rules: Vec::new(),
                egress: vec![of_all(!by_default)],
                ingress: vec![of_all(!by_default)],
                shared_by_default: by_default,
                ..policy()
            };
            let allows = |source, destination| policy.allows(&[flow(source, destination)]);
            assert_eq!(allows("10.50.1.1", "10.50.1.2:80"), by_default);
            assert_eq!(allows("10.50.1.2", "10.50.1.1:80"), by_default);
            assert_eq!(allows("10.50.1.2", "10.50.1.2:80"), by_default);
            assert_eq!(allows("10.50.1.2", "10.50.1.3:80"), !by_default);
        }
    }

    #[test]
    fn a_policy_is_the_same_in_the_file() {
        let ports = [("sql".to_owned(), vec![5432])].into();
        let known = LocalContainer { groups: vec![1], possible: vec![2], ports };
        let known = [("10.50.1.1", known), ("fd00:50::1", LocalContainer::default())];
        let known = known.map(|(address, it)| (address.parse().unwrap(), it)).into();
        let policy = LocalPolicy { known, ..policy() };
        let text = serde_json::to_string(&policy).unwrap();
        assert_eq!(serde_json::from_str::<LocalPolicy>(&text).unwrap(), policy);
        for wrong in ["10.50.0.0", "10.50.0.0/33", "fd00::/129", "x/8", "10.0.0.0/-1"] {
            assert!(wrong.parse::<Prefix>().is_err(), "{wrong}");
        }
        for all in prefixes(&["0.0.0.0/0", "::/0"]) {
            let inside = all.address.is_ipv4();
            assert_eq!(all.contains("203.0.113.9".parse().unwrap()), inside);
            assert_eq!(all.contains("2001:db8::1".parse().unwrap()), !inside);
        }
    }
}
