//! The objects of a file: lists, pods, namespaces and NetworkPolicies. Objects of other kinds are
//! not read, except that another kind of policy is an error.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use shunt_config::Fault;

use super::policies::NetworkPolicy;
use super::yaml::{Node, Wrong, parse};
use crate::workloads::Labels;

/// What files have.
#[derive(Debug, Default)]
pub(super) struct Objects {
    pub(super) pods: Vec<Pod>,
    pub(super) namespaces: Vec<Namespace>,
    pub(super) policies: Vec<NetworkPolicy>,
}

/// A pod with addresses that no other one has.
#[derive(Debug)]
pub(super) struct Pod {
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) labels: Labels,
    pub(super) addresses: BTreeSet<IpAddr>,
    /// The TCP ports with names.
    pub(super) ports: BTreeMap<String, BTreeSet<u16>>,
}

#[derive(Debug)]
pub(super) struct Namespace {
    pub(super) name: String,
    pub(super) labels: Labels,
}

impl Objects {
    /// Adds the objects of a file. Those without a namespace are in `namespace`.
    pub(super) fn read(&mut self, path: &Path, text: &str, namespace: &str) -> Result<(), Fault> {
        let fault = |Wrong { line, what }: Wrong| Fault::at_line(path, line, what);
        for document in parse(text).map_err(fault)? {
            let node = Node::of(&document);
            if !node.is_null() {
                self.add(node, None, path, namespace).map_err(fault)?;
            }
        }
        Ok(())
    }

    /// Adds an object. The items of a PodList have no kind of their own in some outputs.
    fn add(
        &mut self,
        node: Node<'_>,
        of_list: Option<&str>,
        path: &Path,
        namespace: &str,
    ) -> Result<(), Wrong> {
        let kind = match (node.get("kind"), of_list) {
            (Some(kind), _) => kind.text()?,
            (None, Some(kind)) => kind,
            (None, None) => return node.wrong("there is no kind: is this an object of Kubernetes?"),
        };
        match kind {
            "Pod" => self.pods.extend(pod(node, namespace)?),
            "Namespace" => {
                let metadata = node.need("metadata")?;
                let name = metadata.need("name")?.text()?.to_owned();
                self.namespaces.push(Namespace { name, labels: labels(metadata)? });
            }
            "NetworkPolicy" => self.policies.push(NetworkPolicy::read(node, path, namespace)?),
            "List" | "PodList" | "NamespaceList" | "NetworkPolicyList" => {
                let of_items = kind.strip_suffix("List").filter(|kind| !kind.is_empty());
                for item in node.list("items")? {
                    self.add(item, of_items, path, namespace)?;
                }
            }
            other if other.ends_with("NetworkPolicy") => {
                return node.wrong(format!("{other} cannot be imported, only NetworkPolicy"));
            }
            _ => {}
        }
        Ok(())
    }
}

/// Reads a pod. Returns `None` if it has no such address: it is on the host's network, was not
/// started, or has ended.
fn pod(node: Node<'_>, namespace: &str) -> Result<Option<Pod>, Wrong> {
    let (metadata, spec, status) = (node.need("metadata")?, node.get("spec"), node.get("status"));
    let text = |node: Option<Node<'_>>| node.map(|it| it.text().map(str::to_owned)).transpose();
    let is_on_hosts = spec.and_then(|spec| spec.get("hostNetwork")).is_some_and(Node::is_true);
    let phase = text(status.and_then(|status| status.get("phase")))?;
    if is_on_hosts || matches!(phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Ok(None);
    }
    let mut addresses = BTreeSet::new();
    if let Some(status) = status {
        let of_list = status.list("podIPs")?.into_iter().filter_map(|it| it.get("ip"));
        for address in of_list.chain(status.get("podIP")) {
            match address.text()?.parse() {
                Ok(parsed) => drop(addresses.insert(parsed)),
                Err(_) => return address.wrong("expected an address"),
            }
        }
    }
    let mut ports: BTreeMap<String, BTreeSet<u16>> = BTreeMap::new();
    for container in spec.map_or_else(|| Ok(Vec::new()), containers)? {
        for port in container.list("ports")? {
            let protocol = text(port.get("protocol"))?;
            let number = port.get("containerPort").and_then(Node::number);
            let number = number.and_then(|number| u16::try_from(number).ok());
            if let (Some(name), Some(number), None | Some("TCP")) =
                (text(port.get("name"))?, number, protocol.as_deref())
            {
                ports.entry(name).or_default().insert(number);
            }
        }
    }
    let namespace = text(metadata.get("namespace"))?.unwrap_or_else(|| namespace.to_owned());
    let name = metadata.need("name")?.text()?.to_owned();
    let labels = labels(metadata)?;
    Ok((!addresses.is_empty()).then_some(Pod { name, namespace, labels, addresses, ports }))
}

/// Returns the containers of a pod that may listen, also its sidecars.
fn containers(spec: Node<'_>) -> Result<Vec<Node<'_>>, Wrong> {
    Ok([spec.list("containers")?, spec.list("initContainers")?].concat())
}

fn labels(metadata: Node<'_>) -> Result<Labels, Wrong> {
    let Some(labels) = metadata.get("labels") else { return Ok(Labels::new()) };
    labels.entries()?.into_iter().map(|(key, value)| Ok((key.to_owned(), value.text()?.to_owned()))).collect()
}
