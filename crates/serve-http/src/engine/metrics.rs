//! Formats the counters for Prometheus, and as JSON for `shunt serve status`.

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use super::counts::{BUCKETS, BackendCounts, Count, Counts, Failure};
use super::server::SERVICE;
use super::shared::Shared;
use crate::config::Config;
use crate::message::Refusal;

type Label = Vec<(&'static str, String)>;

impl Shared {
    /// Returns the sum of a counter of all threads.
    fn sum(&self, of: impl Fn(&Counts) -> &Count) -> u64 {
        self.counts.iter().map(|counts| of(counts).value()).fold(0, u64::wrapping_add)
    }

    fn backend_sum(&self, id: usize, of: impl Fn(&BackendCounts) -> &Count) -> u64 {
        let counts = self.backend_counts.lock().expect("no thread panics with it");
        let own = counts.iter().filter(|(other, _)| *other == id);
        own.map(|(_, counts)| of(counts).value()).fold(0, u64::wrapping_add)
    }
}

/// A counter of a thread, with its name and its meaning.
type Total = (&'static str, &'static str, fn(&Counts) -> &Count);

const TOTALS: [Total; 16] = [
    ("clients", "Clients that connected", |counts| &counts.clients),
    ("requests", "Requests whose heads were accepted", |counts| &counts.requests),
    ("received_bytes", "Bytes of the bodies of requests", |counts| &counts.received_bytes),
    ("sent_bytes", "Bytes of the bodies of replies", |counts| &counts.sent_bytes),
    ("spliced_bytes", "Bytes of bodies that stayed in the kernel", |counts| &counts.spliced_bytes),
    ("retries", "Requests that were sent again", |counts| &counts.retries),
    ("upgrades", "Connections that have switched to another protocol", |counts| &counts.upgrades),
    ("aborted", "Replies that did not reach their client as a whole", |counts| &counts.aborted),
    ("cache_hits", "Requests that a stored reply answered", |counts| &counts.cache_hits),
    ("cache_recalled", "Those that were not parsed, as they were answered before", |counts| {
        &counts.cache_recalled
    }),
    ("cache_validated", "Stored replies that a backend has said are still right", |counts| {
        &counts.cache_validated
    }),
    ("cache_misses", "Requests of routes with a cache that went to a backend", |counts| &counts.cache_misses),
    ("cache_collapsed", "Requests that waited for the reply to another one", |counts| {
        &counts.cache_collapsed
    }),
    ("cache_stored", "Replies that were stored", |counts| &counts.cache_stored),
    ("cache_refused", "Replies that may not be stored, or are too long", |counts| &counts.cache_refused),
    ("evicted", "Clients between two requests that were closed to make room", |counts| &counts.evicted),
];

/// Returns the counters in the text format of Prometheus.
pub(crate) fn text(shared: &Shared) -> String {
    let mut registry = Registry::with_prefix("shunt_http");
    for (name, help, of) in TOTALS {
        counters(&mut registry, name, help, [(Vec::new(), shared.sum(of))]);
    }
    counters(
        &mut registry,
        "lost_log_lines",
        "Lines of the access log that were not written",
        [(Vec::new(), shared.sum(|counts| &counts.lost_log_lines))],
    );
    let open = Gauge::<i64>::default();
    open.set(shared.sum(|counts| &counts.open) as i64);
    registry.register("open_connections", "Clients that are connected", open);
    let config = shared.current().config;
    let (entries, bytes, evicted) = cached(&config);
    let (cache_entries, cache_bytes) = (Gauge::<i64>::default(), Gauge::<i64>::default());
    cache_entries.set(entries as i64);
    cache_bytes.set(bytes as i64);
    registry.register("cache_entries", "Stored replies", cache_entries);
    registry.register("cache_bytes", "Bytes of stored replies", cache_bytes);
    counters(
        &mut registry,
        "cache_evictions",
        "Stored replies that made room for others, since the file was read",
        [(Vec::new(), evicted)],
    );
    let statuses = (0..5)
        .map(|at| (vec![("class", format!("{}xx", at + 1))], shared.sum(|counts| &counts.statuses[at])));
    counters(&mut registry, "responses", "Replies, by the class of their status", statuses);
    let refusals = Refusal::ALL.iter().enumerate();
    let refusals = refusals.map(|(at, why)| {
        (vec![("reason", why.label().to_owned())], shared.sum(|counts| &counts.refusals[at]))
    });
    counters(&mut registry, "refused", "Requests that are no valid HTTP, by reason", refusals);
    let failures = Failure::ALL.iter();
    let failures = failures.map(|why| {
        (vec![("reason", why.label().to_owned())], shared.sum(|counts| &counts.failures[*why as usize]))
    });
    counters(&mut registry, "failed", "Requests that the proxy itself answered, by reason", failures);
    let buckets = (0..BUCKETS).map(|at| {
        let below = if at == BUCKETS - 1 { f64::MAX } else { (1u64 << at) as f64 / 1e6 };
        (below, shared.sum(|counts| &counts.durations[at]))
    });
    let durations =
        Durations { buckets: buckets.collect(), sum: shared.sum(|counts| &counts.duration_sum) as f64 / 1e6 };
    registry.register(
        "request_duration_seconds",
        "From the head of a request to the end of its reply",
        durations,
    );
    backends(shared, &mut registry);
    let mut text = String::new();
    encode(&mut text, &registry).expect("a string takes everything");
    text
}

fn backends(shared: &Shared, registry: &mut Registry) {
    let config = shared.current().config;
    let rows = |of: &dyn Fn(&super::backends::Backend) -> u64| -> Vec<(Label, u64)> {
        let label = |pool: &str, address: std::net::SocketAddr| {
            vec![("pool", pool.to_owned()), ("backend", address.to_string())]
        };
        config.backends().map(|(pool, backend)| (label(&pool.name, backend.address), of(backend))).collect()
    };
    counters(
        registry,
        "backend_requests",
        "Requests sent to a backend",
        rows(&|backend| shared.backend_sum(backend.id, |counts| &counts.requests)),
    );
    counters(
        registry,
        "backend_connections",
        "Connections made to a backend",
        rows(&|backend| shared.backend_sum(backend.id, |counts| &counts.connections)),
    );
    counters(
        registry,
        "backend_failures",
        "Failed connections and checks of a backend",
        rows(&|backend| backend.failed.load(std::sync::atomic::Ordering::Relaxed)),
    );
    gauges(
        registry,
        "backend_open_connections",
        "Connections to a backend",
        rows(&|backend| shared.backend_sum(backend.id, |counts| &counts.open)),
    );
    gauges(
        registry,
        "backend_unused_connections",
        "Those of them that no request uses",
        rows(&|backend| shared.backend_sum(backend.id, |counts| &counts.idle)),
    );
    gauges(
        registry,
        "backend_up",
        "Whether a backend worked when it was last tried",
        rows(&|backend| backend.is_up().into()),
    );
}

fn counters(registry: &mut Registry, name: &str, help: &str, rows: impl IntoIterator<Item = (Label, u64)>) {
    let family = Family::<Label, Counter>::default();
    for (label, value) in rows {
        family.get_or_create(&label).inc_by(value);
    }
    registry.register(name, help, family);
}

fn gauges(registry: &mut Registry, name: &str, help: &str, rows: impl IntoIterator<Item = (Label, u64)>) {
    let family = Family::<Label, Gauge>::default();
    for (label, value) in rows {
        family.get_or_create(&label).set(value as i64);
    }
    registry.register(name, help, family);
}

/// A histogram whose buckets are counted elsewhere.
#[derive(Debug)]
struct Durations {
    buckets: Vec<(f64, u64)>,
    sum: f64,
}

impl EncodeMetric for Durations {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let count = self.buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(self.sum, count, &self.buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Returns the number, the bytes and the evictions of stored replies.
fn cached(config: &Config) -> (usize, usize, u64) {
    config.routes.caches().fold((0, 0, 0), |(entries, bytes, evicted), store| {
        let (more, longer) = store.fill();
        let gone = store.evicted.load(std::sync::atomic::Ordering::Relaxed);
        (entries + more, bytes + longer, evicted + gone)
    })
}

/// Returns the counters as JSON.
pub(crate) fn status(shared: &Shared) -> Value {
    let config = shared.current().config;
    let by = |label: &'static str, count: u64| (count > 0).then(|| (label.to_owned(), json!(count)));
    let refused = Refusal::ALL.iter().enumerate();
    let refused = refused.filter_map(|(at, why)| by(why.label(), shared.sum(|counts| &counts.refusals[at])));
    let failed = Failure::ALL.iter();
    let failed =
        failed.filter_map(|why| by(why.label(), shared.sum(|counts| &counts.failures[*why as usize])));
    let backends = config.backends().map(|(pool, backend)| {
        json!({
            "pool": pool.name,
            "address": backend.address,
            "up": backend.is_up(),
            "requests": shared.backend_sum(backend.id, |counts| &counts.requests),
            "connections": shared.backend_sum(backend.id, |counts| &counts.connections),
            "open-connections": shared.backend_sum(backend.id, |counts| &counts.open),
            "unused-connections": shared.backend_sum(backend.id, |counts| &counts.idle),
            "failures": backend.failed.load(std::sync::atomic::Ordering::Relaxed),
        })
    });
    let mut status = json!({
        "service": SERVICE,
        "open-connections": shared.sum(|counts| &counts.open),
        "responses": (0..5).map(|at| (format!("{}xx", at + 1), json!(shared.sum(|counts| &counts.statuses[at])))).collect::<serde_json::Map<_, _>>(),
        "refused": refused.collect::<serde_json::Map<_, _>>(),
        "failed": failed.collect::<serde_json::Map<_, _>>(),
        "lost-log-lines": shared.sum(|counts| &counts.lost_log_lines),
        "backends": backends.collect::<Vec<_>>(),
    });
    let (entries, bytes, evicted) = cached(&config);
    status["cache-entries"] = json!(entries);
    status["cache-bytes"] = json!(bytes);
    status["cache-evictions"] = json!(evicted);
    for (name, _, of) in TOTALS {
        status[name.replace('_', "-")] = json!(shared.sum(of));
    }
    status
}
