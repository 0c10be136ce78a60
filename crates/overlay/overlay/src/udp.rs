//! Rules for UDP, as a table of nftables in the network namespaces of containers.
//!
//! Datagrams never leave the overlay, so the kernel decides about them where the containers are. A
//! namespace is in one of these states, and the table is replaced in one transaction:
//!
//! ```text
//!            a supervisor comes                    another policy, other labels
//! Unknown ───────────────────────► Applied(text) ◄───────────────────────────────┐
//!    (of a former router's time,        │   └──────────────────────────────────────┘
//!     if that left tables)              │ the last supervisor goes, no rules for UDP, the router ends
//!                                       ▼
//!                                    removed
//! ```
//!
//! A rule that may match, because labels are not known, accepts: the overlay's own policy decides.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::blocking_pool::elsewhere;
use crate::lock::lock;
use crate::namespace::Namespace;
use crate::policy::{InEffect, UdpRule, UdpVerdict};
use crate::shared::Shared;
use crate::tools;

/// The interval at which namespaces without supervisors are looked for.
const LOOK: Duration = Duration::from_millis(500);
const TABLE: &str = "inet shunt_overlay";

/// The tables that are in effect.
#[derive(Debug, Default)]
pub(crate) struct Udp {
    state: Mutex<State>,
    /// Notified when a pass is needed.
    wanted: Notify,
    /// Held during a pass.
    pass: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// The policy of which `text` was made.
    policy: Weak<InEffect>,
    /// The table. `None`: there are no rules for UDP.
    text: Option<Arc<str>>,
    /// The namespaces that have a table, by their cookies, with its text.
    applied: HashMap<u64, (Arc<Namespace>, Arc<str>)>,
    /// A former router has left tables, so namespaces may have one that this router has not made.
    is_left: bool,
    /// Why namespaces lack their table, by the error, with their number.
    failed: BTreeMap<String, usize>,
}

/// Removes tables that a former router has left, from now on.
pub(crate) fn begin(shared: &Shared) {
    lock(&shared.udp.state).is_left = place(shared).exists();
}

/// Applies the rules to the namespaces of containers that come and go, for ever.
pub(crate) async fn run(shared: &Arc<Shared>) {
    loop {
        let _ = timeout(LOOK, shared.udp.wanted.notified()).await;
        apply(shared).await;
    }
}

impl Udp {
    /// Requests another pass.
    pub(crate) fn want(&self) {
        self.wanted.notify_one();
    }

    /// Returns the number of namespaces with a table, and of those that lack theirs, by the error.
    pub(crate) fn report(&self) -> Value {
        let state = lock(&self.state);
        json!({ "namespaces": state.applied.len(), "failed": state.failed })
    }
}

/// Brings the tables of all namespaces up to date.
pub(crate) async fn apply(shared: &Arc<Shared>) {
    let _pass = shared.udp.pass.lock().await;
    let text = text(shared).await;
    let here: HashMap<u64, Arc<Namespace>> = shared.registry.by_cookie().into_iter().collect();
    let (to_make, to_remove) = {
        let state = lock(&shared.udp.state);
        let is_current = |cookie: &u64| {
            let applied = state.applied.get(cookie).map(|(_, applied)| applied);
            applied == text.as_ref() && !(applied.is_none() && state.is_left)
        };
        let to_make: Vec<_> = here.iter().filter(|(cookie, _)| !is_current(cookie)).map(copied).collect();
        let is_over = |cookie: &u64| text.is_none() || !here.contains_key(cookie);
        let over = state.applied.iter().filter(|(cookie, _)| is_over(cookie));
        let to_remove: Vec<_> = over.map(|(cookie, (namespace, _))| (*cookie, namespace.clone())).collect();
        (if text.is_some() || state.is_left { to_make } else { Vec::new() }, to_remove)
    };
    if to_make.is_empty() && to_remove.is_empty() {
        return;
    }
    let place = place(shared);
    if text.is_some() {
        let _ = std::fs::write(&place, "");
    }
    let mut failed = BTreeMap::new();
    for (cookie, namespace) in to_make {
        let (script, inside) = (script(text.as_deref()), namespace.clone());
        match (elsewhere(move || nft(&inside, &script)).await, &text) {
            (Ok(()), Some(text)) => {
                lock(&shared.udp.state).applied.insert(cookie, (namespace, text.clone()));
            }
            (Ok(()), None) => {}
            (Err(error), _) => *failed.entry(error.to_string()).or_default() += 1,
        }
    }
    for (cookie, namespace) in to_remove {
        let removed = elsewhere(move || nft(&namespace, &script(None))).await;
        if let Err(error) = removed {
            tracing::warn!(%error, "rules for UDP stay in a container");
        }
        lock(&shared.udp.state).applied.remove(&cookie);
    }
    let mut state = lock(&shared.udp.state);
    if failed != state.failed {
        for (error, count) in &failed {
            tracing::warn!(count, error, "rules for UDP are not in effect in containers");
        }
    }
    state.failed = failed;
    if text.is_none() && state.failed.is_empty() {
        state.is_left = false;
        let _ = std::fs::remove_file(&place);
    }
}

