//! Makes a policy of NetworkPolicies.
//!
//! A pod that a policy selects is isolated in that policy's directions: what no policy allows is
//! denied. Policies add to each other, and both the client's egress and the server's ingress must
//! be allowed. So the rules of each direction are, in this order:
//!
//! ```text
//! for each policy, each entry:  allow  from its peers to its pods, on its ports   (ingress)
//! for each policy:              deny   from anywhere to its pods
//! default:                      allow
//! ```

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

use shunt_config::Fault;

use super::objects::Objects;
use super::policies::{Allowed, NetworkPolicy, Peer, Port};
use crate::policy::Requirements;

/// A policy file, and notes for its reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Imported {
    /// The text of the policy file.
    pub text: String,
    /// What the policy file leaves to the overlay.
    pub notes: Vec<String>,
}

/// Makes a policy file of the NetworkPolicies in files. Policies without a namespace are in
/// `namespace`.
pub fn import(files: &[(&Path, String)], namespace: &str) -> Result<Imported, Fault> {
    let mut objects = Objects::default();
    for (path, text) in files {
        objects.read(path, text, namespace)?;
    }
    let mut names = HashMap::new();
    for policy in &objects.policies {
        if names.insert((&policy.namespace, &policy.name), ()).is_some() {
            let NetworkPolicy { file, line, namespace, name, .. } = policy;
            return Err(Fault::at_line(file, *line, format!("two policies are {namespace}/{name}")));
        }
    }
    let mut writer = Writer::default();
    for policy in &objects.policies {
        writer.allow(policy, Direction::Ingress, policy.ingress.as_deref());
        writer.allow(policy, Direction::Egress, policy.egress.as_deref());
    }
    for policy in &objects.policies {
        writer.isolate(policy, Direction::Ingress, policy.ingress.is_some());
        writer.isolate(policy, Direction::Egress, policy.egress.is_some());
    }
    let head = format!("# Imported from {} NetworkPolicies.\ndefault = \"allow\"\n", objects.policies.len());
    Ok(Imported { text: head + &writer.text, notes: writer.notes })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Ingress,
    Egress,
}

impl Direction {
    fn word(self) -> &'static str {
        match self {
            Direction::Ingress => "ingress",
            Direction::Egress => "egress",
        }
    }
}

#[derive(Debug, Default)]
struct Writer {
    text: String,
    notes: Vec<String>,
}

impl Writer {
    fn allow(&mut self, policy: &NetworkPolicy, direction: Direction, all: Option<&[Allowed]>) {
        for (at, Allowed { peers, ports }) in all.into_iter().flatten().enumerate() {
            let name = format!("{}/{} {} {}", policy.namespace, policy.name, direction.word(), at + 1);
            let ports = ports.as_deref().map(written);
            if ports.as_ref().is_some_and(|it| it.is_other) {
                self.notes.push(format!(
                    "{}:{}: {name} has ports of UDP or SCTP, whose packets stay under the overlay's own policy",
                    policy.file.display(),
                    policy.line
                ));
            }
            let ports = match ports {
                None | Some(Written { is_all: true, .. }) => None,
                // All ports are those of other protocols.
                Some(Written { ports, .. }) if ports.is_empty() => continue,
                Some(Written { ports, .. }) => Some(ports),
            };
            let peers = peers.as_ref().map(|peers| {
                let peers = peers.iter().map(|peer| ends_of(peer, &policy.namespace));
                peers.collect::<Vec<_>>()
            });
            let own = Some(vec![pods(&policy.namespace, &policy.pods)]);
            self.rule(&name, "allow", direction, own, peers, ports);
        }
    }

    fn isolate(&mut self, policy: &NetworkPolicy, direction: Direction, isolates: bool) {
        if isolates {
            let name = format!("{}/{} no other {}", policy.namespace, policy.name, direction.word());
            let own = Some(vec![pods(&policy.namespace, &policy.pods)]);
            self.rule(&name, "deny", direction, own, None, None);
        }
    }

    fn rule(
        &mut self,
        name: &str,
        action: &str,
        direction: Direction,
        own: Option<Vec<String>>,
        peers: Option<Vec<String>>,
        ports: Option<Vec<String>>,
    ) {
        let (from, to) = match direction {
            Direction::Ingress => (peers, own),
            Direction::Egress => (own, peers),
        };
        let (name, direction) = (quoted(name), direction.word());
        let text = &mut self.text;
        let _ =
            write!(text, "\n[[rule]]\nname = {name}\naction = \"{action}\"\ndirection = \"{direction}\"\n");
        for (key, list) in [("from", from), ("to", to), ("ports", ports)] {
            if let Some(list) = list {
                let _ = writeln!(text, "{key} = [{}]", list.join(", "));
            }
        }
    }
}

/// Ports as a policy file has them.
struct Written {
    ports: Vec<String>,
    is_all: bool,
    /// There are also ports of other protocols.
    is_other: bool,
}

fn written(all: &[Port]) -> Written {
    let mut written = Written { ports: Vec::new(), is_all: false, is_other: false };
    for port in all {
        match port {
            Port::All => written.is_all = true,
            Port::OtherProtocol => written.is_other = true,
            Port::Numbers(first, last) if first == last => written.ports.push(first.to_string()),
            Port::Numbers(first, last) => written.ports.push(quoted(&format!("{first}-{last}"))),
            Port::Named(name) => written.ports.push(quoted(name)),
        }
    }
    written
}

fn ends_of(peer: &Peer, namespace: &str) -> String {
    match peer {
        Peer::Block { prefix, except } if except.is_empty() => quoted(&prefix.to_string()),
        Peer::Block { prefix, except } => {
            let except: Vec<String> = except.iter().map(|it| quoted(&it.to_string())).collect();
            format!("{{ prefix = {}, except = [{}] }}", quoted(&prefix.to_string()), except.join(", "))
        }
        Peer::Pods { namespaces: None, pods: own } => pods(namespace, own),
        Peer::Pods { namespaces: Some(namespaces), pods } => {
            // Each pod has a namespace, and each namespace has this label.
            let namespaces = match namespaces.0.is_empty() {
                true => "kubernetes.io/metadata.name".to_owned(),
                false => namespaces.to_string(),
            };
            format!("{{ namespace-labels = {}{} }}", quoted(&namespaces), and_labels(pods))
        }
    }
}

/// Returns the selector of a namespace's pods.
fn pods(namespace: &str, pods: &Requirements) -> String {
    format!("{{ namespace = {}{} }}", quoted(namespace), and_labels(pods))
}

/// Returns the rest of a selector for pods with these labels.
fn and_labels(pods: &Requirements) -> String {
    match pods.0.is_empty() {
        true => String::new(),
        false => format!(", labels = {}", quoted(&pods.to_string())),
    }
}

/// Returns a string as TOML has it.
fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

#[cfg(test)]
#[path = "import_tests.rs"]
mod tests;
