//! The counters of a router since its start: connections by end, network path and reason.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use serde_json::{Value, json};
use shunt_control::SET_UP_BUCKETS;

use crate::kubernetes::Feed;
use crate::reason::Reason;
use crate::registry::Registered;
use crate::shared::Shared;

/// The end of a connection that is on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The end that connected.
    Client,
    /// The end that accepted.
    Server,
}

impl End {
    fn label(self) -> &'static str {
        match self {
            End::Client => "client",
            End::Server => "server",
        }
    }
}

/// The counters.
#[derive(Debug)]
pub(crate) struct Metrics {
    counts: Mutex<Counts>,
    set_up: Histogram,
}

#[derive(Debug, Default)]
struct Counts {
    client: Paths,
    server: Paths,
    unaccounted: u64,
    strangers: u64,
    reset: u64,
}

#[derive(Debug, Default)]
struct Paths {
    host: u64,
    overlay: BTreeMap<Reason, u64>,
    denied: BTreeMap<Reason, u64>,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics { counts: Mutex::default(), set_up: Histogram::new(SET_UP_BUCKETS) }
    }
}

impl Metrics {
    /// Records the time from the program's call until its connection was on the host network.
    pub(crate) fn set_up(&self, time: Duration) {
        self.set_up.observe(time.as_secs_f64());
    }

    /// Counts a connection on the host network.
    pub(crate) fn took(&self, end: End) {
        self.with(|counts| counts.of(end).host += 1);
    }

    /// Counts a connection that stays on the overlay, or that the policy denies.
    pub(crate) fn stayed(&self, end: End, reason: Reason) {
        self.with(|counts| {
            let paths = counts.of(end);
            let path = if reason.denial().is_some() { &mut paths.denied } else { &mut paths.overlay };
            *path.entry(reason).or_default() += 1;
        });
    }

    /// Counts a connection to the router's port that is not by a router of this overlay. Returns
    /// `true` the first time, which is worth a line in the log.
    pub(crate) fn stranger(&self) -> bool {
        let mut counts = self.counts.lock().expect(NEVER);
        counts.strangers += 1;
        counts.strangers == 1
    }

    /// Counts a host connection whose socket is in the router's control group instead of the
    /// container's.
    pub(crate) fn unaccounted(&self) {
        self.with(|counts| counts.unaccounted += 1);
    }

    /// Counts a committed connection that was reset because no process could accept it any more.
    pub(crate) fn reset(&self) {
        self.with(|counts| counts.reset += 1);
    }

    pub(crate) fn report(&self) -> Value {
        let paths = |paths: &Paths| {
            let labelled = |counts: &BTreeMap<Reason, u64>| -> BTreeMap<&str, u64> {
                counts.iter().map(|(reason, count)| (reason.label(), *count)).collect()
            };
            json!({
                "host": paths.host,
                "overlay": labelled(&paths.overlay),
                "denied": labelled(&paths.denied),
            })
        };
        let counts = self.counts.lock().expect(NEVER);
        json!({
            "client": paths(&counts.client),
            "server": paths(&counts.server),
            "unaccounted": counts.unaccounted,
            "strangers": counts.strangers,
            "reset": counts.reset,
        })
    }

    /// Returns the metrics in the text format of Prometheus.
    pub(crate) fn text(&self, shared: &Shared) -> String {
        let mut registry = Registry::with_prefix("shunt_overlay");
        self.totals(&mut registry);
        levels(&mut registry, shared);
        let mut text = String::new();
        encode(&mut text, &registry).expect("a string takes everything");
        text
    }

    fn totals(&self, registry: &mut Registry) {
        let counts = self.counts.lock().expect(NEVER);
        let taken = Family::<Taken, Counter>::default();
        for (end, paths) in [(End::Client, &counts.client), (End::Server, &counts.server)] {
            let set = |path, reason, count| {
                let label = Taken { end: end.label(), path, reason };
                taken.get_or_create(&label).inc_by(count);
            };
            set("host", "none", paths.host);
            // Exports all reasons, those that have not happened yet as 0. So a first occurrence is
            // visible as a change.
            for reason in Reason::ALL {
                let (path, counts) = match reason.denial() {
                    Some(_) => ("none", &paths.denied),
                    None => ("overlay", &paths.overlay),
                };
                set(path, reason.label(), counts.get(reason).copied().unwrap_or(0));
            }
        }
        registry.register("connections", "Ends of connections, by the path that they took", taken);
        for (name, help, count) in [
            (
                "unaccounted",
                "Host connections that are not of the container's control group",
                counts.unaccounted,
            ),
            ("strangers", "Connections to the router's port that were no router's", counts.strangers),
            ("resets", "Connections reset because nobody could accept them any more", counts.reset),
        ] {
            let counter = Counter::<u64>::default();
            counter.inc_by(count);
            registry.register(name, help, counter);
        }
        let help = "From a program's call to its connection's being on the host network";
        registry.register_with_unit("set_up", help, Unit::Seconds, self.set_up.clone());
    }

