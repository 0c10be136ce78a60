//! Measures what policies cost, for `shunt bench overlay rules`: verdicts, and a change of labels. The
//! policy is that of a cluster whose workloads have a NetworkPolicy each, as `policy import` writes it.

use std::collections::{BTreeMap, HashSet};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use shunt_sys::Errno;

use crate::connections::{Connection, Connections, Place, Unclear};
use crate::metrics::End;
use crate::options::Options;
use crate::policy::{Flow, InEffect, Policy};
use crate::workloads::{Labels, Workload, Workloads};

/// What a policy costs in processor time. All but verdicts and `replace` is done on other threads than
/// the router's.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// The number of rules.
    pub rules: usize,
    /// The number of containers whose labels are known.
    pub containers: usize,
    /// The number of connections in the router's table.
    pub connections: usize,
    /// A verdict about a connection of two known containers.
    pub verdict: Duration,
    /// A verdict about a connection to a container whose labels are not known.
    pub unknown: Duration,
    /// Compiling the policy.
    pub compile: Duration,
    /// All the work for a container with other labels.
    pub change: Duration,
    /// The part of it that is done on the router's thread: replacing the policy.
    pub replace: Duration,
    /// The length of the policy that is published for the broker, in bytes.
    pub published: usize,
}

/// The number of connections in the table. Verdicts about each are measured.
const CONNECTIONS: usize = 10_000;
/// The number of other measurements, of which the median counts.
const REPEATS: usize = 9;
const OVERLAY: &str = "10.50.0.0/16";
/// The number of containers of a workload.
const REPLICAS: usize = 3;
/// The number of workloads of a namespace.
const NEIGHBOURS: usize = 20;

/// Measures a policy with that many rules, five for each workload, and that many containers.
pub fn measure(rules: usize, containers: usize) -> Result<Cost, Errno> {
    let cluster = Cluster { workloads: rules.div_ceil(RULES.len()), containers };
    let policy = Arc::new(cluster.policy());
    let known = Arc::new(cluster.known(None));
    let overlay = [OVERLAY.parse().expect("it is a prefix")];
    let publish = |policy: &InEffect| {
        serde_json::to_vec(&policy.on_one_host(&overlay)).expect("its keys are strings").len()
    };

    let compile = (0..REPEATS).map(|_| time(|| InEffect::new(policy.clone(), known.clone())).1).collect();
    let in_effect = Arc::new(InEffect::new(policy.clone(), known));
    let connections = cluster.connections()?;
    connections.replace(in_effect.clone());
    let (mut change, mut replace) = (Vec::new(), Vec::new());
    for number in 0..REPEATS {
        let known = Arc::new(cluster.known(Some(number)));
        let (next, found) = time(|| Arc::new(connections.policy().with(known)));
        let (_, published) = time(|| publish(&next));
        let (replaced, held) = time(|| connections.replace(next));
        let (_, compared) = time(|| connections.compare(&replaced, Unclear::Continue));
        change.push(found + published + held + compared);
        replace.push(held);
    }
    Ok(Cost {
        rules: policy.rules(),
        containers,
        connections: CONNECTIONS,
        verdict: verdict(&in_effect, |at| cluster.flow(at)),
        unknown: verdict(&in_effect, |at| Flow {
            source: address(containers + at % 100),
            ..cluster.flow(at)
        }),
        compile: median(compile),
        change: median(change),
        replace: median(replace),
        published: publish(&in_effect),
    })
}

/// Returns the result of work, and the processor time that it took.
fn time<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let begin = processor_time();
    let done = black_box(work());
    (done, processor_time() - begin)
}

/// Returns the processor time of this thread. Other programs do not prolong it.
fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() / 2]
}

/// Returns the mean time of a verdict.
fn verdict(policy: &InEffect, flow: impl Fn(usize) -> Flow) -> Duration {
    let flows: Vec<Flow> = (0..CONNECTIONS).map(flow).collect();
    let (_, all) = time(|| flows.iter().for_each(|flow| _ = black_box(policy.verdict(*flow))));
    all / CONNECTIONS as u32
}

/// Containers in namespaces. Those of a workload have the same labels.
struct Cluster {
    workloads: usize,
    containers: usize,
}

