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
use super::typed;
use crate::policy::{Policy, Requirements};

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
    let writer = Writer::of(objects.policies.iter());
    let head = format!("# Imported from {} NetworkPolicies.\ndefault = \"allow\"\n", objects.policies.len());
    Ok(Imported { text: head + &writer.text, notes: writer.notes })
}

/// The policy of a cluster.
#[derive(Debug)]
pub(super) struct Composed {
    pub(super) policy: Policy,
    /// The number of NetworkPolicies that it consists of.
    pub(super) imported: usize,
    pub(super) refused: Vec<Refused>,
    pub(super) notes: Vec<String>,
}

/// A NetworkPolicy that cannot be enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) name: String,
    pub(super) reason: String,
}

/// Makes a policy of a cluster's NetworkPolicies. Connections from and to the namespace of one that
/// cannot be enforced stay on the overlay, where the cluster's own implementation enforces it.
pub(super) fn compose<'a>(policies: impl Iterator<Item = &'a typed::Policy>) -> Composed {
    let mut policies: Vec<&typed::Policy> = policies.collect();
    policies.sort_by_key(|it| (&it.namespace, &it.name));
    let (mut sound, mut refused, mut text) = (Vec::new(), Vec::new(), String::new());
    let parse = |text: &str| Policy::parse(Path::new("NetworkPolicies"), text).map_err(|it| it.to_string());
    for typed::Policy { name, namespace, read } in policies {
        let read = read.as_ref().map_err(String::clone);
        let usable = read.and_then(|it| parse(&Writer::of([it].into_iter()).text).map(|_| it));
        match usable {
            Ok(policy) => sound.push(policy),
            Err(reason) => {
                let name = format!("{namespace}/{name}");
                for end in ["from", "to"] {
                    let (name, namespace) =
                        (quoted(&format!("{name} not enforced, {end}")), quoted(namespace));
                    let _ = write!(
                        text,
                        "[[rule]]\nname = {name}\naction = \"overlay\"\n{end} = [{{ namespace = {namespace} }}]\n"
                    );
                }
                refused.push(Refused { name, reason });
            }
        }
    }
    let Writer { text: rules, notes } = Writer::of(sound.iter().copied());
    match parse(&(text + &rules)) {
        Ok(policy) => Composed { policy, imported: sound.len(), refused, notes },
        Err(reason) => {
            refused.push(Refused { name: "all".to_owned(), reason });
            let policy = Policy::overlay("NetworkPolicies are not understood");
            Composed { policy, imported: 0, refused, notes }
        }
    }
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
    fn of<'a>(policies: impl Iterator<Item = &'a NetworkPolicy> + Clone) -> Writer {
        let mut writer = Writer::default();
        for policy in policies.clone() {
            writer.allow(policy, Direction::Ingress, policy.ingress.as_deref());
            writer.allow(policy, Direction::Egress, policy.egress.as_deref());
        }
        for policy in policies {
            writer.isolate(policy, Direction::Ingress, policy.ingress.is_some());
            writer.isolate(policy, Direction::Egress, policy.egress.is_some());
        }
        writer
    }

    fn allow(&mut self, policy: &NetworkPolicy, direction: Direction, all: Option<&[Allowed]>) {
        for (at, Allowed { peers, ports }) in all.into_iter().flatten().enumerate() {
            let name = format!("{}/{} {} {}", policy.namespace, policy.name, direction.word(), at + 1);
            let ports = ports.as_deref().map(written);
            if ports.as_ref().is_some_and(|it| it.is_other) {
                // Those of the API are in no file.
                let place = match policy.file.as_os_str().is_empty() {
                    true => String::new(),
                    false => format!("{}:{}: ", policy.file.display(), policy.line),
                };
                self.notes.push(format!(
                    "{place}{name} has ports of UDP or SCTP, whose packets stay under the overlay's own policy"
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
