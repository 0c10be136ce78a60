//! The relay's counters since its start, for Prometheus and for `shunt relay status`.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use shunt_control::{Full, SET_UP_BUCKETS};

use crate::frame::Verdict;
use crate::pool::Level;

/// The relay's metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) open: Gauge,
    pub(crate) idle_legs: Gauge,
    connections: Family<Connection, Counter>,
    bytes: Family<Bytes, Counter>,
    set_up: Family<Via, Histogram, fn() -> Histogram>,
    early: Family<Outcome, Counter>,
    strangers: Counter,
    handshakes: Gauge,
    evicted: Family<Share, Counter>,
    pools: Family<PoolState, Gauge>,
    taken: Family<PoolOutcome, Gauge>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Connection {
    via: String,
    mode: &'static str,
    verdict: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Via {
    via: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Bytes {
    via: String,
    direction: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Share {
    share: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PoolState {
    peer: String,
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PoolOutcome {
    peer: String,
    outcome: &'static str,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        let mut registry = Registry::with_prefix("shunt_relay");
        let (open, idle_legs, strangers) = (Gauge::default(), Gauge::default(), Counter::default());
        let (connections, bytes, early) = (Family::default(), Family::default(), Family::default());
        let (pools, taken) = (Family::default(), Family::default());
        let of_set_up: fn() -> Histogram = || Histogram::new(SET_UP_BUCKETS);
        let set_up = Family::new_with_constructor(of_set_up);
        registry.register("open_connections", "Connections that are being relayed", open.clone());
        registry.register(
            "idle_legs",
            "Connections of other relays that wait for a target",
            idle_legs.clone(),
        );
        registry.register("connections", "Connections by what became of them at first", connections.clone());
        registry.register("bytes", "Bytes moved", bytes.clone());
        registry.register_with_unit(
            "set_up",
            "From a connection's beginning to its target's answer, as far as that is known here",
            Unit::Seconds,
            set_up.clone(),
        );
        registry.register("early", "Onward connections that began with a SYN", early.clone());
        registry.register("strangers", "Connections that did not show to be a relay's", strangers.clone());
        let (handshakes, evicted) = (Gauge::default(), Family::default());
        registry.register(
            "handshakes",
            "Connections that have yet to show that they are a relay's",
            handshakes.clone(),
        );
        registry.register(
            "handshakes_evicted",
            "Connections that had not shown that and were closed for a later one, by whose share was used up",
            evicted.clone(),
        );
        registry.register("pool_connections", "Connections kept ready for a peer", pools.clone());
        registry.register(
            "pool_events",
            "What became of connections kept ready, since the start",
            taken.clone(),
        );
        Metrics {
            registry,
            open,
            idle_legs,
            connections,
            bytes,
            early,
            strangers,
            handshakes,
            evicted,
            pools,
            taken,
            set_up,
        }
    }

    pub(crate) fn count(&self, via: Option<&str>, mode: &'static str, verdict: Verdict) {
        let label = Connection { via: name(via), mode, verdict: verdict.label() };
        self.connections.get_or_create(&label).inc();
    }

    /// Returns the byte counters of the two directions: to the target, and from it.
    pub(crate) fn flows(&self, via: Option<&str>) -> (Counter, Counter) {
        let of = |direction| self.bytes.get_or_create(&Bytes { via: name(via), direction }).clone();
        (of("up"), of("down"))
    }

    pub(crate) fn set_up(&self, via: Option<&str>, time: Duration) {
        self.set_up.get_or_create(&Via { via: name(via) }).observe(time.as_secs_f64());
    }

    pub(crate) fn count_early(&self, outcome: &'static str) {
        self.early.get_or_create(&Outcome { outcome }).inc();
    }

    pub(crate) fn count_stranger(&self) {
        self.strangers.inc();
    }

    /// Counts a connection that was closed to make room for another. Returns the number of these
    /// for this share.
    pub(crate) fn count_evicted(&self, full: Full) -> u64 {
        self.evicted.get_or_create(&Share { share: full.label() }).inc() + 1
    }

    /// Returns the metrics in the text format of Prometheus. `handshakes` is the number of
    /// handshakes in progress.
    pub(crate) fn text(&self, handshakes: usize, pools: impl Iterator<Item = (String, Level)>) -> String {
        self.handshakes.set(handshakes as i64);
        for (peer, level) in pools {
            let counts = level.counts;
            for (state, value) in [("ready", level.ready), ("making", level.making), ("wanted", level.wanted)]
            {
                self.pools.get_or_create(&PoolState { peer: peer.clone(), state }).set(value as i64);
            }
            let outcomes = [
                ("hit", counts.hits),
                ("miss", counts.misses),
                ("stale", counts.stale),
                ("expired", counts.expired),
                ("failed", counts.failed),
            ];
            for (outcome, value) in outcomes {
                self.taken.get_or_create(&PoolOutcome { peer: peer.clone(), outcome }).set(value as i64);
            }
        }
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a string takes everything");
        text
    }
}

fn name(via: Option<&str>) -> String {
    via.unwrap_or("direct").to_owned()
}
