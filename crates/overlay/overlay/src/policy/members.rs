//! The rules that select each known container by its labels. Containers with the same labels share
//! an entry, and a container whose labels have not changed keeps the one that it had.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use super::index::{Index, Selected};
use crate::workloads::{Identity, Labels, Workload, Workloads};

/// The rules that select each container.
#[derive(Debug, Default)]
pub(super) struct Members {
    /// Empty if no rule selects by labels.
    by_address: HashMap<IpAddr, Arc<Selected>>,
    /// No rules.
    none: Selected,
}

/// The part of a container by which rules select it.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Face<'a> {
    namespace: &'a Option<String>,
    labels: &'a Labels,
    namespace_labels: &'a Option<Labels>,
    ports: &'a BTreeMap<String, BTreeSet<u16>>,
}

impl Members {
    /// Finds the rules of an index that select the known containers. Only containers that differ from
    /// those of `former` are compared with the rules. `former` belongs to the same index.
    pub(super) fn new(
        index: &Index,
        workloads: &Workloads,
        former: Option<(&Members, &Workloads)>,
    ) -> Members {
        if !index.uses_labels() {
            return Members::default();
        }
        let mut made: HashMap<Face<'_>, Arc<Selected>> = HashMap::new();
        let kept = |address: IpAddr, workload: &Workload| {
            let (members, of_former) = former?;
            let is_same = of_former.of(address) == Identity::Known(workload);
            is_same.then(|| members.by_address.get(&address).cloned()).flatten()
        };
        let mut selected = |(address, workload): (IpAddr, _)| {
            let selected = kept(address, workload).unwrap_or_else(|| {
                let made = made.entry(Face::of(workload));
                made.or_insert_with(|| Arc::new(index.selecting(workload))).clone()
            });
            (address, selected)
        };
        Members { by_address: workloads.known().map(&mut selected).collect(), none: Selected::default() }
    }

    /// Returns the rules that select each known container. Returns nothing if no rule selects by labels.
    pub(super) fn iter(&self) -> impl Iterator<Item = (IpAddr, &Arc<Selected>)> {
        self.by_address.iter().map(|(address, selected)| (*address, selected))
    }

    /// Returns the rules that select a container. `None`: it is not known.
    pub(super) fn of(&self, address: IpAddr, workloads: &Workloads) -> Option<&Selected> {
        match workloads.of(address) {
            Identity::Unknown => None,
            Identity::Outside => Some(&self.none),
            Identity::Known(_) => Some(self.by_address.get(&address).map_or(&self.none, Arc::as_ref)),
        }
    }
}

impl<'a> Face<'a> {
    fn of(workload: &'a Workload) -> Face<'a> {
        let Workload { name: _, namespace, labels, namespace_labels, ports } = workload;
        Face { namespace, labels, namespace_labels, ports }
    }
}
