//! One line of a table: a load, its sides, and what was measured.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::side::Side;
use crate::stage::Stage;

/// What can be measured on a side.
pub(crate) trait Load {
    /// Why this machine cannot run it, if so.
    fn missing(&self) -> Option<String> {
        None
    }

    /// About how long a turn takes besides: its programs start, and come onto their road.
    fn around(&self) -> Duration {
        Duration::from_millis(300)
    }

    /// Ends what it keeps running between turns.
    fn close(&self) {}

    /// One turn.
    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample>;
}

/// What one turn gave.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sample {
    /// Operations a second.
    pub(crate) rate: f64,
    /// Median and 99th percentile of one operation, in microseconds; 0 if it cannot be timed.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Processor time of one operation, user and system, in microseconds.
    pub(crate) server_us: f64,
    pub(crate) client_us: f64,
    /// How many processors the threads beside it had, where there are any.
    pub(crate) beside: Option<f64>,
    /// Of the server's connections under shunt: with both directions on shared memory, and in all.
    pub(crate) on_shm: usize,
    pub(crate) connections: usize,
    /// No connection was put on shared memory in the whole turn, and none was seen under shunt half-way.
    pub(crate) is_unseen: bool,
    /// Why directions were on TCP.
    pub(crate) reasons: BTreeMap<&'static str, usize>,
    /// Shared memory of both programs, in bytes.
    pub(crate) link_bytes: u64,
}

impl Sample {
    /// Of both programs.
    pub(crate) fn cpu_us(&self) -> f64 {
        self.server_us + self.client_us
    }
}

/// See the module.
pub(crate) struct Point {
    pub(crate) label: String,
    /// Bytes of an operation, where bytes are what counts.
    pub(crate) bytes: usize,
    /// Where it stands on the plot's axis, if the table has one.
    pub(crate) x: Option<f64>,
    pub(crate) sides: Vec<Side>,
    pub(super) load: Box<dyn Load>,
    /// By side.
    pub(crate) samples: Vec<Vec<Sample>>,
    pub(crate) missing: Option<String>,
}

impl Point {
    pub(super) fn new(label: impl Into<String>, sides: &[Side], load: impl Load + 'static) -> Point {
        Point {
            label: label.into(),
            bytes: 0,
            x: None,
            sides: sides.to_vec(),
            load: Box::new(load),
            samples: vec![Vec::new(); sides.len()],
            missing: None,
        }
    }

    /// Without the sides that cannot be measured here.
    pub(super) fn leave_out(&mut self, is_missing: impl Fn(Side) -> bool) {
        self.sides.retain(|side| !is_missing(*side));
        self.samples.truncate(self.sides.len());
    }

    pub(super) fn at(mut self, x: usize) -> Point {
        self.x = Some(x as f64);
        self
    }

    pub(super) fn of_bytes(mut self, bytes: usize) -> Point {
        self.bytes = bytes;
        self
    }
}
