//! Service addresses: those that stand for containers, one of which this host's kernel chooses when
//! a connection's first segment (SYN) passes netfilter, as kube-proxy has it do.
//!
//! So the client's router knows the container only after the program's connect has begun, and its
//! Ask follows the SYN:
//!
//! ```text
//! supervisor        router                    kernel                    server's router
//!   Connect ────────► a service's address
//!           ◄─ Start ─┤
//!   overlay SYN ──────┼──────────────────────► translated, tracked ─────► the listening socket
//!   Started ────────► │ which container? ────► 10.50.2.2:9000
//!                     ├─── Ask, follows ───────────────────────────────► yes
//! ```
//!
//! `follows` has what the server's router does with an Ask that comes after the connection.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use shunt_sys::Errno;
use shunt_sys::conntrack::{self, Translated};

use crate::config::prefixes;
use crate::lock::lock;
use crate::reason::Reason;

/// `[services]` in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Settings {
    /// The addresses of services: ClusterIPs, and those of load balancers.
    #[serde(default, deserialize_with = "prefixes")]
    pub(crate) addresses: Vec<IpNet>,
    /// The networks of the nodes' own addresses. They have the NodePorts, and masqueraded
    /// connections come from there.
    #[serde(default, deserialize_with = "prefixes")]
    pub(crate) nodes: Vec<IpNet>,
}

impl Settings {
    /// Returns all networks.
    pub(crate) fn networks(&self) -> impl Iterator<Item = &IpNet> {
        self.addresses.iter().chain(&self.nodes)
    }

    /// Checks the settings of an overlay with these prefixes.
    pub(crate) fn check(&self, overlay: &[IpNet]) -> Result<(), String> {
        if self.networks().next().is_none() {
            return Err(
                "services: addresses is missing: say which addresses services have, as in [\"10.96.0.0/12\"]"
                    .into(),
            );
        }
        let overlap = |one: &IpNet, two: &IpNet| one.contains(two) || two.contains(one);
        let both = self.nodes.iter().flat_map(|node| overlay.iter().map(move |prefix| (node, prefix)));
        match both.into_iter().find(|(node, prefix)| overlap(node, prefix)) {
            Some((node, prefix)) => Err(format!(
                "services: nodes {node} and prefixes {prefix} overlap: say the nodes' own network, not the containers'"
            )),
            None => Ok(()),
        }
    }
}

/// Service addresses, if the configuration has any.
#[derive(Debug)]
pub(crate) struct Services {
    settings: Settings,
    asker: Mutex<Asker>,
    found: AtomicU64,
    failed: AtomicU64,
}

/// Asks the kernel about connections of the host's network namespace.
#[derive(Debug, Default)]
struct Asker {
    /// `None` before the first question, and after an error.
    socket: Option<OwnedFd>,
    /// The last error, if the last question failed.
    error: Option<Errno>,
}

impl Asker {
    fn ask(&mut self, client: SocketAddr, server: SocketAddr) -> Result<Option<Translated>, Errno> {
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => conntrack::open()?,
        };
        let found = conntrack::find(&socket, client, server)?;
        // After an error an answer may be unread, which the next question must not get.
        self.socket = Some(socket);
        Ok(found)
    }
}

impl Services {
    pub(crate) fn new(settings: Settings) -> Services {
        let (found, failed) = (AtomicU64::new(0), AtomicU64::new(0));
        Services { settings, asker: Mutex::default(), found, failed }
    }

    /// Returns `true` for an address that may be a service's.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        self.settings.networks().any(|net| net.contains(&address))
    }

    /// Returns the two ends of a connection to a service as its server sees them. Returns `None` if
    /// no segment of it has passed netfilter yet.
    pub(crate) fn find(&self, client: SocketAddr, service: SocketAddr) -> Result<Option<Translated>, Reason> {
        let mut asker = lock(&self.asker);
        let found = asker.ask(client, service);
        let error = found.as_ref().err().copied();
        if let Some(error) = error {
            self.failed.fetch_add(1, Relaxed);
            if asker.error.is_none() {
                tracing::warn!(%error, "it is unknown where services lead: connections to them stay on the overlay");
            }
        }
        asker.error = error;
        found.map_err(|_| Reason::Failed)
    }

    /// Notes that a connection leads to a container.
    pub(crate) fn leads(&self) {
        self.found.fetch_add(1, Relaxed);
    }

    pub(crate) fn report(&self) -> Value {
        let error = lock(&self.asker).error.map(|error| error.to_string());
        let of = |count: &AtomicU64| count.load(Relaxed);
        json!({ "error": error, "found": of(&self.found), "failed": of(&self.failed) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_refused_with_what_to_do() {
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let check = |addresses: &[&str], nodes: &[&str]| {
            let prefixes: Vec<IpNet> = nets(&["10.50.0.0/16"]);
            Settings { addresses: nets(addresses), nodes: nets(nodes) }.check(&prefixes)
        };
        check(&["10.96.0.0/12"], &["192.168.0.0/24"]).unwrap();
        check(&["10.50.9.0/24"], &[]).unwrap();
        check(&[], &["192.168.0.1/32"]).unwrap();
        assert!(check(&[], &[]).unwrap_err().contains("addresses is missing"));
        assert!(check(&["10.96.0.0/12"], &["10.50.1.0/24"]).unwrap_err().contains("overlap"));
    }
}
