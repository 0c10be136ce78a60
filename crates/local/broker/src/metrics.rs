//! The counters of the broker and of the programs under shunt, for Prometheus.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::counter::{Atomic, Counter};
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Registry, Unit};
use shunt_abi::VERSION;
use shunt_abi::latency::{self, Latency};
use shunt_abi::page::Counter as Counted;
use shunt_abi::reason::{Reason, Transport};
use shunt_abi::status::{Direction, Totals};

use crate::latency_wishes;
use crate::state::State;
use crate::status;

/// Minimum time between two evaluations. Reading every page delays the broker's clients, so more
/// frequent requests get the previous answer.
const APART: Duration = Duration::from_secs(1);

/// A metrics page, generated on request.
pub(crate) struct Metrics {
    state: Rc<RefCell<State>>,
    latest: RefCell<Option<(Instant, String)>>,
    /// Each request asks for latencies.
    wants_latency: bool,
}

impl Metrics {
    pub(crate) fn of(state: Rc<RefCell<State>>, wants_latency: bool) -> Metrics {
        Metrics { state, latest: RefCell::default(), wants_latency }
    }

    pub(crate) fn text(&self) -> String {
        if self.wants_latency {
            latency_wishes::want_for_metrics(&self.state.borrow());
        }
        let mut latest = self.latest.borrow_mut();
        match &*latest {
            Some((made, text)) if made.elapsed() < APART => text.clone(),
            _ => latest.insert((Instant::now(), text(&self.state.borrow()))).1.clone(),
        }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Taken {
    direction: &'static str,
    transport: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Bytes {
    transport: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Why {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Stage {
    stage: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Program {
    program: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Build {
    version: &'static str,
    protocol: u16,
}

/// Returns the counters in the text format of Prometheus.
fn text(state: &State) -> String {
    let mut all = Registry::with_prefix("shunt");
    let build = Family::<Build, Gauge>::default();
    build.get_or_create(&Build { version: env!("CARGO_PKG_VERSION"), protocol: VERSION }).set(1);
    all.register("build_info", "The broker's version, and that of its protocol with programs", build);
    let mut latency = state.ended_latency.clone();
    let registry = all.sub_registry_with_prefix("broker");
    let mut totals = state.ended.clone();
    let open = Family::<Taken, Gauge>::default();
    for direction in ["send", "receive"] {
        drop(open.get_or_create(&Taken {
            direction,
            transport: Transport::Shm.label(),
            reason: Reason::None.label(),
        }));
    }
    for process in state.processes.values() {
        let report = process.outbox.with_page(status::report).unwrap_or_default();
        totals += &report.totals;
        latency.add(&process.program, &report.totals.latency);
        for connection in &report.connections {
            for (direction, Direction { transport, reason, .. }) in
                [("send", connection.send), ("receive", connection.receive)]
            {
                let taken = Taken { direction, transport: transport.label(), reason: reason.label() };
                open.get_or_create(&taken).inc();
            }
        }
    }
    gauge(registry, "processes", "Processes under shunt", state.processes.len());
    gauge(registry, "links", "Links in use that this broker has made", state.links.len());
    let help = "Connections with bytes that TCP has yet to take, which the broker sends or may have to send";
    gauge(registry, "remainders", help, state.remainders.len());
    registry.register(
        "open_connections",
        "Ends of connections, by the transport that each direction takes",
        open,
    );

    counter(registry, "pairs", "Connections that were paired", state.tally.pairs_made);
    let help = "From the offer of a pair's first end to that of its second";
    registry.register_with_unit("pairing", help, Unit::Seconds, state.pairing.clone());
    let refused = |reason| state.tally.offers_refused.get(&reason).copied();
    by_reason(registry, "offers_refused", "Offers that were refused", reasons(refused));
    let ended = |reason| state.tally.pairs_ended.get(&reason).copied();
    by_reason(registry, "pairs_ended", "Pairs that a changed policy has ended", reasons(ended));
    let bad = state.tally.bad_messages.iter().map(|(label, count)| (*label, *count));
    by_reason(registry, "bad_messages", "Messages that were refused, by what was wrong with them", bad);
    programs(registry, &totals);
    let latencies = Family::<Program, Latencies>::default();
    for (program, latency) in latency.programs() {
        let label = Program { program: program.to_owned() };
        *latencies.get_or_create(&label).0.lock().unwrap_or_else(PoisonError::into_inner) = latency.clone();
    }
    let help = "From a send of the end that connected to its next bytes, while it was measured";
    all.register_with_unit("request_latency", help, Unit::Seconds, latencies);

    let mut text = String::new();
    encode(&mut text, &all).expect("a string takes everything");
    text
}

/// The latencies of a program, which no observation of the broker adds to.
#[derive(Clone, Debug, Default)]
struct Latencies(Arc<Mutex<Latency>>);

impl TypedMetric for Latencies {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Latencies {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> std::fmt::Result {
        let latency = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = |nanos: u64| nanos as f64 / 1e9;
        let buckets: Vec<(f64, u64)> = latency
            .buckets
            .iter()
            .enumerate()
            .map(|(bucket, count)| (latency::bound(bucket).map_or(f64::INFINITY, seconds), *count))
            .collect();
        let none = None::<&HashMap<usize, Exemplar<NoLabelSet, f64>>>;
        encoder.encode_histogram(seconds(latency.sum_nanos), latency.count(), &buckets, none)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Registers the counters of the programs.
fn programs(registry: &mut Registry, totals: &Totals) {
    let ends = Family::<Stage, Counter>::default();
    let share = totals.share;
    for (stage, count) in [("used", share.seen), ("offered", share.offered), ("on_shm", share.on_shm)] {
        set(&ends.get_or_create(&Stage { stage }), count);
    }
    registry.register("connection_ends", "Ends of connections, by how far they came", ends);

    let bytes = Family::<Bytes, Counter>::default();
    set(
        &bytes.get_or_create(&Bytes { transport: Transport::Shm.label(), reason: Reason::None.label() }),
        totals.bytes.shm,
    );
    for (reason, count) in reasons(|reason| totals.bytes.tcp.get(reason.label()).copied()) {
        set(&bytes.get_or_create(&Bytes { transport: Transport::Tcp.label(), reason }), count);
    }
    registry.register("bytes", "Bytes that ends of connections have moved", bytes);
    let bypasses = reasons(|reason| totals.bypasses.get(reason.label()).copied());
    by_reason(registry, "bypasses", "How often each reason for TCP was met", bypasses);

    let count = |counted| {
        let (_, name) = Counted::NAMES.iter().find(|(one, _)| *one == counted).expect("each has a name");
        totals.counters.get(*name).copied().unwrap_or(0)
    };
    for (name, help, counted) in [
        ("doorbells_rung", "Wake-ups of a peer that slept", Counted::DoorbellsRung),
        ("sleeps", "Sleeps of threads that waited on shared memory", Counted::Sleeps),
        ("degraded_sleeps", "Sleeps cut short because the peer could not ring yet", Counted::DegradedSleeps),
        ("spin_hits", "Spins that found what they waited for", Counted::SpinHits),
        ("rings_not_grown", "Lanes left because their ring could not grow", Counted::RingsNotGrown),
        ("unlisted", "Connections that no status lists, for want of a row", Counted::Unlisted),
    ] {
        counter(registry, name, help, count(counted));
    }
    let spun = Counter::<f64>::default();
    spun.inc_by(count(Counted::SpinNanos) as f64 / 1e9);
    registry.register_with_unit("spin", "Time spent spinning before sleeps", Unit::Seconds, spun);
}

/// Returns all reasons. Those that have not occurred yet have the count 0, so that Prometheus sees
/// the first occurrence as a change.
fn reasons(count: impl Fn(Reason) -> Option<u64>) -> impl Iterator<Item = (&'static str, u64)> {
    Reason::ALL.iter().map(move |reason| (reason.label(), count(*reason).unwrap_or(0)))
}

fn by_reason(
    registry: &mut Registry,
    name: &str,
    help: &str,
    counts: impl Iterator<Item = (&'static str, u64)>,
) {
    let family = Family::<Why, Counter>::default();
    for (reason, count) in counts {
        set(&family.get_or_create(&Why { reason }), count);
    }
    registry.register(name, help, family);
}

fn counter(registry: &mut Registry, name: &str, help: &str, value: u64) {
    let counter = Counter::<u64>::default();
    set(&counter, value);
    registry.register(name, help, counter);
}

fn gauge(registry: &mut Registry, name: &str, help: &str, value: usize) {
    let gauge = Gauge::<i64>::default();
    gauge.set(value as i64);
    registry.register(name, help, gauge);
}

fn set(counter: &Counter, value: u64) {
    // The counter was created for this page, so its value was 0.
    counter.inner().inc_by(value);
}
