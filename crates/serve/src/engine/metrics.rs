//! Formats a service's counters for Prometheus, and as JSON for `shunt serve status`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{Atomic, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use super::counts::{Counts, KERNEL, USER};
use super::shared::{Engine, Shared};
use crate::service::layout::{Fill, Kind, Observed, Part};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct One {
    service: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByEngine {
    service: String,
    engine: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByReason {
    service: String,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByTable {
    table: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByBackend {
    service: String,
    backend: String,
}

/// Returns the counters in the text format of Prometheus.
pub(crate) fn text(shared: &Shared) -> String {
    let (counts, service) = (Counts::sum(shared.counts.all()), shared.service.name().to_owned());
    let mut registry = Registry::with_prefix("shunt_serve");
    let one = || One { service: service.clone() };
    let by_engine = |engine| ByEngine { service: service.clone(), engine };
    let by_reason = |reason| ByReason { service: service.clone(), reason };

    let total = |registry: &mut Registry, name: &str, help: &str, value: u64| {
        let family = Family::<One, Counter>::default();
        set(&family.get_or_create(&one()), value);
        registry.register(name, help, family);
    };
    total(&mut registry, "clients", "Clients that connected", counts.clients.value());
    total(&mut registry, "replies", "Replies of backends", counts.replies.value());
    total(&mut registry, "retried", "Messages that were sent again", counts.retried.value());
    let unacknowledged = "Bytes under way to backends whose connections broke";
    total(&mut registry, "unacknowledged_bytes", unacknowledged, counts.unacknowledged.value());

    let (messages, bytes) = (Family::<ByEngine, Counter>::default(), Family::<ByEngine, Counter>::default());
    let open = Family::<ByEngine, Gauge>::default();
    for (at, engine) in [(USER, "user"), (KERNEL, "kernel")] {
        set(&messages.get_or_create(&by_engine(engine)), counts.messages[at].value());
        set(&bytes.get_or_create(&by_engine(engine)), counts.bytes[at].value());
    }
    let in_kernel = counts.in_kernel.load(Relaxed);
    open.get_or_create(&by_engine("kernel")).set(in_kernel);
    open.get_or_create(&by_engine("user")).set(counts.open.load(Relaxed) - in_kernel);
    registry.register("messages", "Messages of clients, by the engine that served them", messages);
    registry.register("bytes", "Bytes of these messages", bytes);
    registry.register("open_connections", "Clients that are connected, by the engine that has them", open);
    let queued = Family::<One, Gauge>::default();
    queued.get_or_create(&one()).set(counts.queued.load(Relaxed));
    registry.register("queued_bytes", "Bytes that wait in user space", queued);

    let (drops, moves) = (Family::<ByReason, Counter>::default(), Family::<ByReason, Counter>::default());
    for (reason, count) in counts.drops() {
        set(&drops.get_or_create(&by_reason(reason)), count);
    }
    for (reason, count) in counts.moves() {
        set(&moves.get_or_create(&by_reason(reason.label())), count);
    }
    registry.register("drops", "Messages that did not reach anybody, by reason", drops);
    registry.register("moves", "Conversations that changed engines, by reason", moves);
    backends(shared, &service, &mut registry);
    state(shared, &service, &mut registry);

    let mut text = String::new();
    encode(&mut text, &registry).expect("a string takes everything");
    text
}

fn backends(shared: &Shared, service: &str, registry: &mut Registry) {
    let family = Family::<ByBackend, Counter>::default;
    let (messages, bytes, connected, failed) = (family(), family(), family(), family());
    let well = Family::<ByBackend, Gauge>::default();
    for backend in &shared.backends().1.list {
        let label = ByBackend { service: service.to_owned(), backend: backend.address.to_string() };
        let [sent, sent_bytes, connections] = backend.totals();
        set(&messages.get_or_create(&label), sent);
        set(&bytes.get_or_create(&label), sent_bytes);
        set(&connected.get_or_create(&label), connections);
        set(&failed.get_or_create(&label), backend.failed.value());
        well.get_or_create(&label).set(backend.is_well().into());
    }
    registry.register("backend_messages", "Messages sent on to a backend", messages);
    registry.register("backend_bytes", "Bytes of these messages", bytes);
    registry.register("backend_connections", "Connections made to a backend", connected);
    registry.register("backend_failures", "Connections to a backend that failed or broke", failed);
    registry.register("backend_up", "Whether a backend worked when it was last tried", well);
}

/// Adds the counters and histograms of the service's state, and how full its tables are.
fn state(shared: &Shared, service: &str, registry: &mut Registry) {
    let label = (Cow::Borrowed("service"), Cow::Owned(service.to_owned()));
    let registry = registry.sub_registry_with_prefix("state").sub_registry_with_label(label);
    let family = Family::<ByTable, Gauge>::default;
    let (entries, capacity) = (family(), family());
    let (evicted, refused) = (Family::<ByTable, Counter>::default(), Family::<ByTable, Counter>::default());
    for part in &shared.layout.parts {
        let table = || ByTable { table: part.name.clone() };
        if let Some(fill) = part.fill(&shared.store) {
            entries.get_or_create(&table()).set(fill.entries.cast_signed());
            capacity.get_or_create(&table()).set(fill.capacity.cast_signed());
            set(&evicted.get_or_create(&table()), fill.evicted);
            set(&refused.get_or_create(&table()), fill.refused);
        } else if matches!(part.kind, Kind::Histogram) {
            registry.register(&part.name, "A histogram of the service", part.observed(&shared.store));
        } else {
            let counter = Counter::<u64>::default();
            set(&counter, part.count(&shared.store));
            registry.register(&part.name, "A counter of the service", counter);
        }
    }
    for (name, value, grows) in shared.service.measures() {
        if grows {
            let counter = Counter::<u64>::default();
            set(&counter, value);
            registry.register(name, "A counter of the service", counter);
        } else {
            let gauge = Gauge::<i64>::default();
            gauge.set(value.cast_signed());
            registry.register(name, "A measure of the service", gauge);
        }
    }
    registry.register("table_entries", "Entries of a table of the service", entries);
    registry.register("table_capacity", "The most entries of the table", capacity);
    registry.register("table_evictions", "Entries that made room for others", evicted);
    registry.register("table_refusals", "Entries for which there was no room", refused);
}

impl EncodeMetric for Observed {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let last = self.buckets.len() - 1;
        let limit = |bits: usize| if bits == last { f64::MAX } else { ((1_u64 << bits) - 1) as f64 };
        let buckets: Vec<(f64, u64)> =
            self.buckets.iter().enumerate().map(|(bits, count)| (limit(bits), *count)).collect();
        encoder.encode_histogram::<NoLabelSet>(self.sum as f64, self.buckets.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Returns the parts of the service's state, with values and counts.
fn parts(shared: &Shared) -> Vec<Value> {
    let part = |part: &Part| match (&part.kind, part.fill(&shared.store)) {
        (_, Some(Fill { entries, capacity, evicted, refused })) => json!({
            "name": part.name,
            "kind": part.kind(),
            "entries": entries,
            "capacity": capacity,
            "evicted": evicted,
            "refused": refused,
        }),
        (Kind::Histogram, None) => {
            let Observed { sum, buckets } = part.observed(&shared.store);
            let count: u64 = buckets.iter().sum();
            json!({ "name": part.name, "kind": part.kind(), "count": count, "sum": sum })
        }
        (_, None) => {
            json!({ "name": part.name, "kind": part.kind(), "value": part.count(&shared.store) })
        }
    };
    let measures = shared.service.measures().into_iter().map(measure);
    shared.layout.parts.iter().map(part).chain(measures).collect()
}

/// Returns a measure of the service in the form of a part of its state.
pub(crate) fn measure((name, value, grows): (&'static str, u64, bool)) -> Value {
    json!({ "name": name, "kind": if grows { "counter" } else { "gauge" }, "value": value })
}

/// Returns the JSON for `shunt serve status`.
pub(crate) fn status(shared: &Shared) -> Value {
    let (counts, (_, backends)) = (Counts::sum(shared.counts.all()), shared.backends());
    let half = shared.half.summary();
    let engine =
        |at: usize| json!({ "messages": counts.messages[at].value(), "bytes": counts.bytes[at].value() });
    let moves: Vec<Value> = counts
        .moves()
        .filter(|(_, count)| *count > 0)
        .map(|(why, count)| json!({ "reason": why.label(), "count": count, "text": why.text() }))
        .collect();
    let drops: BTreeMap<&str, u64> = counts.drops().filter(|(_, count)| *count > 0).collect();
    let backends: Vec<Value> = backends
        .list
        .iter()
        .enumerate()
        .map(|(at, backend)| {
            let [messages, bytes, connections] = backend.totals();
            json!({
                "kernel": at < half.reach,
                "address": backend.address.to_string(),
                "weight": backend.weight,
                "up": backend.is_well(),
                "messages": messages,
                "bytes": bytes,
                "connections": connections,
                "failures": backend.failed.value(),
            })
        })
        .collect();
    json!({
        "service": shared.service.name(),
        "engine": if half.refusal.is_some() { Engine::User } else { shared.engine },
        "kernel-half": half.state,
        "without-kernel": half.refusal,
        "stays-in-map": half.stays,
        "clients": counts.clients.value(),
        "open-connections": counts.open.load(Relaxed),
        "in-kernel": counts.in_kernel.load(Relaxed),
        "queued-bytes": counts.queued.load(Relaxed),
        "user": engine(USER),
        "kernel": engine(KERNEL),
        "replies": counts.replies.value(),
        "retried": counts.retried.value(),
        "unacknowledged-bytes": counts.unacknowledged.value(),
        "drops": drops,
        "moves": moves,
        "backends": backends,
        "registrations": shared.registrar.counts(),
        "state": parts(shared),
    })
}

fn set(counter: &Counter, value: u64) {
    // The counter was created for this page, so it starts at 0.
    counter.inner().inc_by(value);
}
