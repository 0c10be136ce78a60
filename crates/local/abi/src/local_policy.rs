//! The connections between containers of one host that may take shared memory. The router of an
//! overlay publishes this policy in a file for the broker. The router has the whole policy; this is
//! the part that applies where no packets exist.
//!
//! The broker consults it for connections between network namespaces. It does not affect a
//! connection outside the overlay.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The version of the file. A broker that does not know it keeps connections between namespaces on
/// TCP.
pub const VERSION: u32 = 2;

/// The policy of an overlay. The first rule that matches a connection decides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalPolicy {
    /// [`VERSION`].
    pub version: u32,
    /// The addresses of the overlay.
    pub prefixes: Vec<Prefix>,
    /// The addresses whose containers are known. A rule by labels may concern any other one.
    pub known: Vec<Prefix>,
    /// The rules, in their order.
    pub rules: Vec<LocalRule>,
    /// The rules for the client, if none of `rules` matches.
    pub egress: Vec<LocalRule>,
    /// The rules for the server, likewise. Both have to permit shared memory.
    pub ingress: Vec<LocalRule>,
    /// Whether a connection that no rule matches may take shared memory.
    pub shared_by_default: bool,
}

/// A rule, without the parts that do not matter here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalRule {
    /// Addresses of the client. None: every address.
    pub from: Option<LocalEnds>,
    /// Addresses of the server. None: every address.
    pub to: Option<LocalEnds>,
    /// Ports of the server, as ranges of first and last port. None: every port.
    pub ports: Option<Vec<(u16, u16)>>,
    /// Ports of the client. None: every port.
    pub source_ports: Option<Vec<(u16, u16)>>,
    /// Whether the connections of this rule may take shared memory.
    pub shared: bool,
}

/// The addresses that a rule matches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalEnds {
    /// Those that it matches.
    pub prefixes: Vec<Prefix>,
    /// Known ones that it may match.
    pub possible: Vec<Prefix>,
    /// It may match all addresses of the overlay whose containers are not known.
    pub unknown: bool,
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
        match self.chain(&self.rules, flow) {
            Decided::Shared => true,
            Decided::NotShared => false,
            Decided::Open => {
                [&self.egress, &self.ingress].into_iter().all(|rules| match self.chain(rules, flow) {
                    Decided::Shared => true,
                    Decided::NotShared => false,
                    Decided::Open => self.shared_by_default,
                })
            }
        }
    }

    /// Returns the result of the first rule that matches. A rule that may match, and does not permit
    /// shared memory, decides too.
    fn chain(&self, rules: &[LocalRule], flow: LocalFlow) -> Decided {
        for rule in rules {
            match (self.matches(rule, flow), rule.shared) {
                (Matches::No, _) | (Matches::Maybe, true) => {}
                (_, false) => return Decided::NotShared,
                (Matches::Yes, true) => return Decided::Shared,
            }
        }
        Decided::Open
    }

    fn matches(&self, rule: &LocalRule, flow: LocalFlow) -> Matches {
        let has = |ports: &Option<Vec<(u16, u16)>>, port| {
            let within =
                |ports: &Vec<(u16, u16)>| ports.iter().any(|(first, last)| (*first..=*last).contains(&port));
            match ports.as_ref().is_none_or(within) {
                true => Matches::Yes,
                false => Matches::No,
            }
        };
        let ends = |ends: &Option<LocalEnds>, address| match ends {
            None => Matches::Yes,
            Some(ends) if within(&ends.prefixes, address) => Matches::Yes,
            Some(ends) if within(&ends.possible, address) || ends.unknown && self.is_unknown(address) => {
                Matches::Maybe
            }
            Some(_) => Matches::No,
        };
        has(&rule.ports, flow.destination.port())
            .min(has(&rule.source_ports, flow.source.port()))
            .min(ends(&rule.from, flow.source.ip()))
            .min(ends(&rule.to, flow.destination.ip()))
    }

    fn is_unknown(&self, address: IpAddr) -> bool {
        self.is_on_overlay(address) && !within(&self.known, address)
    }
}

/// Does a rule match a connection?
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Matches {
    No,
    Maybe,
    Yes,
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
        let rule = |from: Option<&[&str]>, ports, shared| LocalRule {
            from: from.map(|it| LocalEnds { prefixes: prefixes(it), possible: Vec::new(), unknown: false }),
            to: None,
            ports,
            source_ports: None,
            shared,
        };
        LocalPolicy {
            version: VERSION,
            prefixes: prefixes(&["10.50.0.0/16", "fd00:50::/32"]),
            known: Vec::new(),
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
    fn a_policy_is_the_same_in_the_file() {
        let text = serde_json::to_string(&policy()).unwrap();
        assert_eq!(serde_json::from_str::<LocalPolicy>(&text).unwrap(), policy());
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
