//! Reads a NetworkPolicy. A key that is not understood is an error, since it could narrow what the
//! policy allows.

use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::yaml::{Node, Wrong};
use crate::policy::{Requirement, Requirements, Test};

/// A NetworkPolicy.
#[derive(Debug)]
pub(super) struct NetworkPolicy {
    pub(super) file: PathBuf,
    pub(super) line: usize,
    pub(super) name: String,
    pub(super) namespace: String,
    /// The pods of its namespace to which it applies.
    pub(super) pods: Requirements,
    /// `None`: it does not isolate pods in this direction.
    pub(super) ingress: Option<Vec<Allowed>>,
    pub(super) egress: Option<Vec<Allowed>>,
}

/// An entry of `ingress` or `egress`. Connections must match one of the peers and one of the ports.
#[derive(Debug)]
pub(super) struct Allowed {
    /// `None`: everything.
    pub(super) peers: Option<Vec<Peer>>,
    /// `None`: all ports of all protocols.
    pub(super) ports: Option<Vec<Port>>,
}

#[derive(Debug)]
pub(super) enum Peer {
    Block {
        prefix: IpNet,
        except: Vec<IpNet>,
    },
    Pods {
        /// `None`: those of the policy's namespace.
        namespaces: Option<Requirements>,
        pods: Requirements,
    },
}

/// Ports of a protocol.
#[derive(Debug)]
pub(super) enum Port {
    All,
    Numbers(u16, u16),
    Named(String),
    /// Ports of a protocol that is not TCP. shunt leaves its packets to the overlay.
    OtherProtocol,
}

impl NetworkPolicy {
    pub(super) fn read(node: Node<'_>, file: &Path, namespace: &str) -> Result<NetworkPolicy, Wrong> {
        if let Some(version) = node.get("apiVersion")
            && version.text()? != "networking.k8s.io/v1"
        {
            return version.wrong("only networking.k8s.io/v1 can be imported");
        }
        let (metadata, spec) = (node.need("metadata")?, node.need("spec")?);
        let name = metadata.need("name")?.text()?.to_owned();
        let namespace = match metadata.get("namespace") {
            Some(namespace) => namespace.text()?,
            None if namespace.is_empty() => {
                return metadata
                    .wrong(format!("{name} has no namespace: write it there, or give --namespace"));
            }
            None => namespace,
        };
        spec.only(&["podSelector", "policyTypes", "ingress", "egress"])?;
        let egress = allowed(spec, "egress", "to")?;
        let types = spec.list("policyTypes")?;
        let mut is_of = [types.is_empty(), types.is_empty() && !egress.is_empty()];
        for it in types {
            match it.text()? {
                "Ingress" => is_of[0] = true,
                "Egress" => is_of[1] = true,
                other => return it.wrong(format!("there is no type {other}: say Ingress or Egress")),
            }
        }
        Ok(NetworkPolicy {
            file: file.to_owned(),
            line: node.line(),
            name,
            namespace: namespace.to_owned(),
            pods: spec.get("podSelector").map_or_else(|| Ok(Requirements::default()), selector)?,
            ingress: is_of[0].then_some(allowed(spec, "ingress", "from")?),
            egress: is_of[1].then_some(egress),
        })
    }
}

fn allowed(spec: Node<'_>, direction: &str, peers: &str) -> Result<Vec<Allowed>, Wrong> {
    let entry = |node: Node<'_>| {
        // An empty entry, {} or null, allows everything.
        if !node.is_null() {
            node.only(&[peers, "ports"])?;
        }
        let read = node.list(peers)?.into_iter().map(peer).collect::<Result<Vec<_>, _>>()?;
        let ports = node.list("ports")?.into_iter().map(port).collect::<Result<Vec<_>, _>>()?;
        Ok(Allowed { peers: (!read.is_empty()).then_some(read), ports: (!ports.is_empty()).then_some(ports) })
    };
    spec.list(direction)?.into_iter().map(entry).collect()
}