/// Returns the table for the policy in effect. Makes it on another thread, once for each policy.
async fn text(shared: &Arc<Shared>) -> Option<Arc<str>> {
    let policy = shared.connections.policy();
    {
        let state = lock(&shared.udp.state);
        if state.policy.as_ptr() == Arc::as_ptr(&policy) {
            return state.text.clone();
        }
    }
    let (loaded, of) = (shared.loaded(), policy.clone());
    let text = elsewhere(move || table(&of, &loaded.config.prefixes).map(Arc::from)).await;
    let mut state = lock(&shared.udp.state);
    (state.policy, state.text) = (Arc::downgrade(&policy), text);
    state.text.clone()
}

fn copied((cookie, namespace): (&u64, &Arc<Namespace>)) -> (u64, Arc<Namespace>) {
    (*cookie, namespace.clone())
}

/// Removes all tables, when the router ends.
pub(crate) async fn end(shared: &Arc<Shared>) {
    let applied = std::mem::take(&mut lock(&shared.udp.state).applied);
    let place = place(shared);
    let removed =
        elsewhere(move || applied.into_values().all(|(inside, _)| nft(&inside, &script(None)).is_ok()));
    if removed.await {
        let _ = std::fs::remove_file(place);
    }
}

/// The file that exists while namespaces may have a table.
fn place(shared: &Shared) -> PathBuf {
    shared.loaded().config.control.with_extension("udp")
}

/// Returns the text that replaces a table, or removes it.
fn script(table: Option<&str>) -> String {
    format!("table {TABLE}\ndelete table {TABLE}\n{}", table.unwrap_or_default())
}

/// Runs nft in a network namespace.
fn nft(namespace: &Namespace, script: &str) -> io::Result<()> {
    let run = || tools::run("nft", "nftables", &["-f", "-"], script).map_err(io::Error::other);
    namespace.inside(run).map(drop)
}

/// Returns the table, or `None` if the policy has no rules for UDP.
fn table(policy: &InEffect, overlay: &[IpNet]) -> Option<String> {
    let rules = policy.udp_rules(overlay);
    if rules.is_empty() {
        return None;
    }
    let mut text = format!("table {TABLE} {{\n\tchain rules {{\n");
    for rule in &rules {
        line(&mut text, rule);
    }
    text += "\t}\n";
    let (v4, v6) = divided(overlay);
    for hook in ["input", "output"] {
        let _ = write!(
            text,
            "\tchain {hook} {{\n\t\ttype filter hook {hook} priority filter; policy accept;\n\
             \t\tmeta l4proto != udp accept\n\t\tmeta iif lo accept\n\t\tmeta oif lo accept\n\
             \t\tct state established,related accept\n"
        );
        for (family, nets) in [("ip", v4.as_slice()), ("ip6", v6.as_slice())] {
            if !nets.is_empty() {
                let set = nets.join(", ");
                let _ = writeln!(text, "\t\t{family} saddr {{ {set} }} jump rules");
                let _ = writeln!(text, "\t\t{family} daddr {{ {set} }} jump rules");
            }
        }
        text += "\t}\n";
    }
    Some(text + "}\n")
}

/// Writes the lines of a rule, one for each family that it can match.
fn line(text: &mut String, rule: &UdpRule) {
    let verdict = match rule.verdict {
        UdpVerdict::Accept => "accept",
        UdpVerdict::Reject => "reject",
        UdpVerdict::Drop => "drop",
    };
    let ends = |nets: &Option<Vec<IpNet>>| match nets {
        None => (None, None),
        Some(nets) => {
            let (v4, v6) = divided(nets);
            (Some(v4), Some(v6))
        }
    };
    let ((from4, from6), (to4, to6)) = (ends(&rule.from), ends(&rule.to));
    let is_any = rule.from.is_none() && rule.to.is_none();
    for (family, from, to) in [("ip", from4, to4), ("ip6", from6, to6)] {
        let is_never = [&from, &to].into_iter().any(|it| it.as_ref().is_some_and(Vec::is_empty));
        if is_never || is_any && family == "ip6" {
            continue;
        }
        text.push_str("\t\t");
        for (word, nets) in [("saddr", from), ("daddr", to)] {
            if let Some(nets) = nets {
                let _ = write!(text, "{family} {word} {{ {} }} ", nets.join(", "));
            }
        }
        for (word, ports) in [("sport", &rule.source_ports), ("dport", &rule.ports)] {
            if let Some(ports) = ports {
                let ports: Vec<String> =
                    ports.iter().map(|it| format!("{}-{}", it.start(), it.end())).collect();
                let _ = write!(text, "udp {word} {{ {} }} ", ports.join(", "));
            }
        }
        let _ = writeln!(text, "{verdict}");
    }
}

/// Returns the prefixes of each family, joined where they touch.
fn divided(nets: &[IpNet]) -> (Vec<String>, Vec<String>) {
    let of = |it: &IpNet| match it {
        IpNet::V4(net) => (Some(*net), None),
        IpNet::V6(net) => (None, Some(*net)),
    };
    let (v4, v6): (Vec<Option<Ipv4Net>>, Vec<Option<Ipv6Net>>) = nets.iter().map(of).unzip();
    let v4 = Ipv4Net::aggregate(&v4.into_iter().flatten().map(|it| it.trunc()).collect());
    let v6 = Ipv6Net::aggregate(&v6.into_iter().flatten().map(|it| it.trunc()).collect());
    (v4.iter().map(Ipv4Net::to_string).collect(), v6.iter().map(Ipv6Net::to_string).collect())
}