    fn with(&self, count: impl FnOnce(&mut Counts)) {
        count(&mut self.counts.lock().expect(NEVER));
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Taken {
    end: &'static str,
    path: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Of {
    end: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct By {
    rule: String,
}

/// Adds the gauges.
fn levels(registry: &mut Registry, shared: &Shared) {
    let open = Family::<Of, Gauge>::default();
    for end in [End::Client, End::Server] {
        open.get_or_create(&Of { end: end.label() }).set(shared.connections.count(end) as i64);
    }
    registry.register("open_connections", "Ends of connections on the host network", open);

    let policy = shared.connections.policy();
    let counts = shared.connections.by_rule(&policy);
    let by_rule = Family::<By, Gauge>::default();
    let names = policy.policy.names().enumerate().map(|(at, name)| (Some(at), name));
    for (rule, name) in names.chain([(None, "default")]) {
        let count = counts.get(&rule).copied().unwrap_or(0);
        by_rule.get_or_create(&By { rule: name.to_owned() }).inc_by(count as i64);
    }
    let help = "Ends of connections on the host network, by the rule of the policy that permits them";
    registry.register("permitted_connections", help, by_rule);

    kubernetes(registry, shared);
    in_band(registry, shared);
    let Registered { supervisors, namespaces, listeners } = shared.registry.counts();
    for (name, help, count) in [
        ("supervisors", "Supervisors of programs", supervisors),
        ("namespaces", "Network namespaces with supervised programs", namespaces),
        ("listeners", "Listening sockets of supervised programs", listeners),
        ("promises", "Connections that wait to be accepted", shared.promises.count()),
    ] {
        let gauge = Gauge::<i64>::default();
        gauge.set(count as i64);
        registry.register(name, help, gauge);
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Resource {
    resource: &'static str,
}

/// Adds the state of the Kubernetes API as a source, if it is one.
fn kubernetes(registry: &mut Registry, shared: &Shared) {
    let feeds = shared.kubernetes.feeds();
    if feeds.is_empty() {
        return;
    }
    type Value = fn(&Feed) -> u64;
    let gauges: [(&str, &str, Value); 3] = [
        ("kubernetes_connected", "Is the API server connected", |it| it.is_connected.into()),
        ("kubernetes_objects", "Objects of the API server that are known", |it| it.objects as u64),
        ("kubernetes_answer_age_seconds", "Time since the API server has answered", |it| {
            it.answered.map_or(0, |at| at.elapsed().as_secs())
        }),
    ];
    for (name, help, value) in gauges {
        let family = Family::<Resource, Gauge>::default();
        for (resource, feed) in &feeds {
            family.get_or_create(&Resource { resource }).set(value(feed) as i64);
        }
        registry.register(name, help, family);
    }
    let counters: [(&str, &str, Value); 4] = [
        ("kubernetes_lists", "Complete lists that the API server has sent", |it| it.lists),
        ("kubernetes_changes", "Changes that the API server has sent", |it| it.changes),
        ("kubernetes_expired", "Times that the API server no longer had a version (410)", |it| it.expired),
        ("kubernetes_failures", "Failures of the API server", |it| it.failures),
    ];
    for (name, help, value) in counters {
        let family = Family::<Resource, Counter>::default();
        for (resource, feed) in &feeds {
            family.get_or_create(&Resource { resource }).inc_by(value(feed));
        }
        registry.register(name, help, family);
    }
    if let Some(refused) = shared.kubernetes.refused() {
        let gauge = Gauge::<i64>::default();
        gauge.set(refused as i64);
        registry.register("kubernetes_refused_policies", "NetworkPolicies that cannot be enforced", gauge);
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Found {
    state: &'static str,
}

/// Adds the state of in-band discovery, if it is configured.
fn in_band(registry: &mut Registry, shared: &Shared) {
    let Some(in_band) = &shared.in_band else { return };
    let containers = Family::<Found, Gauge>::default();
    for (state, count) in in_band.states() {
        containers.get_or_create(&Found { state }).set(count as i64);
    }
    registry.register(
        "in_band_containers",
        "Containers that in-band discovery looks for, by their state",
        containers,
    );
    let hints = Family::<Outcome, Counter>::default();
    for (result, count) in in_band.results() {
        hints.get_or_create(&Outcome { result }).inc_by(count);
    }
    registry.register("in_band_hints", "Hints and options of in-band discovery, by their outcome", hints);
}

impl Counts {
    fn of(&mut self, end: End) -> &mut Paths {
        match end {
            End::Client => &mut self.client,
            End::Server => &mut self.server,
        }
    }
}

const NEVER: &str = "nobody panics while it is locked";
