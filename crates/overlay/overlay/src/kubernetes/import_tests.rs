//! Compares imported policies with an evaluator that follows the documentation of NetworkPolicies
//! literally, for random clusters, and checks errors.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use ipnet::IpNet;

use super::{Imported, import};
use crate::kubernetes::pods;
use crate::policy::{Doubt, Flow, InEffect, Policy, Verdict};
use crate::random::Random;
use crate::workloads::Workloads;

type Labels = BTreeMap<&'static str, &'static str>;

#[derive(Clone, Debug)]
struct Pod {
    namespace: usize,
    address: IpAddr,
    labels: Labels,
    ports: Vec<(&'static str, u16)>,
}

#[derive(Clone, Debug)]
struct Selector {
    labels: Labels,
    expressions: Vec<(&'static str, &'static str, Vec<&'static str>)>,
}

#[derive(Clone, Debug)]
enum Peer {
    Pods { pods: Option<Selector>, namespaces: Option<Selector> },
    Block { cidr: &'static str, except: Vec<&'static str> },
}

#[derive(Clone, Debug)]
enum Port {
    Of { protocol: Option<&'static str>, port: Option<u16>, last: Option<u16> },
    Named(&'static str),
}

#[derive(Clone, Debug)]
struct Rule {
    peers: Vec<Peer>,
    ports: Vec<Port>,
}

#[derive(Clone, Debug)]
struct Network {
    namespace: usize,
    pods: Selector,
    types: Vec<&'static str>,
    /// `None`: the key is absent.
    ingress: Option<Vec<Rule>>,
    egress: Option<Vec<Rule>>,
}

#[derive(Clone, Debug)]
struct Cluster {
    namespaces: Vec<Labels>,
    pods: Vec<Pod>,
    policies: Vec<Network>,
}

const PORTS: [u16; 4] = [80, 81, 85, 5432];
const OUTSIDE: [&str; 3] = ["203.0.113.9", "198.51.100.1", "192.0.2.77"];

impl Cluster {
    fn random(random: &mut Random) -> Cluster {
        let labels = |random: &mut Random| {
            let pairs = random.list(2, |it| (it.of(&["app", "tier"]), it.of(&["a", "b", "c"])));
            pairs.into_iter().collect::<Labels>()
        };
        let selector = |random: &mut Random| Selector {
            labels: if random.one_in(2) { labels(random) } else { Labels::new() },
            expressions: random.list(1, |it| {
                let operator = it.of(&["In", "NotIn", "Exists", "DoesNotExist"]);
                let values = match operator {
                    "In" | "NotIn" => vec![it.of(&["a", "b"]), it.of(&["b", "c"])],
                    _ => Vec::new(),
                };
                (it.of(&["app", "tier"]), operator, values)
            }),
        };
        let peer = |random: &mut Random| match random.below(4) {
            0 => match random.below(3) {
                0 => Peer::Block { cidr: "203.0.113.0/24", except: vec![] },
                1 => Peer::Block { cidr: "0.0.0.0/0", except: vec!["198.51.100.0/24", "10.50.1.0/24"] },
                _ => Peer::Block { cidr: "10.50.0.0/16", except: vec!["10.50.0.0/29"] },
            },
            1 => Peer::Pods { pods: Some(selector(random)), namespaces: None },
            2 => Peer::Pods { pods: None, namespaces: Some(selector(random)) },
            _ => Peer::Pods { pods: Some(selector(random)), namespaces: Some(selector(random)) },
        };
        let port = |random: &mut Random| match random.below(5) {
            0 => Port::Named(random.of(&["http", "sql"])),
            1 => Port::Of { protocol: Some(random.of(&["UDP", "SCTP"])), port: Some(80), last: None },
            2 => Port::Of { protocol: Some("TCP"), port: None, last: None },
            3 => Port::Of { protocol: None, port: Some(80), last: Some(random.of(&[80, 83, 6000])) },
            _ => Port::Of {
                protocol: random.of(&[None, Some("TCP")]),
                port: Some(random.of(&PORTS)),
                last: None,
            },
        };
        let rules = |random: &mut Random| {
            random.list(2, |it| Rule { peers: it.list(2, peer), ports: it.list(2, port) })
        };
        let namespaces = vec![labels(random), labels(random)];
        let pods = (0..5u8).map(|at| Pod {
            namespace: random.below(2) as usize,
            address: IpAddr::from([10, 50, at % 2, 2 + 3 * at]),
            labels: labels(random),
            ports: random.list(2, |it| (it.of(&["http", "sql"]), it.of(&PORTS))),
        });
        let pods = pods.collect();
        let policies = random.list(3, |it| Network {
            namespace: it.below(2) as usize,
            pods: selector(it),
            types: it.of(&[vec![], vec!["Ingress"], vec!["Egress"], vec!["Ingress", "Egress"]]),
            ingress: if it.one_in(4) { None } else { Some(rules(it)) },
            egress: if it.one_in(4) { None } else { Some(rules(it)) },
        });
        Cluster { namespaces, pods, policies }
    }

    /// Returns the verdict of the documentation.
    fn allows(&self, source: IpAddr, destination: SocketAddr) -> bool {
        source == destination.ip()
            || self.allows_one(source, destination.ip(), destination, "Egress")
                && self.allows_one(destination.ip(), source, destination, "Ingress")
    }

    fn pod(&self, address: IpAddr) -> Option<&Pod> {
        self.pods.iter().find(|pod| pod.address == address)
    }

    /// "If a pod is isolated in that direction, the connections allowed are those of some rule of
    /// some policy that applies to the pod for that direction."
    fn allows_one(&self, own: IpAddr, other: IpAddr, to: SocketAddr, direction: &str) -> bool {
        let Some(pod) = self.pod(own) else { return true };
        let applies = |policy: &&Network| {
            let has_egress = policy.egress.as_ref().is_some_and(|rules| !rules.is_empty());
            let types = match (policy.types.is_empty(), has_egress) {
                (false, _) => policy.types.clone(),
                (true, true) => vec!["Ingress", "Egress"],
                (true, false) => vec!["Ingress"],
            };
            policy.namespace == pod.namespace
                && selects(&policy.pods, &pod.labels)
                && types.contains(&direction)
        };
        let applying: Vec<&Network> = self.policies.iter().filter(applies).collect();
        if applying.is_empty() {
            return true;
        }
        applying.into_iter().any(|policy| {
            let rules = if direction == "Ingress" { &policy.ingress } else { &policy.egress };
            rules.iter().flatten().any(|rule| {
                (rule.peers.is_empty()
                    || rule.peers.iter().any(|it| self.is_peer(it, policy.namespace, other)))
                    && (rule.ports.is_empty() || rule.ports.iter().any(|it| self.is_port(it, to)))
            })
        })
    }

    fn is_peer(&self, peer: &Peer, own_namespace: usize, address: IpAddr) -> bool {
        match peer {
            Peer::Block { cidr, except } => {
                let within = |net: &str| net.parse::<IpNet>().unwrap().contains(&address);
                within(cidr) && !except.iter().any(|it| within(it))
            }
            Peer::Pods { pods, namespaces } => self.pod(address).is_some_and(|pod| {
                let is_in = match namespaces {
                    None => pod.namespace == own_namespace,
                    Some(selector) => selects(selector, &self.namespaces[pod.namespace]),
                };
                is_in && pods.as_ref().is_none_or(|selector| selects(selector, &pod.labels))
            }),
        }
    }

    fn is_port(&self, port: &Port, to: SocketAddr) -> bool {
        match port {
            Port::Of { protocol, port, last } => {
                let (first, end) = (port.unwrap_or(0), last.or(*port).unwrap_or(u16::MAX));
                matches!(protocol, None | Some("TCP")) && (first..=end).contains(&to.port())
            }
            Port::Named(name) => self.pod(to.ip()).is_some_and(|pod| pod.ports.contains(&(*name, to.port()))),
        }
    }

    /// Writes the objects as kubectl does: policies in YAML, pods and namespaces in JSON.
    fn written(&self) -> (String, String) {
        let mut yaml = "apiVersion: v1\nkind: List\nitems:\n".to_owned();
        for (at, Network { namespace, pods, types, ingress, egress }) in self.policies.iter().enumerate() {
            let _ = write!(
                yaml,
                "- apiVersion: networking.k8s.io/v1\n  kind: NetworkPolicy\n  metadata: {{name: p{at}, namespace: n{namespace}}}\n  \
                 spec:\n    podSelector: {}\n",
                selector(pods)
            );
            if !types.is_empty() {
                let _ = writeln!(yaml, "    policyTypes: [{}]", types.join(", "));
            }
            for (key, peers, rules) in [("ingress", "from", ingress), ("egress", "to", egress)] {
                let Some(rules) = rules else { continue };
                let rules: Vec<String> = rules.iter().map(|it| rule(it, peers)).collect();
                let _ = writeln!(yaml, "    {key}: [{}]", rules.join(", "));
            }
        }
        let map = |labels: &Labels| serde_json::json!(labels);
        let namespaces = self.namespaces.iter().enumerate().map(|(at, labels)| {
            serde_json::json!({ "kind": "Namespace", "metadata": { "name": format!("n{at}"), "labels": map(labels) } })
        });
        let pods = self.pods.iter().enumerate().map(|(at, pod)| {
            let ports = pod.ports.iter().map(|(name, port)| serde_json::json!({ "name": name, "containerPort": port }));
            serde_json::json!({
                "kind": "Pod",
                "metadata": { "name": format!("pod{at}"), "namespace": format!("n{}", pod.namespace), "labels": map(&pod.labels) },
                "spec": { "containers": [{ "name": "c", "ports": ports.collect::<Vec<_>>() }] },
                "status": { "phase": "Running", "podIP": pod.address, "podIPs": [{ "ip": pod.address }] },
            })
        });
        let items: Vec<_> = namespaces.chain(pods).collect();
        (yaml, serde_json::json!({ "kind": "List", "items": items }).to_string())
    }
}

fn selects(Selector { labels, expressions }: &Selector, of: &Labels) -> bool {
    labels.iter().all(|(key, value)| of.get(key) == Some(value))
        && expressions.iter().all(|(key, operator, values)| match (*operator, of.get(key)) {
            ("In", value) => value.is_some_and(|value| values.contains(value)),
            ("NotIn", value) => value.is_none_or(|value| !values.contains(value)),
            ("Exists", value) => value.is_some(),
            (_, value) => value.is_none(),
        })
}

fn selector(Selector { labels, expressions }: &Selector) -> String {
    let expressions: Vec<String> = expressions
        .iter()
        .map(|(key, operator, values)| match values.is_empty() {
            true => format!("{{key: {key}, operator: {operator}}}"),
            false => format!("{{key: {key}, operator: {operator}, values: [{}]}}", values.join(", ")),
        })
        .collect();
    let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}: {value}")).collect();
    match (labels.is_empty(), expressions.is_empty()) {
        (true, true) => "{}".to_owned(),
        (false, true) => format!("{{matchLabels: {{{}}}}}", labels.join(", ")),
        _ => format!(
            "{{matchLabels: {{{}}}, matchExpressions: [{}]}}",
            labels.join(", "),
            expressions.join(", ")
        ),
    }
}

fn rule(Rule { peers, ports }: &Rule, key: &str) -> String {
    let peer = |peer: &Peer| match peer {
        Peer::Block { cidr, except } => {
            format!("{{ipBlock: {{cidr: {cidr}, except: [{}]}}}}", except.join(", "))
        }
        Peer::Pods { pods, namespaces } => {
            let parts = [("podSelector", pods), ("namespaceSelector", namespaces)];
            let parts =
                parts.into_iter().filter_map(|(key, it)| Some(format!("{key}: {}", selector(it.as_ref()?))));
            format!("{{{}}}", parts.collect::<Vec<_>>().join(", "))
        }
    };
    let port = |port: &Port| match port {
        Port::Named(name) => format!("{{port: {name}}}"),
        Port::Of { protocol, port, last } => {
            let parts = [
                protocol.map(|it| format!("protocol: {it}")),
                port.map(|it| format!("port: {it}")),
                last.map(|it| format!("endPort: {it}")),
            ];
            format!("{{{}}}", parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
        }
    };
    let mut parts = Vec::new();
    if !peers.is_empty() {
        parts.push(format!("{key}: [{}]", peers.iter().map(peer).collect::<Vec<_>>().join(", ")));
    }
    if !ports.is_empty() {
        parts.push(format!("ports: [{}]", ports.iter().map(port).collect::<Vec<_>>().join(", ")));
    }
    format!("{{{}}}", parts.join(", "))
}

/// Imports the policies, and combines them with the pods of which `is_known` is true.
fn in_effect(cluster: &Cluster, is_known: impl Fn(IpAddr) -> bool) -> InEffect {
    let (policies, listed) = cluster.written();
    let Imported { text, .. } = import(&[(Path::new("policies.yaml"), policies)], "").unwrap();
    let policy =
        Policy::parse(Path::new("policy.toml"), &text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let mut workloads = Workloads::new(vec!["10.50.0.0/16".parse().unwrap()], HashSet::new());
    for (address, workload) in pods(&[(Path::new("pods.json"), listed)]).unwrap() {
        if is_known(address) {
            workloads.add(address, workload);
        }
    }
    InEffect::new(Arc::new(policy), Arc::new(workloads))
}

#[test]
fn imported_policies_decide_as_kubernetes_documents() {
    let mut random = Random(0x5eed);
    let mut counts = [0; 2];
    let mut unclear = 0;
    for _ in 0..150 {
        let cluster = Cluster::random(&mut random);
        let known = in_effect(&cluster, |_| true);
        let missing = random.of(&cluster.pods).address;
        let without = in_effect(&cluster, |address| address != missing);
        let outside = OUTSIDE.iter().map(|it| it.parse().unwrap());
        let ends: Vec<IpAddr> = cluster.pods.iter().map(|pod| pod.address).chain(outside).collect();
        for (source, to) in ends.iter().flat_map(|source| ends.iter().map(move |to| (*source, *to))) {
            for port in PORTS.into_iter().chain([83, 6000, 6001]) {
                let destination = SocketAddr::new(to, port);
                let flow = Flow::of(SocketAddr::new(source, 40_000), destination);
                let allows = cluster.allows(source, destination);
                let verdict = known.verdict(flow);
                assert_eq!(
                    matches!(verdict, Verdict::Allow(_)),
                    allows,
                    "{source} {destination} {verdict:?}\n{}\n{cluster:#?}",
                    cluster.written().0
                );
                assert!(matches!(verdict, Verdict::Allow(_) | Verdict::Deny(_)), "{verdict:?}");
                counts[usize::from(allows)] += 1;
                // If one of the pods is unknown, each certain verdict stays the same.
                match without.verdict(flow) {
                    Verdict::Unclear(Doubt::Labels) => {
                        assert!([source, to].contains(&missing));
                        unclear += 1;
                    }
                    decided => assert_eq!(decided, verdict, "{source} {destination}\n{cluster:#?}"),
                }
            }
        }
    }
    // Neither verdict is rare, and unknown pods leave many verdicts open.
    assert!(counts.iter().all(|count| *count > 8_000) && unclear > 2_000, "{counts:?} {unclear}");
}

const POLICY: &str = "\
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: db
  namespace: shop
spec:
  podSelector:
    matchLabels: {app: db}
    matchExpressions:
    - {key: tier, operator: In, values: [back, \"1\"]}
    - {key: old, operator: DoesNotExist}
  policyTypes: [Ingress, Egress]
  ingress:
  - from:
    - podSelector: {matchLabels: {app: web}}
    - namespaceSelector: {}
      podSelector: {matchLabels: {job: scrape}}
    - ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}
    ports:
    - {port: sql}
    - {protocol: TCP, port: 6000, endPort: 6010}
    - {protocol: UDP, port: 53}
  egress:
  - ports:
    - {protocol: UDP, port: 53}
";

#[test]
fn a_policy_becomes_rules_that_can_be_read() {
    let Imported { text, notes } = import(&[(Path::new("db.yaml"), POLICY.to_owned())], "").unwrap();
    let expected = r#"# Imported from 1 NetworkPolicies.
default = "allow"

[[rule]]
name = "shop/db ingress 1"
action = "allow"
direction = "ingress"
from = [{ namespace = "shop", labels = "app=web" }, { namespace-labels = "kubernetes.io/metadata.name", labels = "job=scrape" }, { prefix = "10.0.0.0/8", except = ["10.1.0.0/16"] }]
to = [{ namespace = "shop", labels = "app=db,tier in (back,1),!old" }]
ports = ["sql", "6000-6010"]

[[rule]]
name = "shop/db no other ingress"
action = "deny"
direction = "ingress"
to = [{ namespace = "shop", labels = "app=db,tier in (back,1),!old" }]

[[rule]]
name = "shop/db no other egress"
action = "deny"
direction = "egress"
from = [{ namespace = "shop", labels = "app=db,tier in (back,1),!old" }]
"#;
    assert_eq!(text, expected);
    assert_eq!(notes.len(), 2);
    assert!(notes[0].starts_with("db.yaml:1: shop/db ingress 1 has ports of UDP or SCTP"), "{notes:?}");
}

#[test]
fn what_cannot_be_expressed_is_refused_with_its_line() {
    for (from, to, line, what) in [
        ("networking.k8s.io/v1", "extensions/v1beta1", 1, "only networking.k8s.io/v1"),
        ("kind: NetworkPolicy", "kind: CiliumNetworkPolicy", 1, "CiliumNetworkPolicy cannot be imported"),
        ("  namespace: shop\n", "", 4, "db has no namespace"),
        ("  podSelector:\n", "  podSelectr:\n", 7, "there is no key podSelectr; did you mean podSelector?"),
        ("{app: db}", "{app: 1}", 8, "put it between quotation marks"),
        ("operator: In", "operator: Gt", 10, "there is no operator Gt"),
        ("values: [back, \"1\"]", "values: []", 10, "needs values"),
        ("operator: DoesNotExist", "operator: DoesNotExist, values: [a]", 11, "has no values"),
        ("[Ingress, Egress]", "[Ingress, Both]", 12, "there is no type Both"),
        ("    - podSelector: {matchLabels: {app: web}}", "    - {}", 15, "expected podSelector"),
        ("namespaceSelector: {}", "ipBlock: {cidr: 10.0.0.0/8}", 16, "cannot be combined"),
        ("10.0.0.0/8,", "10.0.0.0/99,", 18, "expected a prefix"),
        ("10.1.0.0/16", "11.1.0.0/16", 18, "is not within"),
        ("port: sql", "port: SQL", 20, "no name of a port"),
        ("port: sql", "port: 0", 20, "from 1 to 65535"),
        ("port: sql", "port: sql, endPort: 9", 20, "a number"),
        ("endPort: 6010", "endPort: 5999", 21, "is smaller"),
        ("protocol: TCP, port: 6000, endPort", "endPort", 21, "needs a port"),
        ("protocol: TCP", "protocol: QUIC", 21, "there is no protocol QUIC"),
        ("podSelector: {matchLabels: {app: web}}", "podSelector: {matchLabels: {app: web}", 16, ""),
    ] {
        assert!(POLICY.contains(from), "{from}");
        let text = POLICY.replacen(from, to, 1);
        let said = import(&[(Path::new("db.yaml"), text)], "").expect_err(to).to_string();
        assert!(
            said.starts_with(&format!("db.yaml:{line}: ")) && said.contains(what),
            "{line} {what}: {said}"
        );
    }
    let twice = [(Path::new("a.yaml"), POLICY.to_owned()), (Path::new("b.yaml"), format!("---\n{POLICY}"))];
    assert_eq!(import(&twice, "").unwrap_err().to_string(), "b.yaml:2: two policies are shop/db");
    let text = POLICY.replace("  namespace: shop\n", "");
    assert!(import(&[(Path::new("db.yaml"), text)], "other").unwrap().text.contains("other/db"));
}

#[test]
fn pods_without_addresses_of_their_own_are_left_out() {
    let text = "kind: PodList\nitems:\n\
        - {metadata: {name: a, namespace: n, labels: {x: y}}, spec: {}, status: {podIP: 10.50.1.2, phase: Running}}\n\
        - {metadata: {name: b, namespace: n}, spec: {hostNetwork: true}, status: {podIP: 10.50.1.3}}\n\
        - {metadata: {name: c, namespace: n}, spec: {}, status: {podIP: 10.50.1.4, phase: Succeeded}}\n\
        - {metadata: {name: d, namespace: n}, spec: {}, status: {phase: Pending}}\n\
        ---\nkind: Deployment\nmetadata: {name: other}\n";
    let found = pods(&[(Path::new("pods.yaml"), text.to_owned())]).unwrap();
    let named: Vec<_> = found.iter().map(|(address, it)| (address.to_string(), it.name.as_str())).collect();
    assert_eq!(named, [("10.50.1.2".to_owned(), "a")]);
    assert_eq!(found[0].1.namespace_labels, None, "its namespace is not listed");
}

/// A policy of the API that is not understood keeps its namespace on the overlay, and no other one.
#[test]
fn a_policy_that_cannot_be_enforced_keeps_its_namespace_on_the_overlay() {
    use crate::kubernetes::typed::{Kind, Policy as Object};
    use serde_json::json;
    let object = |namespace: &str, name: &str, spec: serde_json::Value| {
        let metadata = json!({ "name": name, "namespace": namespace, "uid": name, "resourceVersion": "1" });
        Object::read(&json!({ "metadata": metadata, "spec": spec }).to_string()).unwrap().object.unwrap()
    };
    let good = object(
        "shop",
        "db",
        json!({ "podSelector": {}, "ingress": [{ "ports": [{ "port": 53, "protocol": "UDP" }, { "port": 80 }] }] }),
    );
    let bad = object("other", "strange", json!({ "podSelector": {}, "since": "1.40" }));
    let super::Composed { policy, imported, refused, notes } = super::compose([&good, &bad].into_iter());
    assert_eq!((imported, notes), (1, vec!["shop/db ingress 1 has ports of UDP or SCTP, whose packets stay under the overlay's own policy".to_owned()]));
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].name, "other/strange");
    assert!(refused[0].reason.contains("there is no key since"), "{}", refused[0].reason);
    let pods = ["10.50.1.2", "10.50.1.3", "10.50.1.4"].iter().zip(["shop", "other", "third"]);
    let mut workloads = Workloads::new(vec!["10.50.0.0/16".parse().unwrap()], HashSet::new());
    for (address, namespace) in pods {
        let workload = crate::workloads::Workload {
            name: "p".into(),
            namespace: Some(namespace.into()),
            labels: Default::default(),
            namespace_labels: Some(Default::default()),
            ports: Default::default(),
        };
        workloads.add(address.parse().unwrap(), Arc::new(workload));
    }
    let policy = InEffect::new(Arc::new(policy), Arc::new(workloads));
    let verdict = |client: &str, server: &str| {
        let destination: SocketAddr = server.parse().unwrap();
        policy.verdict(Flow { source: client.parse().unwrap(), source_port: None, destination })
    };
    assert!(matches!(verdict("10.50.1.4", "10.50.1.2:80"), Verdict::Allow(_)));
    assert!(matches!(verdict("10.50.1.4", "10.50.1.2:81"), Verdict::Deny(_)));
    assert!(matches!(verdict("10.50.1.2", "10.50.1.4:81"), Verdict::Allow(_)));
    assert_eq!(verdict("10.50.1.3", "10.50.1.4:80"), Verdict::Overlay);
    assert_eq!(verdict("10.50.1.4", "10.50.1.3:80"), Verdict::Overlay);
    assert_eq!(
        verdict("10.50.1.4", "10.50.1.9:80"),
        Verdict::Unclear(Doubt::Labels),
        "it may be of that namespace"
    );
    assert_eq!(super::compose(std::iter::empty()).imported, 0);
}
