//! The objects of the API that the router keeps, read from their JSON: as little of them as it
//! needs. Fields of other types than the API has are errors.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::policies::NetworkPolicy;
use super::store::{Table, Tables};
use super::yaml::{self, Node};
use crate::workloads::Labels;

/// Why an object cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong(pub(super) String);

/// An object as the API names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known<K> {
    pub(super) uid: String,
    pub(super) version: String,
    /// The node of a pod.
    pub(super) node: Option<String>,
    /// `None`: the router does not need it, as a pod that has ended.
    pub(super) object: Option<K>,
}

/// A kind of objects.
pub(super) trait Kind: Sized + Send + Sync + 'static {
    /// The resource, in the status.
    const NAME: &'static str;
    /// The path of the list of all namespaces.
    const PATH: &'static str;

    fn read(text: &str) -> Result<Known<Self>, Wrong>;

    fn table(tables: &mut Tables) -> &mut Table<Self>;
}

/// A pod with addresses that no other one has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) labels: Labels,
    pub(super) addresses: BTreeSet<IpAddr>,
    /// The TCP ports with names.
    pub(super) ports: BTreeMap<String, BTreeSet<u16>>,
    /// The address of its node.
    pub(super) host: Option<IpAddr>,
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Namespace {
    pub(super) name: String,
    pub(super) labels: Labels,
}

/// A NetworkPolicy, or the reason for which it cannot be enforced.
#[derive(Debug)]
pub(super) struct Policy {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) read: Result<NetworkPolicy, String>,
}

/// The metadata of an object.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Meta {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    resource_version: String,
    labels: Option<Labels>,
}

/// The largest sum of an object's labels, in bytes.
const LABELS: usize = 64 << 10;

impl Meta {
    pub(super) fn version(&self) -> Result<String, Wrong> {
        match self.resource_version.as_str() {
            "" => Err(Wrong("an object has no resourceVersion".into())),
            version => Ok(version.to_owned()),
        }
    }

    fn known<K>(self, node: Option<String>, object: Option<K>) -> Result<Known<K>, Wrong> {
        let version = self.version()?;
        let Meta { uid, name, .. } = self;
        if uid.is_empty() || name.is_empty() {
            return Err(Wrong("an object has no uid or no name".into()));
        }
        Ok(Known { uid, version, node, object })
    }

    fn labels(&mut self) -> Result<Labels, Wrong> {
        let labels = self.labels.take().unwrap_or_default();
        match labels.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>() {
            all if all > LABELS => Err(Wrong(format!("{} has labels of {all} bytes", self.name))),
            _ => Ok(labels),
        }
    }
}

fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, Wrong> {
    serde_json::from_str(text).map_err(|error| Wrong(error.to_string()))
}

impl Kind for Pod {
    const NAME: &'static str = "pods";
    const PATH: &'static str = "/api/v1/pods";

    fn read(text: &str) -> Result<Known<Pod>, Wrong> {
        let PodObject { mut metadata, spec, status } = parse(text)?;
        let (spec, status) = (spec.unwrap_or_default(), status.unwrap_or_default());
        let node = spec.node_name;
        let has_ended = matches!(status.phase.as_deref(), Some("Succeeded" | "Failed"));
        if spec.host_network.unwrap_or(false) || has_ended {
            return metadata.known(node, None);
        }
        let address = |text: &String| {
            text.parse::<IpAddr>().map_err(|_| Wrong(format!("{}: {text:?} is no address", metadata.name)))
        };
        let listed = status.pod_ips.unwrap_or_default();
        let listed = listed.iter().map(|it| &it.ip).chain(&status.pod_ip).filter(|it| !it.is_empty());
        let addresses = listed.map(address).collect::<Result<BTreeSet<_>, _>>()?;
        let host = status.host_ip.as_ref().filter(|it| !it.is_empty()).map(address).transpose()?;
        let mut ports: BTreeMap<String, BTreeSet<u16>> = BTreeMap::new();
        let containers = [spec.containers, spec.init_containers].into_iter().flatten().flatten();
        for port in containers.flat_map(|it| it.ports.unwrap_or_default()) {
            if let (Some(name), None | Some("TCP")) = (port.name, port.protocol.as_deref()) {
                ports.entry(name).or_default().insert(port.container_port);
            }
        }
        let labels = metadata.labels()?;
        let (name, namespace) = (metadata.name.clone(), metadata.namespace.clone());
        let pod = Pod { name, namespace, labels, addresses, ports, host };
        let has_address = !pod.addresses.is_empty();
        metadata.known(node, has_address.then_some(pod))
    }

    fn table(tables: &mut Tables) -> &mut Table<Pod> {
        &mut tables.pods
    }
}

impl Kind for Namespace {
    const NAME: &'static str = "namespaces";
    const PATH: &'static str = "/api/v1/namespaces";

    fn read(text: &str) -> Result<Known<Namespace>, Wrong> {
        #[derive(Deserialize)]
        struct Object {
            metadata: Meta,
        }
        let Object { mut metadata } = parse(text)?;
        let namespace = Namespace { name: metadata.name.clone(), labels: metadata.labels()? };
        metadata.known(None, Some(namespace))
    }

    fn table(tables: &mut Tables) -> &mut Table<Namespace> {
        &mut tables.namespaces
    }
}

impl Kind for Policy {
    const NAME: &'static str = "networkpolicies";
    const PATH: &'static str = "/apis/networking.k8s.io/v1/networkpolicies";

    fn read(text: &str) -> Result<Known<Policy>, Wrong> {
        #[derive(Deserialize)]
        struct Object {
            metadata: Meta,
            spec: Option<Value>,
        }
        let Object { metadata, spec } = parse(text)?;
        let (name, namespace) = (metadata.name.clone(), metadata.namespace.clone());
        // The import reads YAML, of which JSON is a part.
        let text = json!({ "metadata": { "name": name, "namespace": namespace }, "spec": spec.unwrap_or(json!({})) });
        let read = import(&text.to_string()).map_err(|wrong| wrong.what);
        metadata.known(None, Some(Policy { name, namespace, read }))
    }

    fn table(tables: &mut Tables) -> &mut Table<Policy> {
        &mut tables.policies
    }
}

fn import(text: &str) -> Result<NetworkPolicy, yaml::Wrong> {
    let documents = yaml::parse(text)?;
    let document = documents.first().ok_or_else(|| yaml::Wrong { line: 1, what: "it is empty".into() })?;
    NetworkPolicy::read(Node::of(document), Path::new(""), "")
}

#[derive(Deserialize)]
struct PodObject {
    metadata: Meta,
    spec: Option<PodSpec>,
    status: Option<PodStatus>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
    host_network: Option<bool>,
    containers: Option<Vec<Container>>,
    init_containers: Option<Vec<Container>>,
}

#[derive(Deserialize)]
struct Container {
    ports: Option<Vec<Port>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Port {
    name: Option<String>,
    protocol: Option<String>,
    container_port: u16,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodStatus {
    phase: Option<String>,
    #[serde(rename = "hostIP")]
    host_ip: Option<String>,
    #[serde(rename = "podIP")]
    pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<PodIp>>,
}

#[derive(Deserialize)]
struct PodIp {
    #[serde(default)]
    ip: String,
}

#[cfg(test)]
#[path = "typed_tests.rs"]
mod tests;
