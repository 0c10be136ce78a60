//! The objects that were seen last, by their uid.
//!
//! A pod may get the address of one that has ended, and a watch reports both with a delay. So when
//! a container comes to this host, the pods of its node are listed once, from the API server's
//! newest state ([`Table::confirm`]). Events of the node's pods that are older than this list are
//! ignored.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::Arc;

use super::typed::{Known, Namespace, Pod, Policy};
use crate::map::Placed;
use crate::workloads::{Labels, Workload};

/// The largest number of objects of a kind. Kubernetes is made for 150,000 pods.
const MOST: usize = 300_000;

/// The objects of all kinds.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) pods: Table<Pod>,
    pub(super) namespaces: Table<Namespace>,
    pub(super) policies: Table<Policy>,
}

/// The objects of a kind.
#[derive(Debug)]
pub(super) struct Table<K> {
    objects: HashMap<String, Arc<Stored<K>>>,
    /// All objects have been listed at least once.
    pub(super) is_complete: bool,
    /// A node's pods as of a version.
    confirmed: Option<Confirmed>,
}

#[derive(Debug)]
pub(super) struct Stored<K> {
    node: Option<String>,
    pub(super) object: K,
}

#[derive(Debug)]
struct Confirmed {
    node: String,
    version: u64,
}

impl<K> Default for Table<K> {
    fn default() -> Table<K> {
        Table { objects: HashMap::new(), is_complete: false, confirmed: None }
    }
}

impl<K> Table<K> {
    /// Returns the table of a complete list.
    pub(super) fn of(listed: Vec<Known<K>>) -> Table<K> {
        let mut table = Table { is_complete: true, ..Table::default() };
        listed.into_iter().for_each(|known| table.insert(known));
        table
    }

    /// Replaces all objects by those of a complete list of that version. Returns the former ones.
    pub(super) fn replace(&mut self, version: &str, listed: Table<K>) -> Table<K> {
        let former = std::mem::replace(self, listed);
        if let Some(confirmed) = &former.confirmed
            && number(version).is_some_and(|it| it < confirmed.version)
        {
            // The list began before that of the node.
            let of_node = |stored: &Arc<Stored<K>>| stored.node.as_ref() == Some(&confirmed.node);
            self.objects.retain(|_, stored| !of_node(stored));
            let newer = former.objects.iter().filter(|(_, stored)| of_node(stored));
            self.objects.extend(newer.map(|(uid, stored)| (uid.clone(), stored.clone())));
            let Confirmed { node, version } = confirmed;
            self.confirmed = Some(Confirmed { node: node.clone(), version: *version });
        }
        former
    }

    /// Puts an object, or removes it if the router does not need it.
    pub(super) fn put(&mut self, known: Known<K>) {
        if !self.is_outdated(&known) {
            self.insert(known);
        }
    }

    pub(super) fn delete(&mut self, known: &Known<K>) {
        if !self.is_outdated(known) {
            self.objects.remove(&known.uid);
        }
    }

    /// Replaces the objects of a node by those of a list, the server's newest at that version.
    pub(super) fn confirm(&mut self, node: &str, version: &str, listed: Vec<Known<K>>) {
        let of_node = |it: &Option<String>| it.as_deref() == Some(node);
        self.objects.retain(|_, stored| !of_node(&stored.node));
        listed.into_iter().filter(|known| of_node(&known.node)).for_each(|known| self.insert(known));
        self.confirmed = number(version).map(|version| Confirmed { node: node.to_owned(), version });
    }

    fn insert(&mut self, known: Known<K>) {
        let Known { uid, node, object, .. } = known;
        match (object, self.objects.entry(uid)) {
            (Some(object), Entry::Occupied(mut entry)) => {
                drop(entry.insert(Arc::new(Stored { node, object })))
            }
            (Some(object), Entry::Vacant(entry)) => drop(entry.insert(Arc::new(Stored { node, object }))),
            (None, Entry::Occupied(entry)) => drop(entry.remove()),
            (None, Entry::Vacant(_)) => {}
        }
    }

