//! The annotations of this host's containers. `shunt-runtime` stores them in the directory of the
//! control socket, where only the host's root can write, by the cookie of the network namespace
//! (`shunt_oci`).
//!
//! | other sources | annotations | the address is |
//! | --- | --- | --- |
//! | name nothing | have labels | known, by the annotations |
//! | name nothing | name the pod only | unknown |
//! | name a pod | name the same pod, or none | known, by the other sources |
//! | name a pod | name another pod | unknown: the sources are behind |

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use serde::Deserialize;

use crate::shared::Shared;
use crate::workloads::{Labels, Workload};

/// A container, as far as its annotations say. The runtime stores more, for itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Described {
    name: String,
    namespace: Option<String>,
    labels: Option<Labels>,
}

/// The files that were read, by the cookies of namespaces, as they were then.
pub(crate) type Files = HashMap<u64, (SystemTime, Described)>;

/// The largest file.
const LARGEST: u64 = 1 << 20;

/// Returns the directory of the files.
pub fn described_beside(control: &Path) -> PathBuf {
    control.with_extension("containers")
}

/// Reads the files of all namespaces with supervisors again that have changed.
pub(crate) fn read(shared: &Shared, known: &Files) -> (Files, Vec<(IpAddr, Described)>) {
    let loaded = shared.loaded();
    let directory = described_beside(&loaded.config.control);
    let is_overlays = |address: &IpAddr| loaded.config.prefixes.iter().any(|prefix| prefix.contains(address));
    let (mut files, mut described) = (Files::new(), Vec::new());
    for (cookie, namespace) in shared.registry.by_cookie() {
        let path = directory.join(format!("{cookie}.json"));
        let Some((changed, container)) = read_one(&path, known.get(&cookie)) else { continue };
        let addresses = namespace.addresses().into_iter().filter(is_overlays);
        described.extend(addresses.map(|address| (address, container.clone())));
        files.insert(cookie, (changed, container));
    }
    (files, described)
}

fn read_one(path: &Path, known: Option<&(SystemTime, Described)>) -> Option<(SystemTime, Described)> {
    let about = std::fs::metadata(path).ok().filter(|about| about.len() <= LARGEST)?;
    let changed = about.modified().ok()?;
    if let Some(known) = known.filter(|(then, _)| *then == changed) {
        return Some(known.clone());
    }
    Some((changed, serde_json::from_slice(&std::fs::read(path).ok()?).ok()?))
}

/// Returns what the annotations add to `named`, which the other sources name.
pub(crate) fn added(
    described: &[(IpAddr, Described)],
    named: &[(IpAddr, Arc<Workload>)],
) -> Vec<(IpAddr, Arc<Workload>)> {
    if described.is_empty() {
        return Vec::new();
    }
    let of: HashMap<IpAddr, &Workload> =
        named.iter().map(|(address, workload)| (*address, workload.as_ref())).collect();
    let add = |(address, container): &(IpAddr, Described)| {
        let Described { name, namespace, labels } = container;
        let is_same = of.get(address).map(|it| (&it.name, &it.namespace) == (name, namespace));
        let labels = match (is_same, namespace, labels) {
            (Some(true), ..) | (Some(false), None, _) | (None, _, None) => return None,
            // Two containers for one address: it is unknown.
            (Some(false), Some(_), labels) => labels.clone().unwrap_or_default(),
            (None, _, Some(labels)) => labels.clone(),
        };
        let workload = Workload {
            name: name.clone(),
            namespace: namespace.clone(),
            labels,
            // A container without a namespace has no labels of one, for certain.
            namespace_labels: namespace.is_none().then(Labels::new),
            ports: BTreeMap::new(),
        };
        Some((*address, Arc::new(workload)))
    };
    described.iter().filter_map(add).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::workloads::{Identity, Workloads};

    fn described(name: &str, namespace: Option<&str>, app: Option<&str>) -> Described {
        let labels = app.map(|app| Labels::from([("app".to_owned(), app.to_owned())]));
        Described { name: name.into(), namespace: namespace.map(str::to_owned), labels }
    }

    #[test]
    fn annotations_add_to_other_sources_and_contradict_them() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let pod = Arc::new(Workload {
            name: "db".into(),
            namespace: Some("shop".into()),
            labels: Labels::from([("app".into(), "api".into())]),
            namespace_labels: Some(Labels::new()),
            ports: BTreeMap::new(),
        });
        let named: Vec<_> = (2..6).map(|at| (ip(&format!("10.50.1.{at}")), pod.clone())).collect();
        let containers = [
            ("10.50.1.2", described("db", Some("shop"), None)),
            ("10.50.1.3", described("db", Some("shop"), Some("crio"))),
            ("10.50.1.4", described("web", Some("shop"), None)),
            ("10.50.1.5", described("1f", None, Some("own"))),
            ("10.50.1.6", described("web", Some("shop"), Some("crio"))),
            ("10.50.1.7", described("web", Some("shop"), None)),
            ("10.50.1.8", described("2f", None, Some("own"))),
        ]
        .map(|(address, it)| (ip(address), it));
        let mut workloads = Workloads::new(vec!["10.50.0.0/16".parse().unwrap()], HashSet::new());
        let added = added(&containers, &named);
        named.into_iter().chain(added).for_each(|(address, it)| workloads.add(address, it));
        let app = |address: &str| match workloads.of(ip(address)) {
            Identity::Known(it) => Some(it.labels["app"].clone()),
            Identity::Unknown | Identity::Outside => None,
        };
        for (address, expected) in [
            ("10.50.1.2", Some("api")),
            ("10.50.1.3", Some("api")),
            ("10.50.1.4", None),
            ("10.50.1.5", Some("api")),
            ("10.50.1.6", Some("crio")),
            ("10.50.1.7", None),
            ("10.50.1.8", Some("own")),
        ] {
            assert_eq!(app(address).as_deref(), expected, "{address}");
        }
        let Identity::Known(crio) = workloads.of(ip("10.50.1.6")) else { panic!("it is known") };
        assert_eq!(crio.namespace_labels, None, "no annotation has them");
    }

    #[test]
    fn a_file_is_read_again_when_it_has_changed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("7.json");
        assert_eq!(read_one(&path, None), None);
        std::fs::write(&path, r#"{"name":"a","namespace":null,"labels":{"app":"x"},"network":"/n"}"#)
            .unwrap();
        let first = read_one(&path, None).unwrap();
        assert_eq!(first.1, described("a", None, Some("x")));
        let known = (first.0, described("as known", None, None));
        assert_eq!(read_one(&path, Some(&known)).unwrap(), known);
        let known = (SystemTime::UNIX_EPOCH, known.1);
        assert_eq!(read_one(&path, Some(&known)).unwrap(), first);
        std::fs::write(&path, "[]").unwrap();
        assert_eq!(read_one(&path, None), None);
        assert_eq!(
            described_beside(Path::new("/run/shunt/overlay.sock")),
            Path::new("/run/shunt/overlay.containers")
        );
    }
}
