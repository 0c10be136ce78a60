//! The rules that divert packets of intercepted connections to the relay: a netfilter table and a
//! routing rule.
//!
//! ```text
//! prerouting, mangle - 1   divert      sets `Mark::Divert` on packets of the relay's sockets
//! prerouting, mangle       queueing    passes SYNs to the relay (`crate::queueing`), which may
//!                                      set `Mark::Refused` or `Mark::Unreachable`
//! prerouting, mangle + 1   intercept   rejects packets with those two marks;
//!                                      diverts packets for a route's targets to the relay's port
//! routing                  the rule for `Mark::Divert` delivers the packet to this host
//! ```
//!
//! The rules are made and removed as a whole. The next relay replaces the rules of a relay that was
//! killed. Until then, new connections bypass the rules, because no socket listens at the port.

use std::fmt::Write as _;

use ipnet::IpNet;

use crate::config::{Config, Intercept, Mode, Route};
use crate::queueing::Queueing;
use crate::tool::{Tool, ToolError};

/// The mark of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The packet belongs to a socket of this host, whatever its destination is.
    Divert,
    /// The packet is answered with a reset: the target has refused.
    Refused,
    /// The packet is answered with an ICMP error: the target cannot be reached.
    Unreachable,
}

impl Mark {
    /// Returns the number of this mark. `first` is the first of the three that the configuration
    /// assigns.
    pub(crate) fn of(self, first: u32) -> u32 {
        first + self as u32
    }
}

/// The installed rules. They are removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Rules {
    intercept: Intercept,
    /// Present if a route needs the SYNs.
    queueing: Option<Queueing>,
}

impl Rules {
    /// Installs the rules, and replaces any that exist.
    pub(crate) fn make(intercept: &Intercept, config: &Config) -> Result<Rules, ToolError> {
        remove_routing(intercept);
        let mut rules = Rules { intercept: intercept.clone(), queueing: None };
        rules.replace(config)?;
        // The routing rules cover both address families, whatever the routes are. A relay that uses
        // clients' addresses needs them without having any route.
        for family in FAMILIES.into_iter().filter(|family| has(family)) {
            let Intercept { mark, table, .. } = intercept;
            ip(family, &format!("rule add fwmark {mark} lookup {table}"))?;
            ip(family, &format!("route replace local default dev lo table {table}"))?;
        }
        Ok(rules)
    }

    /// Replaces the routes: first, atomically, the table that diverts, and then the rules that pass
    /// SYNs to the relay.
    pub(crate) fn replace(&mut self, config: &Config) -> Result<(), ToolError> {
        NFT.run(["-f", "-"], &table(&self.intercept, &config.routes))?;
        let is_early = config.routes.iter().any(|route| route.mode != Mode::Late);
        self.queueing = match self.queueing.take().filter(|_| is_early) {
            Some(queueing) => {
                queueing.replace(&config.routes)?;
                Some(queueing)
            }
            None if is_early => Some(Queueing::make(&self.intercept, &config.routes)?),
            None => None,
        };
        Ok(())
    }

    pub(crate) fn intercept(&self) -> &Intercept {
        &self.intercept
    }
}

impl Drop for Rules {
    fn drop(&mut self) {
        if let Err(error) = NFT.run(["-f", "-"], GONE) {
            tracing::warn!(%error, "the netfilter table stays");
        }
        remove_routing(&self.intercept);
    }
}

const NFT: Tool = Tool { program: "nft", package: "nftables" };
const IP: Tool = Tool { program: "ip", package: "iproute2" };
const FAMILIES: [&str; 2] = ["-4", "-6"];
/// Deletes the table. The first line creates it, so that the second does not fail if there is none.
const GONE: &str = "table inet shunt_relay\ndelete table inet shunt_relay\n";
const SYN: &str = "tcp flags & (fin | syn | rst | ack) == syn";