    /// Returns `true` for an object whose state a list of its node's pods has had, or a newer one.
    fn is_outdated(&self, known: &Known<K>) -> bool {
        self.confirmed.as_ref().is_some_and(|it| {
            known.node.as_ref() == Some(&it.node)
                && number(&known.version).is_some_and(|version| version <= it.version)
        })
    }

    /// Returns all objects.
    pub(super) fn all(&self) -> Vec<Arc<Stored<K>>> {
        self.objects.values().cloned().collect()
    }

    pub(super) fn count(&self) -> usize {
        self.objects.len()
    }

    /// Returns how many objects may be added.
    pub(super) fn room(&self) -> usize {
        MOST.saturating_sub(self.objects.len())
    }

    pub(super) const MOST: usize = MOST;
}

/// Returns a resource version as a number, by which versions of one kind can be compared.
fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

/// Returns the pods by their addresses, for policies.
pub(super) fn named(
    pods: &[Arc<Stored<Pod>>],
    namespaces: &[Arc<Stored<Namespace>>],
) -> Vec<(IpAddr, Arc<Workload>)> {
    let namespaces: HashMap<&str, &Labels> =
        namespaces.iter().map(|it| (it.object.name.as_str(), &it.object.labels)).collect();
    let mut found = Vec::new();
    for Stored { object: pod, .. } in pods.iter().map(Arc::as_ref) {
        let workload = Arc::new(Workload {
            name: pod.name.clone(),
            namespace: Some(pod.namespace.clone()),
            labels: pod.labels.clone(),
            namespace_labels: namespaces.get(pod.namespace.as_str()).map(|labels| (*labels).clone()),
            ports: pod.ports.clone(),
        });
        found.extend(pod.addresses.iter().map(|address| (*address, workload.clone())));
    }
    found
}

