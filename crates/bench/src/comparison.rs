//! A comparison as others run it: how long it takes, and what came of it, round by round, in one form whichever it is.

use std::time::Duration;

use anyhow::Result;

use crate::report::TimeLine;

/// What `shunt bench` compares, with its arguments.
pub(crate) trait Comparison: Sync {
    /// Why this process cannot run it, if so.
    fn missing(&self) -> Option<String> {
        None
    }

    /// How many turns, and about how long each takes.
    fn length(&self) -> (u64, Duration);

    /// Runs it.
    fn measure(&self) -> Result<Taken>;

    /// What it would measure, without rounds.
    #[cfg(test)]
    fn outline(&self) -> Vec<Point>;
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) points: Vec<Point>,
    /// Of one round, with the side that each is of.
    pub(crate) time_lines: Vec<(&'static str, TimeLine)>,
}

impl From<Vec<Point>> for Taken {
    fn from(points: Vec<Point>) -> Taken {
        Taken { points, time_lines: Vec::new() }
    }
}

/// How a figure is had of one turn.
pub(crate) type Figure<T> = (Quantity, fn(&T) -> f64);

/// One line of a table on one side.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    pub(crate) table: String,
    pub(crate) line: String,
    /// Where it stands on which axis.
    pub(crate) at: Option<(&'static str, f64)>,
    pub(crate) side: &'static str,
    pub(crate) quantity: Quantity,
    pub(crate) rounds: Vec<f64>,
    /// Why it was left out.
    pub(crate) missing: Option<String>,
}

/// What a figure is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quantity {
    pub(crate) label: &'static str,
    pub(crate) more_is_better: bool,
}

impl Quantity {
    pub(crate) const RATE: Quantity = more("a second");
    pub(crate) const MEGABYTES: Quantity = more("MB/s");
    pub(crate) const PART: Quantity = more("of the limit");
    pub(crate) const MEDIAN: Quantity = less("median, us");
    pub(crate) const P99: Quantity = less("99th percentile, us");
    pub(crate) const EACH: Quantity = less("us each");
    pub(crate) const SESSION: Quantity = less("ms of a session");
    pub(crate) const FIRST_BYTE: Quantity = less("ms to the first byte");
    pub(crate) const LAST_BYTE: Quantity = less("ms to the last byte");
    pub(crate) const STEP: Quantity = less("ms");
    pub(crate) const MOMENT: Quantity = less("ms after the client's SYN");
    pub(crate) const CPU_OF_ONE: Quantity = less("CPU of each, us");
    pub(crate) const SYSTEM_OF_ONE: Quantity = less("system time of each, us");
    pub(crate) const CPU_OF_GB: Quantity = less("CPU of a GB, s");
    pub(crate) const SOFTIRQ: Quantity = less("  softirq");
    pub(crate) const MEMORY: Quantity = less("KB each");
    pub(crate) const CALL: Quantity = less("us in the call");
}

const fn more(label: &'static str) -> Quantity {
    Quantity { label, more_is_better: true }
}

pub(crate) const fn less(label: &'static str) -> Quantity {
    Quantity { label, more_is_better: false }
}
