//! Reads objects of Kubernetes, as `kubectl get -o yaml` and `-o json` print them: pods and
//! namespaces, whose labels policies select, and NetworkPolicies, from which `import` makes a
//! policy. All of it is a function of the text.

mod import;
mod objects;
mod policies;
mod yaml;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use shunt_config::Fault;

use crate::workloads::{Labels, Workload};
use objects::Objects;

pub use import::{Imported, import};

/// Reads lists of pods and namespaces, and returns the pods by their addresses.
pub(crate) fn pods(files: &[(&Path, String)]) -> Result<Vec<(IpAddr, Arc<Workload>)>, Fault> {
    let mut objects = Objects::default();
    for (path, text) in files {
        objects.read(path, text, "")?;
    }
    Ok(workloads(&objects))
}

fn workloads(objects: &Objects) -> Vec<(IpAddr, Arc<Workload>)> {
    let namespaces: HashMap<&str, &Labels> =
        objects.namespaces.iter().map(|it| (it.name.as_str(), &it.labels)).collect();
    let mut found = Vec::new();
    for pod in &objects.pods {
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
