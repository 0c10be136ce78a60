//! The containers that policies select by labels, by their overlay addresses.
//!
//! ```text
//! Docker's API ────┐
//! lists of pods ───┼──► sources (labels) ──► Workloads ──► the policy in effect
//! etcd ────────────┘
//! ```
//!
//! An address is in one of these states. A selector never counts as certain for an unknown one.
//!
//! | state | when |
//! | --- | --- |
//! | outside | it is not one of the overlay's, or it is the host's own |
//! | known | the sources name one container for it |
//! | unknown | no source names a container, or they name different ones |

pub(crate) mod docker;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// The labels of a container or of a namespace.
pub(crate) type Labels = BTreeMap<String, String>;

/// A container, or a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Workload {
    pub(crate) name: String,
    /// The namespace of a pod.
    pub(crate) namespace: Option<String>,
    pub(crate) labels: Labels,
    /// The labels of the namespace. `None`: they are not known.
    pub(crate) namespace_labels: Option<Labels>,
    /// The TCP ports with names.
    #[serde(default)]
    pub(crate) ports: BTreeMap<String, BTreeSet<u16>>,
}

/// All containers that the sources name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Workloads {
    /// The overlay's addresses.
    overlay: Vec<IpNet>,
    /// The addresses of this host itself.
    hosts: HashSet<IpAddr>,
    /// `None`: the sources name several containers.
    named: HashMap<IpAddr, Option<Arc<Workload>>>,
}

/// The container that has an address, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Identity<'a> {
    Outside,
    Unknown,
    Known(&'a Workload),
}

impl Workloads {
    pub(crate) fn new(overlay: Vec<IpNet>, hosts: HashSet<IpAddr>) -> Workloads {
        Workloads { overlay, hosts, named: HashMap::new() }
    }

    /// Adds what a source says about an address.
    pub(crate) fn add(&mut self, address: IpAddr, workload: Arc<Workload>) {
        self.named
            .entry(address)
            .and_modify(|known| {
                if known.as_ref() != Some(&workload) {
                    *known = None;
                }
            })
            .or_insert(Some(workload));
    }

    pub(crate) fn of(&self, address: IpAddr) -> Identity<'_> {
        match self.named.get(&address) {
            _ if self.is_hosts(address) => Identity::Outside,
            Some(Some(workload)) => Identity::Known(workload),
            Some(None) => Identity::Unknown,
            None if self.overlay.iter().any(|prefix| prefix.contains(&address)) => Identity::Unknown,
            None => Identity::Outside,
        }
    }

    /// Returns `true` for an address of this host itself, from which it checks its containers'
    /// health.
    pub(crate) fn is_hosts(&self, address: IpAddr) -> bool {
        self.hosts.contains(&address)
    }

    /// Returns the addresses of this host itself.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = IpAddr> {
        self.hosts.iter().copied()
    }

    /// Returns the addresses whose container is known.
    pub(crate) fn known(&self) -> impl Iterator<Item = (IpAddr, &Workload)> {
        self.named.keys().filter_map(|address| match self.of(*address) {
            Identity::Known(workload) => Some((*address, workload)),
            Identity::Outside | Identity::Unknown => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(name: &str) -> Arc<Workload> {
        let labels = Labels::from([("app".to_owned(), name.to_owned())]);
        let name = name.to_owned();
        let (namespace_labels, ports) = (Some(Labels::new()), BTreeMap::new());
        Arc::new(Workload { name, namespace: None, labels, namespace_labels, ports })
    }

    #[test]
    fn an_address_is_known_if_one_container_has_it() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let overlay = vec!["10.50.0.0/16".parse().unwrap()];
        let mut workloads = Workloads::new(overlay, HashSet::from([ip("10.50.1.1")]));
        for (address, name) in [
            ("10.50.1.2", "a"),
            ("10.50.1.2", "a"),
            ("10.50.1.3", "a"),
            ("10.50.1.3", "b"),
            ("10.50.1.1", "c"),
        ] {
            workloads.add(ip(address), workload(name));
        }
        assert_eq!(workloads.of(ip("10.50.1.2")), Identity::Known(&workload("a")));
        assert_eq!(workloads.of(ip("10.50.1.3")), Identity::Unknown, "two sources differ");
        assert_eq!(workloads.of(ip("10.50.1.4")), Identity::Unknown, "no source names it");
        assert_eq!(workloads.of(ip("10.50.1.1")), Identity::Outside, "it is the host's");
        assert_eq!(workloads.of(ip("203.0.113.9")), Identity::Outside);
        assert_eq!(workloads.known().map(|(address, _)| address).collect::<Vec<_>>(), [ip("10.50.1.2")]);
    }
}