/// Returns the nodes of the pods. An address that pods of two nodes have is left out.
pub(super) fn placed(pods: &[Arc<Stored<Pod>>]) -> Placed {
    let mut placed = Placed::default();
    let mut differing = Vec::new();
    for Stored { node, object: pod } in pods.iter().map(Arc::as_ref) {
        let (Some(node), Some(host)) = (node, pod.host) else { continue };
        placed.nodes.insert(node.clone(), host);
        for address in &pod.addresses {
            let former = placed.pods.insert(*address, node.clone());
            if former.is_some_and(|former| former != *node) {
                differing.push(*address);
            }
        }
    }
    differing.iter().for_each(|address| drop(placed.pods.remove(address)));
    placed
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn known(uid: &str, version: u64, node: &str, is_needed: bool) -> Known<u64> {
        let object = is_needed.then_some(version);
        Known { uid: uid.into(), version: version.to_string(), node: Some(node.into()), object }
    }

    fn content(table: &Table<u64>) -> BTreeSet<(&str, u64)> {
        table.objects.iter().map(|(uid, stored)| (uid.as_str(), stored.object)).collect()
    }

    #[test]
    fn lists_replace_and_events_change() {
        let mut table = Table::default();
        assert!(!table.is_complete);
        table.put(known("z", 1, "n", true));
        table.replace(
            "10",
            Table::of(vec![known("a", 5, "n", true), known("b", 6, "m", true), known("c", 7, "n", false)]),
        );
        assert!(table.is_complete);
        assert_eq!(content(&table), [("a", 5), ("b", 6)].into());
        table.put(known("a", 11, "n", true));
        table.put(known("b", 12, "m", false));
        table.put(known("d", 13, "m", true));
        table.delete(&known("nobody", 14, "m", true));
        assert_eq!(content(&table), [("a", 11), ("d", 13)].into());
        table.delete(&known("d", 15, "m", true));
        assert_eq!((content(&table), table.count(), table.room()), ([("a", 11)].into(), 1, MOST - 1));
    }

    /// The watch is behind a list of the node's pods.
    #[test]
    fn older_events_of_a_confirmed_node_change_nothing() {
        let mut table = Table::default();
        table.replace("10", Table::of(vec![known("old", 5, "n", true), known("far", 6, "m", true)]));
        table.confirm("n", "20", vec![known("new", 18, "n", true), known("elsewhere", 19, "m", true)]);
        assert_eq!(content(&table), [("new", 18), ("far", 6)].into());
        for version in 11..=20 {
            table.put(known("old", version, "n", true));
            table.delete(&known("new", version, "n", true));
        }
        assert_eq!(content(&table), [("new", 18), ("far", 6)].into());
        table.put(known("far", 15, "m", true));
        table.put(known("new", 21, "n", true));
        assert_eq!(content(&table), [("new", 21), ("far", 15)].into());
        table.delete(&known("new", 22, "n", true));
        assert_eq!(content(&table), [("far", 15)].into());
        // A list that began earlier is complete only now.
        table.put(known("newest", 23, "n", true));
        table.replace("19", Table::of(vec![known("old", 5, "n", true), known("far", 16, "m", true)]));
        assert_eq!(content(&table), [("newest", 23), ("far", 16)].into());
        table.replace("30", Table::of(vec![known("other", 25, "n", true)]));
        assert_eq!(content(&table), [("other", 25)].into());
    }

    #[test]
    fn versions_that_are_no_numbers_are_not_compared() {
        let mut table = Table::default();
        table.confirm("n", "abc", vec![known("a", 3, "n", true)]);
        table.put(known("a", 1, "n", true));
        table.replace("x", Table::of(vec![known("b", 1, "n", true)]));
        assert_eq!(content(&table), [("b", 1)].into());
    }

    fn pod(name: &str, addresses: &[&str], host: Option<&str>) -> Pod {
        Pod {
            name: name.into(),
            namespace: "shop".into(),
            labels: Labels::from([("app".into(), name.into())]),
            addresses: addresses.iter().map(|it| it.parse().unwrap()).collect(),
            ports: Default::default(),
            host: host.map(|it| it.parse().unwrap()),
        }
    }

    #[test]
    fn pods_have_places_and_labels() {
        let mut tables = Tables::default();
        let mut put = |uid: &str, node: &str, object: Pod| {
            let (uid, version) = (uid.to_owned(), "1".to_owned());
            let node = (!node.is_empty()).then(|| node.to_owned());
            tables.pods.put(Known { uid, version, node, object: Some(object) });
        };
        put("1", "one", pod("a", &["10.50.1.2", "fd00::2"], Some("192.168.0.1")));
        put("2", "two", pod("b", &["10.50.2.2"], Some("192.168.0.2")));
        put("3", "two", pod("c", &["10.50.2.3"], None));
        put("4", "", pod("d", &["10.50.2.4"], Some("192.168.0.2")));
        put("5", "two", pod("e", &["10.50.1.9"], Some("192.168.0.2")));
        put("6", "one", pod("f", &["10.50.1.9"], Some("192.168.0.1")));
        let found = placed(&tables.pods.all());
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(
            found.nodes,
            [("one".into(), ip("192.168.0.1")), ("two".into(), ip("192.168.0.2"))].into()
        );
        let pods = [("10.50.1.2", "one"), ("fd00::2", "one"), ("10.50.2.2", "two")];
        assert_eq!(found.pods, pods.map(|(address, node)| (ip(address), node.to_owned())).into());
        let by_address = named(&tables.pods.all(), &tables.namespaces.all());
        assert_eq!(by_address.len(), 7);
        assert!(
            by_address.iter().all(|(_, it)| it.namespace_labels.is_none()),
            "the namespace is not known yet"
        );
        let namespace =
            Namespace { name: "shop".into(), labels: Labels::from([("team".into(), "x".into())]) };
        tables.namespaces.put(Known {
            uid: "9".into(),
            version: "2".into(),
            node: None,
            object: Some(namespace),
        });
        assert!(
            named(&tables.pods.all(), &tables.namespaces.all()).iter().all(|(_, it)| it
                .namespace_labels
                .as_ref()
                .unwrap()["team"]
                == "x")
        );
    }
}