fn peer(node: Node<'_>) -> Result<Peer, Wrong> {
    node.only(&["podSelector", "namespaceSelector", "ipBlock"])?;
    let (pods, namespaces) = (node.get("podSelector"), node.get("namespaceSelector"));
    let Some(block) = node.get("ipBlock") else {
        if pods.is_none() && namespaces.is_none() {
            return node.wrong("expected podSelector, namespaceSelector or ipBlock");
        }
        return Ok(Peer::Pods {
            namespaces: namespaces.map(selector).transpose()?,
            pods: pods.map_or_else(|| Ok(Requirements::default()), selector)?,
        });
    };
    if pods.is_some() || namespaces.is_some() {
        return node.wrong("ipBlock cannot be combined with a selector");
    }
    block.only(&["cidr", "except"])?;
    let net = |node: Node<'_>| match node.text()?.parse::<IpNet>() {
        Ok(net) => Ok(net),
        Err(_) => node.wrong("expected a prefix, as 10.0.0.0/8"),
    };
    let prefix = net(block.need("cidr")?)?;
    let mut except = Vec::new();
    for it in block.list("except")? {
        match net(it)? {
            inner if prefix.contains(&inner) => except.push(inner),
            inner => return it.wrong(format!("{inner} is not within {prefix}")),
        }
    }
    Ok(Peer::Block { prefix, except })
}

fn port(node: Node<'_>) -> Result<Port, Wrong> {
    node.only(&["protocol", "port", "endPort"])?;
    let is_tcp = match node.get("protocol") {
        None => true,
        Some(protocol) => match protocol.text()? {
            "TCP" => true,
            "UDP" | "SCTP" => false,
            other => return protocol.wrong(format!("there is no protocol {other}: say TCP, UDP or SCTP")),
        },
    };
    let number =
        |node: Node<'_>| match node.number().and_then(|it| u16::try_from(it).ok()).filter(|it| *it > 0) {
            Some(number) => Ok(number),
            None => node.wrong("expected a port from 1 to 65535"),
        };
    let last = node.get("endPort").map(|it| Ok((it, number(it)?))).transpose()?;
    let ports = match (node.get("port"), last) {
        (None, None) => Port::All,
        (None, Some((last, _))) => return last.wrong("endPort needs a port"),
        (Some(port), last) if port.number().is_some() => {
            let first = number(port)?;
            match last {
                Some((last, number)) if number < first => {
                    return last.wrong(format!("endPort {number} is smaller than port {first}"));
                }
                last => Port::Numbers(first, last.map_or(first, |(_, number)| number)),
            }
        }
        (Some(_), Some((last, _))) => return last.wrong("endPort needs a port that is a number"),
        (Some(name), None) => {
            let text = name.text()?;
            let is_name = text.chars().any(|it| it.is_ascii_lowercase())
                && text.chars().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '-');
            if !is_name {
                return name.wrong(format!("{text:?} is no name of a port; a number has no quotation marks"));
            }
            Port::Named(text.to_owned())
        }
    };
    Ok(if is_tcp { ports } else { Port::OtherProtocol })
}

/// Reads a label selector. An empty one selects everything.
fn selector(node: Node<'_>) -> Result<Requirements, Wrong> {
    node.only(&["matchLabels", "matchExpressions"])?;
    let mut all = Vec::new();
    for (key, value) in node.get("matchLabels").map_or_else(|| Ok(Vec::new()), Node::entries)? {
        all.push(Requirement { key: label_key(key, value)?, test: Test::In(vec![label_value(value)?]) });
    }
    for expression in node.list("matchExpressions")? {
        expression.only(&["key", "operator", "values"])?;
        let key = expression.need("key")?;
        let key = label_key(key.text()?, key)?;
        let listed = expression.list("values")?;
        let values = listed.iter().map(|it| label_value(*it)).collect::<Result<Vec<_>, _>>()?;
        let operator = expression.need("operator")?;
        let test = match (operator.text()?, values.is_empty()) {
            ("In", false) => Test::In(values),
            ("NotIn", false) => Test::NotIn(values),
            ("Exists", true) => Test::Exists,
            ("DoesNotExist", true) => Test::Missing,
            ("In" | "NotIn", true) => return operator.wrong("the operator needs values"),
            ("Exists" | "DoesNotExist", false) => return operator.wrong("the operator has no values"),
            (other, _) => {
                return operator
                    .wrong(format!("there is no operator {other}: say In, NotIn, Exists or DoesNotExist"));
            }
        };
        all.push(Requirement { key, test });
    }
    Ok(Requirements(all))
}

fn label_key(key: &str, node: Node<'_>) -> Result<String, Wrong> {
    let is_key = !key.is_empty() && key.chars().all(|it| it.is_ascii_alphanumeric() || "-_./".contains(it));
    if is_key { Ok(key.to_owned()) } else { node.wrong(format!("{key:?} is no key of a label")) }
}

fn label_value(node: Node<'_>) -> Result<String, Wrong> {
    let value = node.text()?;
    match value.chars().all(|it| it.is_ascii_alphanumeric() || "-_.".contains(it)) {
        true => Ok(value.to_owned()),
        false => node.wrong(format!("{value:?} is no value of a label")),
    }
}