/// Returns the whole table, in nft's language.
fn table(intercept: &Intercept, routes: &[Route]) -> String {
    let Intercept { port, mark, .. } = intercept;
    let [mark, refused, unreachable] =
        [Mark::Divert, Mark::Refused, Mark::Unreachable].map(|it| it.of(*mark));
    let mut text = format!("{GONE}table inet shunt_relay {{\n");
    // Packets of the relay's connections. A SYN is excluded, because it may start the next
    // connection with the same addresses.
    text += &format!(
        "chain divert {{ type filter hook prerouting priority mangle - 1; policy accept;\n\
         {SYN} return\n\
         meta l4proto tcp socket transparent 1 meta mark set {mark} accept\n}}\n"
    );
    // This chain comes after the mangle table, in which SYNs are passed to the relay and may get a
    // mark.
    text += &format!(
        "chain intercept {{ type filter hook prerouting priority mangle + 1; policy accept;\n\
         meta mark {refused} meta l4proto tcp reject with tcp reset\n\
         meta mark {unreachable} reject with icmpx type host-unreachable\n"
    );
    for (matching, family) in matches(intercept, routes) {
        let _ = writeln!(text, "{matching} tproxy {family} to :{port} meta mark set {mark} accept");
    }
    text += "}\n}\n";
    text
}

/// Returns a match for each route's targets, in the order of the routes, with nft's name of the
/// address family.
fn matches<'a>(
    intercept: &'a Intercept,
    routes: &'a [Route],
) -> impl Iterator<Item = (String, &'static str)> + 'a {
    let interfaces = match &intercept.interfaces[..] {
        [] => String::new(),
        names => format!("iifname {{ {} }} ", quoted(names)),
    };
    routes.iter().flat_map(move |route| {
        let ports = match &route.ports[..] {
            [] => String::new(),
            ports => format!("tcp dport {{ {} }} ", listed(ports)),
        };
        let interfaces = interfaces.clone();
        [("ip", true), ("ip6", false)].into_iter().filter_map(move |(family, four)| {
            let nets: Vec<&IpNet> =
                route.to.iter().filter(|net| matches!(net, IpNet::V4(_)) == four).collect();
            let list = listed(&nets);
            let matching = format!("{interfaces}{family} daddr {{ {list} }} {ports}{SYN}");
            (!nets.is_empty()).then_some((matching, family))
        })
    })
}

fn listed<T: ToString>(all: &[T]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn quoted(names: &[String]) -> String {
    listed(&names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>())
}

fn ip(family: &str, line: &str) -> Result<(), ToolError> {
    IP.run([family].into_iter().chain(line.split(' ')), "")
}

/// Returns whether this host uses the address family. Many hosts have IPv6 disabled, and then IPv6
/// routes cannot be added.
fn has(family: &str) -> bool {
    let is_disabled = || {
        let value = std::fs::read_to_string("/proc/sys/net/ipv6/conf/lo/disable_ipv6");
        // Without the file, the kernel was built or started without IPv6.
        value.map_or(true, |value| value.trim() != "0")
    };
    family != "-6" || !is_disabled()
}

/// Removes the routing rules. A rule may exist several times.
fn remove_routing(Intercept { mark, table, .. }: &Intercept) {
    for family in FAMILIES {
        while ip(family, &format!("rule del fwmark {mark} lookup {table}")).is_ok() {}
        let _ = ip(family, &format!("route flush table {table}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Loaded;

    #[test]
    fn each_route_has_its_rules_by_family_and_in_order() {
        let text = "name = 'a'\n[intercept]\ninterfaces = ['eth0', 'eth1']\n\
            [[route]]\nto = ['10.3.0.0/24', 'fd00:3::/64']\nports = [80, 443]\n\
            [[route]]\nto = ['10.0.0.0/8']\nmode = 'late'\n";
        let config = Loaded::parse(text).unwrap().config;
        let table = table(config.intercept.as_ref().unwrap(), &config.routes);
        let first = format!(
            "iifname {{ \"eth0\", \"eth1\" }} ip daddr {{ 10.3.0.0/24 }} tcp dport {{ 80, 443 }} {SYN}"
        );
        assert!(
            table.contains(&format!("{first} tproxy ip to :7441 meta mark set 7440 accept\n")),
            "{table}"
        );
        assert!(table.contains("ip6 daddr { fd00:3::/64 } tcp dport"), "{table}");
        assert!(table.find("10.3.0.0").unwrap() < table.find("10.0.0.0/8").unwrap());
    }
}
