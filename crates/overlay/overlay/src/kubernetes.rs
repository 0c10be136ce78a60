//! Objects of Kubernetes: pods and namespaces, whose labels policies select, and NetworkPolicies,
//! from which `import` makes a policy.
//!
//! - `objects` reads files, as `kubectl get -o yaml` and `-o json` print them, by `yaml` and
//!   `policies`. All of it is a function of the text.
//! - `source` keeps what the API server has (ADR 49). `settings` has the server and the credentials,
//!   `api` the requests, `typed` the objects, `progress` the states of listing and watching, and
//!   `store` the objects that were seen last.

mod api;
mod import;
#[cfg(test)]
mod manifests_tests;
mod objects;
mod policies;
mod progress;
mod settings;
mod source;
mod store;
mod typed;
mod yaml;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use shunt_config::Fault;

use crate::workloads::{Labels, Workload};
use objects::Objects;

pub use import::{Imported, import};
pub(crate) use settings::Settings;
pub(crate) use source::{Feed, Source, run};

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
