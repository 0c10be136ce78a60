//! What the annotations of a container say about it, for policies that select by labels. The runtime
//! stores it for the overlay's router, by the cookie of the container's network namespace.
//!
//! | engine | annotations | what they say |
//! | --- | --- | --- |
//! | containerd's CRI | `io.kubernetes.cri.sandbox-name`, `-namespace` | the pod; its labels are unknown |
//! | CRI-O | `io.kubernetes.cri-o.KubeName`, `.Namespace` | the pod |
//! | | `io.kubernetes.cri-o.Labels`, of the sandbox | its labels |
//! | others | all | they are the labels |
//!
//! A cookie is not used again before the next boot, when the directory is empty. So a file never
//! describes a later container.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shunt_sys::{Errno, identity, netns};

use crate::refusal::Refusal;
use crate::spec::{Linux, not_understood};

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Described {
    /// The name of the container, or of its pod.
    name: String,
    /// The namespace of its pod.
    namespace: Option<String>,
    /// `None`: they are not known.
    labels: Option<BTreeMap<String, String>>,
    /// The path of its network namespace, which exists as long as the container.
    network: PathBuf,
}

/// The parts of a configuration that are read.
#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    linux: Linux,
}

/// The largest sum of a container's labels, in bytes.
const MOST: usize = 64 << 10;

/// Returns what a configuration says. `None` if it says nothing, or if the container gets a new
/// network namespace, by which it could not be known.
pub(crate) fn described(text: &str, id: &str) -> Result<Option<Described>, Refusal> {
    let Config { annotations, linux } = serde_json::from_str(text).map_err(not_understood)?;
    let network = PathBuf::from(linux.path("network"));
    if annotations.is_empty() || network.as_os_str().is_empty() {
        return Ok(None);
    }
    let of = |key: &str| annotations.get(key).cloned();
    let containerd = (of("io.kubernetes.cri.sandbox-name"), of("io.kubernetes.cri.sandbox-namespace"));
    let crio = (of("io.kubernetes.cri-o.KubeName"), of("io.kubernetes.cri-o.Namespace"));
    let is_pods = annotations.keys().any(|key| key.starts_with("io.kubernetes."));
    let (name, namespace, labels) = match (containerd, crio) {
        ((Some(name), Some(namespace)), _) => (name, Some(namespace), None),
        (_, (Some(name), Some(namespace))) => {
            let is_sandbox = of("io.kubernetes.cri-o.ContainerType").as_deref() == Some("sandbox");
            let labels = of("io.kubernetes.cri-o.Labels").filter(|_| is_sandbox);
            (name, Some(namespace), labels.map(|text| pods_labels(&text)).transpose()?)
        }
        // Which pod it is in is not said in a known way.
        _ if is_pods => return Ok(None),
        _ => (id.to_owned(), None, Some(annotations)),
    };
    let size = |all: &BTreeMap<String, String>| {
        all.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
    };
    let labels = labels.filter(|all| size(all) <= MOST);
    Ok((namespace.is_some() || labels.is_some()).then_some(Described { name, namespace, labels, network }))
}

/// Returns the labels of a pod. The kubelet adds others, which say whose they are.
fn pods_labels(text: &str) -> Result<BTreeMap<String, String>, Refusal> {
    let mut labels: BTreeMap<String, String> = serde_json::from_str(text).map_err(not_understood)?;
    labels.retain(|key, _| {
        !key.starts_with("io.kubernetes.pod.") && !key.starts_with("io.kubernetes.container.")
    });
    Ok(labels)
}

impl Described {
    /// Writes the file for the router, and removes the files of network namespaces that have ended.
    pub(crate) fn store(mut self, directory: &Path) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        sweep(directory);
        let path = directory.join(format!("{}.json", cookie(&self.network)?));
        if let Some(former) = read(&path)
            && (&former.name, &former.namespace) == (&self.name, &self.namespace)
        {
            // Only a pod's sandbox says its labels.
            self.labels = self.labels.or(former.labels);
        }
        let mut new = tempfile::NamedTempFile::new_in(directory)?;
        serde_json::to_writer(&mut new, &self)?;
        new.persist(&path)?;
        Ok(())
    }
}

fn read(path: &Path) -> Option<Described> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Returns the cookie of a network namespace.
fn cookie(network: &Path) -> io::Result<u64> {
    let namespace = File::open(network)?;
    let socket =
        || UdpSocket::bind("0.0.0.0:0").map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
    Ok(netns::inside(namespace.as_fd(), || identity::namespace(socket()?.as_fd()))?)
}

