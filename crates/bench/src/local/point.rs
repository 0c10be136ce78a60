//! A line of a table: a load, its sides and its samples.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::side::Side;
use crate::stage::Stage;

/// A load that can run on a side.
pub(crate) trait Load {
    /// Returns the reason why this machine cannot run it, if there is one.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Returns the approximate overhead of a turn: its programs start, and connections are
    /// attached.
    fn around(&self) -> Duration {
        Duration::from_millis(300)
    }

    /// Ends the programs that it keeps running between turns.
    fn close(&self) {}

    /// Runs a turn.
    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample>;
}

/// The result of a turn.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Sample {
    /// Operations per second.
    pub(crate) rate: f64,
    /// Median and 99th percentile of the latency in microseconds; 0 if it cannot be measured.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Processor time of an operation, user and system, in microseconds.
    pub(crate) server_us: f64,
    pub(crate) client_us: f64,
    /// The processors that competing threads got, if there were any.
    pub(crate) beside: Option<f64>,
    /// The server's connections under shunt: those on shared memory in both directions, and below,
    /// all.
    pub(crate) on_shm: usize,
    pub(crate) connections: usize,
    /// No connection used shared memory in the turn, and none was visible under shunt half-way.
    pub(crate) is_unseen: bool,
    /// The reasons of directions on TCP.
    pub(crate) reasons: BTreeMap<&'static str, usize>,
    /// Shared memory of both programs, in bytes.
    pub(crate) link_bytes: u64,
}

impl Sample {
    /// Returns the processor time of both programs.
    pub(crate) fn cpu_us(&self) -> f64 {
        self.server_us + self.client_us
    }
}

/// A line of a table.
pub(crate) struct Point {
    pub(crate) label: String,
    /// Bytes of an operation, if the table's unit is bytes.
    pub(crate) bytes: usize,
    /// The position on the plot's axis, if the table has one.
    pub(crate) x: Option<f64>,
    pub(crate) sides: Vec<Side>,
    pub(super) load: Box<dyn Load>,
    /// The samples by side.
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

    /// Removes the sides that cannot be measured here.
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