/// The rules of a workload: its neighbours and what collects metrics may connect to it, it may connect
/// to its namespace, and to addresses outside.
const RULES: [(&str, &str); 5] = [
    (
        "ingress 1",
        "action = 'allow'\ndirection = 'ingress'\nto = [OWN]\nfrom = [{ namespace = 'NAMESPACE', labels = 'app in (APP,NEXT)' }]\nports = [8080, 'sql']",
    ),
    (
        "ingress 2",
        "action = 'allow'\ndirection = 'ingress'\nto = [OWN]\nfrom = [{ namespace-labels = 'kubernetes.io/metadata.name', labels = 'job=scrape' }]\nports = [9100]",
    ),
    (
        "egress 1",
        "action = 'allow'\ndirection = 'egress'\nfrom = [OWN]\nto = [{ namespace = 'NAMESPACE' }, { prefix = '0.0.0.0/0', except = ['10.0.0.0/8'] }]",
    ),
    ("no other ingress", "action = 'deny'\ndirection = 'ingress'\nto = [OWN]"),
    ("no other egress", "action = 'deny'\ndirection = 'egress'\nfrom = [OWN]"),
];

impl Cluster {
    fn policy(&self) -> Policy {
        let rule = |workload: usize, (name, text): &(&str, &str)| {
            let text = text
                .replace("OWN", "{ namespace = 'NAMESPACE', labels = 'app=APP' }")
                .replace("NAMESPACE", &namespace(workload))
                .replace("APP", &app(workload))
                .replace("NEXT", &app(workload + 1));
            format!("[[rule]]\nname = 'n/{workload} {name}'\n{text}\n")
        };
        // An import has all rules that allow before those that deny.
        let (allow, deny) = (&RULES[..3], &RULES[3..]);
        let of = |kind: &[(&str, &str)]| -> String {
            (0..self.workloads).flat_map(|workload| kind.iter().map(move |it| rule(workload, it))).collect()
        };
        let text = of(allow) + &of(deny);
        Policy::parse(Path::new("policy.toml"), &text).expect("it is a policy")
    }

    /// Returns the containers. The labels of the first one have a `number`.
    fn known(&self, number: Option<usize>) -> Workloads {
        let mut workloads = Workloads::new(vec![OVERLAY.parse().expect("it is a prefix")], HashSet::new());
        for at in 0..self.containers {
            let number = number.filter(|_| at == 0);
            workloads.add(address(at), Arc::new(self.container(at, number)));
        }
        workloads
    }

    fn container(&self, at: usize, number: Option<usize>) -> Workload {
        let workload = at / REPLICAS % self.workloads;
        let labels = [("app", Some(app(workload))), ("number", number.map(|it| it.to_string()))];
        let labels = labels.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Workload {
            name: format!("{}-{at}", app(workload)),
            namespace: Some(namespace(workload)),
            labels: labels.collect(),
            namespace_labels: Some(Labels::new()),
            ports: BTreeMap::from([("sql".to_owned(), [5432].into())]),
        }
    }

    /// Returns a connection of a container: to one of the workload before, or far away.
    fn flow(&self, at: usize) -> Flow {
        let far = if at.is_multiple_of(4) { self.containers / 2 } else { REPLICAS };
        let destination = SocketAddr::new(address((at + self.containers - far) % self.containers), 8080);
        Flow::of(SocketAddr::new(address(at % self.containers), 40_000), destination)
    }

    fn connections(&self) -> Result<Connections, Errno> {
        let connections = Connections::new(Arc::default())?;
        let place = |at| SocketAddr::new(address(0), at as u16);
        connections.adopt((0..CONNECTIONS).map(|at| Connection {
            end: End::Client,
            namespace: 1,
            place: Place::new(at as u64, place(at), place(at)),
            flow: self.flow(at),
            own: Options::unset(false),
            port: None,
        }));
        Ok(connections)
    }
}

fn namespace(workload: usize) -> String {
    format!("n{}", workload / NEIGHBOURS)
}

fn app(workload: usize) -> String {
    format!("a{workload}")
}

fn address(at: usize) -> IpAddr {
    let first = u32::from(Ipv4Addr::new(10, 50, 0, 2));
    Ipv4Addr::from(first + at as u32).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Verdict;

    #[test]
    fn a_measured_policy_has_the_rules_that_decide() {
        let cost = measure(20, 60).unwrap();
        assert_eq!((cost.rules, cost.containers), (20, 60));
        let cluster = Cluster { workloads: 100, containers: 300 };
        let in_effect = InEffect::new(Arc::new(cluster.policy()), Arc::new(cluster.known(None)));
        let allowed = |at| matches!(in_effect.verdict(cluster.flow(at)), Verdict::Allow(_));
        assert!((0..CONNECTIONS).any(allowed) && !(0..CONNECTIONS).all(allowed));
    }
}