/// Removes the files of network namespaces that have ended: nothing is mounted there any more.
fn sweep(directory: &Path) {
    let is_mounted = |path: &Path| {
        let device = |path: &Path| fs::metadata(path).map(|it| it.dev());
        let parent = path.parent().unwrap_or(Path::new("/"));
        matches!((device(path), device(parent)), (Ok(own), Ok(parent)) if own != parent)
    };
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if read(&entry.path()).is_some_and(|it| !is_mounted(&it.network)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn config(annotations: &Value, network: &str) -> String {
        let network = match network {
            "" => json!({ "type": "network" }),
            path => json!({ "type": "network", "path": path }),
        };
        json!({ "process": {}, "annotations": annotations, "linux": { "namespaces": [{ "type": "pid" }, network] } })
            .to_string()
    }

    fn of(annotations: &Value) -> Option<Described> {
        described(&config(annotations, "/run/netns/pod"), "1f").unwrap()
    }

    /// As containerd 1.7 writes them.
    #[test]
    fn containerd_names_the_pod() {
        for kind in ["sandbox", "container"] {
            let found = of(&json!({
                "io.kubernetes.cri.container-type": kind, "io.kubernetes.cri.sandbox-id": "446c65",
                "io.kubernetes.cri.sandbox-name": "db-0", "io.kubernetes.cri.sandbox-namespace": "shop",
                "io.kubernetes.cri.sandbox-uid": "005f082b-5fd9-4650-8ef4-473e63bc2d13",
            }));
            let found = found.unwrap();
            assert_eq!(
                (found.name.as_str(), found.namespace.as_deref(), found.labels),
                ("db-0", Some("shop"), None)
            );
        }
    }

    /// As CRI-O 1.23 writes them.
    #[test]
    fn crio_names_the_pod_and_the_sandbox_has_its_labels() {
        let annotations = |kind: &str| {
            json!({
                "io.kubernetes.cri-o.ContainerType": kind, "io.kubernetes.cri-o.KubeName": "segfaulter",
                "io.kubernetes.cri-o.Namespace": "default", "io.kubernetes.cri-o.IP.0": "172.30.129.95",
                "io.kubernetes.cri-o.Name": "k8s_segfaulter_default_aaaa2b4a_0",
                "io.kubernetes.cri-o.Labels": "{\"io.kubernetes.container.name\":\"POD\",\"io.kubernetes.pod.namespace\":\"default\",\
                    \"io.kubernetes.pod.name\":\"segfaulter\",\"run\":\"segfaulter\",\"io.kubernetes.pod.uid\":\"aaaa2b4a\"}",
            })
        };
        let sandbox = of(&annotations("sandbox")).unwrap();
        assert_eq!((sandbox.name.as_str(), sandbox.namespace.as_deref()), ("segfaulter", Some("default")));
        assert_eq!(sandbox.labels, Some([("run".to_owned(), "segfaulter".to_owned())].into()));
        assert_eq!(of(&annotations("container")).unwrap().labels, None);
        let mut wrong = annotations("sandbox");
        wrong["io.kubernetes.cri-o.Labels"] = json!("[1]");
        assert!(described(&config(&wrong, "/n"), "1f").is_err());
    }

    #[test]
    fn other_annotations_are_labels() {
        let found = of(&json!({ "app": "web" })).unwrap();
        assert_eq!((found.name.as_str(), found.namespace), ("1f", None));
        assert_eq!(found.labels, Some([("app".to_owned(), "web".to_owned())].into()));
        assert_eq!(of(&json!({})), None);
        assert_eq!(of(&json!({ "io.kubernetes.pod.name": "a", "app": "web" })), None);
        assert_eq!(of(&json!({ "a": "b".repeat(MOST) })), None);
        // It could not be found again.
        assert_eq!(described(&config(&json!({ "app": "web" }), ""), "1f").unwrap(), None);
        assert_eq!(described("{}", "1f").unwrap(), None);
        assert!(described(&config(&json!({ "app": 1 }), "/n"), "1f").is_err());
    }

    #[test]
    fn files_go_with_their_namespaces() {
        let directory = tempfile::tempdir().unwrap();
        let stored = directory.path().join("stored");
        let named = |name: &str, labels: Option<BTreeMap<String, String>>| Described {
            name: name.into(),
            namespace: Some("shop".into()),
            labels,
            network: "/proc/self/ns/net".into(),
        };
        let files = || fs::read_dir(&stored).unwrap().map(|it| it.unwrap().path()).collect::<Vec<_>>();
        let labels: BTreeMap<_, _> = [("app".to_owned(), "db".to_owned())].into();
        let write = |it: &Described| {
            fs::create_dir_all(&stored).unwrap();
            fs::write(stored.join("1.json"), serde_json::to_vec(it).unwrap()).unwrap();
        };
        let ended = Described { network: directory.path().join("gone"), ..named("old", None) };
        write(&ended);
        sweep(&stored);
        assert!(files().is_empty());
        // Namespaces are files of a file system of their own.
        write(&named("db-0", Some(labels.clone())));
        sweep(&stored);
        assert_eq!(files().len(), 1);
        assert_eq!(read(&files()[0]).unwrap(), named("db-0", Some(labels)));
    }
}
