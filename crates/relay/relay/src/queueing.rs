//! The rules that pass SYNs to the relay before any other rule sees them: a chain that the mangle
//! table jumps to.
//!
//! iptables makes them, because not every kernel with netfilter queues lets nftables use one.
//! iptables works with both kinds of kernel.

use std::fmt::Write as _;

use ipnet::IpNet;

use crate::config::{Intercept, Mode, Route};
use crate::socket;
use crate::tool::{Tool, ToolError};

/// The installed rules. They are removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Queueing {
    intercept: Intercept,
}

impl Queueing {
    /// Installs the rules, and replaces any that exist.
    pub(crate) fn make(intercept: &Intercept, routes: &[Route]) -> Result<Queueing, ToolError> {
        remove();
        let queueing = Queueing { intercept: intercept.clone() };
        queueing.load(routes, "-I PREROUTING -j SHUNT-RELAY\n")?;
        Ok(queueing)
    }

    /// Replaces the routes, atomically for each address family.
    pub(crate) fn replace(&self, routes: &[Route]) -> Result<(), ToolError> {
        self.load(routes, "")
    }

    fn load(&self, routes: &[Route], jump: &str) -> Result<(), ToolError> {
        for family in families(socket::has_ipv6()) {
            family.restore.run(["--noflush"], &script(family, &self.intercept, routes, jump))?;
        }
        Ok(())
    }
}

impl Drop for Queueing {
    fn drop(&mut self) {
        remove();
    }
}

/// The commands for one address family.
struct Family {
    command: Tool,
    restore: Tool,
    has: fn(&IpNet) -> bool,
}

const PACKAGE: &str = "iptables";
static FAMILIES: [Family; 2] = [
    Family {
        command: Tool { program: "iptables", package: PACKAGE },
        restore: Tool { program: "iptables-restore", package: PACKAGE },
        has: |net| matches!(net, IpNet::V4(_)),
    },
    Family {
        command: Tool { program: "ip6tables", package: PACKAGE },
        restore: Tool { program: "ip6tables-restore", package: PACKAGE },
        has: |net| matches!(net, IpNet::V6(_)),
    },
];

/// Returns the families whose rules the kernel can have. ip6tables fails without IPv6 sockets.
fn families(has_ipv6: bool) -> &'static [Family] {
    if has_ipv6 { &FAMILIES } else { &FAMILIES[..1] }
}

/// Returns the script that replaces the content of the chain. The first rule that matches applies.
fn script(family: &Family, intercept: &Intercept, routes: &[Route], jump: &str) -> String {
    let mut text = "*mangle\n:SHUNT-RELAY - [0:0]\n".to_owned();
    let any = [String::new()];
    let interfaces: Vec<String> = intercept.interfaces.iter().map(|name| format!("-i {name} ")).collect();
    for route in routes {
        let ports: Vec<String> = route.ports.iter().map(|port| format!("--dport {port} ")).collect();
        let fate = match route.mode {
            Mode::Late => "RETURN".to_owned(),
            Mode::Early | Mode::Faithful => format!("NFQUEUE --queue-num {} --queue-bypass", intercept.queue),
        };
        for net in route.to.iter().filter(|net| (family.has)(net)) {
            for interface in if interfaces.is_empty() { &any[..] } else { &interfaces } {
                for port in if ports.is_empty() { &any[..] } else { &ports } {
                    let _ = writeln!(text, "-A SHUNT-RELAY {interface}-d {net} -p tcp --syn {port}-j {fate}");
                }
            }
        }
    }
    text + jump + "COMMIT\n"
}

/// Removes any rules that exist.
fn remove() {
    for Family { command, .. } in families(socket::has_ipv6()) {
        let table = |line: &str| command.run(["-t", "mangle"].into_iter().chain(line.split(' ')), "");
        while table("-D PREROUTING -j SHUNT-RELAY").is_ok() {}
        let _ = table("-F SHUNT-RELAY");
        let _ = table("-X SHUNT-RELAY");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Loaded;

    #[test]
    fn each_net_and_port_has_its_rule_in_the_order_of_the_routes() {
        let text = "name = 'a'\n[intercept]\ninterfaces = ['eth0']\n\
            [[route]]\nto = ['10.3.0.0/24', 'fd00:3::/64']\nports = [80, 443]\n\
            [[route]]\nto = ['10.0.0.0/8']\nmode = 'late'\n";
        let config = Loaded::parse(text).unwrap().config;
        let lines = |family: &Family| {
            let script = script(family, config.intercept.as_ref().unwrap(), &config.routes, "");
            script.lines().filter(|line| line.starts_with("-A")).map(str::to_owned).collect::<Vec<_>>()
        };
        let queue = "NFQUEUE --queue-num 7440 --queue-bypass";
        assert_eq!(
            lines(&FAMILIES[0]),
            [
                format!("-A SHUNT-RELAY -i eth0 -d 10.3.0.0/24 -p tcp --syn --dport 80 -j {queue}"),
                format!("-A SHUNT-RELAY -i eth0 -d 10.3.0.0/24 -p tcp --syn --dport 443 -j {queue}"),
                "-A SHUNT-RELAY -i eth0 -d 10.0.0.0/8 -p tcp --syn -j RETURN".to_owned(),
            ]
        );
        assert_eq!(lines(&FAMILIES[1]).len(), 2);
    }

    #[test]
    fn a_kernel_without_ipv6_gets_no_ipv6_rules() {
        let programs = |has_ipv6| families(has_ipv6).iter().map(|it| it.command.program).collect::<Vec<_>>();
        assert_eq!(programs(true), ["iptables", "ip6tables"]);
        assert_eq!(programs(false), ["iptables"]);
    }
}
