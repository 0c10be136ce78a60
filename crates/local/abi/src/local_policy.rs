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
pub const VERSION: u32 = 1;

/// The policy of an overlay. The first rule that matches a connection decides.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalPolicy {
    /// [`VERSION`].
    pub version: u32,
    /// The addresses of the overlay.
    pub prefixes: Vec<Prefix>,
    /// The rules, in their order.
    pub rules: Vec<LocalRule>,
    /// Whether a connection that no rule matches may take shared memory.
    pub shared_by_default: bool,
}

/// A rule, without the parts that do not matter here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct LocalRule {
    /// Addresses of the client. None: every address.
    pub from: Option<Vec<Prefix>>,
    /// Addresses of the server. None: every address.
    pub to: Option<Vec<Prefix>>,
    /// Ports of the server, as ranges of first and last port. None: every port.
    pub ports: Option<Vec<(u16, u16)>>,
    /// Whether the connections of this rule may take shared memory.
    pub shared: bool,
}

/// A connection, as one of its ends sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalFlow {
    /// The address of the end that called connect.
    pub source: IpAddr,
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
        let ends = [flow.source, flow.destination.ip()];
        self.prefixes.iter().any(|prefix| ends.iter().any(|end| prefix.contains(*end)))
    }

    fn shares(&self, flow: LocalFlow) -> bool {
        let rule = self.rules.iter().find(|rule| rule.matches(flow));
        rule.map_or(self.shared_by_default, |rule| rule.shared)
    }
}

impl LocalRule {
    fn matches(&self, flow: LocalFlow) -> bool {
        let within = |prefixes: &Option<Vec<Prefix>>, address: IpAddr| {
            prefixes.as_ref().is_none_or(|prefixes| prefixes.iter().any(|prefix| prefix.contains(address)))
        };
        let port = flow.destination.port();
        within(&self.from, flow.source)
            && within(&self.to, flow.destination.ip())
            && self
                .ports
                .as_ref()
                .is_none_or(|ports| ports.iter().any(|(first, last)| (*first..=*last).contains(&port)))
    }
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
        LocalFlow { source: source.parse().unwrap(), destination: destination.parse().unwrap() }
    }

    fn prefixes(texts: &[&str]) -> Vec<Prefix> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn policy() -> LocalPolicy {
        let rule = |from: Option<&[&str]>, ports, shared| LocalRule {
            from: from.map(prefixes),
            to: None,
            ports,
            shared,
        };
        LocalPolicy {
            version: VERSION,
            prefixes: prefixes(&["10.50.0.0/16", "fd00:50::/32"]),
            rules: vec![
                rule(Some(&["10.50.1.2/32"]), Some(vec![(80, 80), (6000, 6010)]), true),
                rule(Some(&["10.50.1.0/24", "fd00:50:1::/48"]), None, false),
            ],
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
