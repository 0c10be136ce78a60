//! What a router has counted since it started: connections by the road that they took, at either end, and why.

use std::collections::BTreeMap;
use std::sync::Mutex;

use serde_json::{Value, json};

use crate::reason::Reason;

/// Which end of the connection is on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The one that connected.
    Client,
    /// The one that accepted.
    Server,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Metrics(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    client: Roads,
    server: Roads,
    unaccounted: u64,
    strangers: u64,
    reset: u64,
}

#[derive(Debug, Default)]
struct Roads {
    host: u64,
    overlay: BTreeMap<Reason, u64>,
    denied: BTreeMap<Reason, u64>,
}

impl Metrics {
    /// A connection takes the host network.
    pub(crate) fn took(&self, end: End) {
        self.with(|counts| counts.of(end).host += 1);
    }

    /// A connection stays on the overlay, or is not even there.
    pub(crate) fn stayed(&self, end: End, reason: Reason) {
        self.with(|counts| {
            let roads = counts.of(end);
            let road = if reason.denial().is_some() { &mut roads.denied } else { &mut roads.overlay };
            *road.entry(reason).or_default() += 1;
        });
    }

    /// Somebody who is no router of this overlay came to the router's port. The first time, it is worth a word in the log.
    pub(crate) fn stranger(&self) -> bool {
        let mut counts = self.0.lock().expect(NEVER);
        counts.strangers += 1;
        counts.strangers == 1
    }

    /// A host connection's socket is of the router's control group and not of the container's.
    pub(crate) fn unaccounted(&self) {
        self.with(|counts| counts.unaccounted += 1);
    }

    /// A committed connection was reset, since nobody could accept it any more.
    pub(crate) fn reset(&self) {
        self.with(|counts| counts.reset += 1);
    }

    pub(crate) fn report(&self) -> Value {
        let roads = |roads: &Roads| {
            let labelled = |counts: &BTreeMap<Reason, u64>| -> BTreeMap<&str, u64> {
                counts.iter().map(|(reason, count)| (reason.label(), *count)).collect()
            };
            json!({
                "host": roads.host,
                "overlay": labelled(&roads.overlay),
                "denied": labelled(&roads.denied),
            })
        };
        let counts = self.0.lock().expect(NEVER);
        json!({
            "client": roads(&counts.client),
            "server": roads(&counts.server),
            "unaccounted": counts.unaccounted,
            "strangers": counts.strangers,
            "reset": counts.reset,
        })
    }

    fn with(&self, count: impl FnOnce(&mut Counts)) {
        count(&mut self.0.lock().expect(NEVER));
    }
}

impl Counts {
    fn of(&mut self, end: End) -> &mut Roads {
        match end {
            End::Client => &mut self.client,
            End::Server => &mut self.server,
        }
    }
}

const NEVER: &str = "nobody panics while it is locked";
