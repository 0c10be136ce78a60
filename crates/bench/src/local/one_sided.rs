//! Measures the cost of shunt where only one program runs under it, precisely enough for single
//! percents. Both programs are started anew in each turn and make the same number of operations,
//! and their clocks are read while the client waits.

use std::cell::Cell;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::Group;
use super::pair::Turn;
use super::point::{Load, Point, Sample};
use super::programs::{Cached, Served};
use super::synthetic::{Pattern, Synthetic};
use super::tables::{FEW_SIZES, Table, Unit, bytes};
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Stage};
use crate::worker::{Cache, Style};

/// The warm-up of a load. It must be longer than an unanswered offer stays open.
const WARM: Duration = Duration::from_millis(1600);
/// The overhead of a turn: two programs start and end.
const STARTS: Duration = Duration::from_millis(300);

/// Returns the tables.
pub(super) fn tables() -> [Table; 2] {
    let two_cores = Placement::TwoCores;
    let round_trip = Pattern::RoundTrip { style: Style::Blocking, threads: 1 };
    let many = Pattern::Many { connections: 50, depth: 1 };
    let ours = |label, pattern, placement| {
        Point::new(label, Side::ONE_SIDED, Counted::new(Synthetic::new(pattern, 64, placement)))
    };
    let cached = |label, kind, connections| {
        let served = Served::new(Cached { kind, connections }, two_cores);
        Point::new(label, Side::ONE_SIDED, Counted::new(served))
    };
    let stream = |size| {
        let load = Counted::new(Synthetic::new(Pattern::Stream, size, two_cores));
        Point::new(bytes(size), Side::ONE_SIDED, load).at(size).of_bytes(size)
    };
    let requests = Table {
        group: Group::OneSided,
        title: "Only one side under shunt".to_owned(),
        unit: Unit::PerSecond,
        axis: None,
        points: vec![
            ours("round trip 64 B", round_trip, two_cores),
            ours("50 connections", many, two_cores),
            cached("memcached, one connection", Cache::Memcached, 1),
            cached("memcached, 50 connections", Cache::Memcached, 50),
            cached("Redis, one connection", Cache::Redis, 1),
            cached("Redis, 50 connections", Cache::Redis, 50),
            ours("short connections", Pattern::Short { exchanges: 1 }, two_cores),
            ours("round trip 64 B, a peer elsewhere", round_trip, Placement::Apart),
            ours("50 connections, a peer elsewhere", many, Placement::Apart),
        ],
    };
    let streams = Table {
        group: Group::OneSided,
        title: "Messages in one direction, only one side under shunt".to_owned(),
        unit: Unit::Megabytes,
        axis: Some("bytes"),
        points: FEW_SIZES.map(stream).into(),
    };
    [requests, streams]
}

/// A server with a synthetic client.
pub(super) trait OneSided: Load {
    /// Starts the server.
    fn start(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Ready>;
}

/// A running server. Dropping it kills it, because memcached and Redis do not end with their input.
pub(super) struct Ready {
    pub(super) server: Process,
    pub(super) address: String,
    /// The command of its client.
    pub(super) client: Command,
}

/// A load whose turns have as many operations as plain TCP made in the requested time.
struct Counted<L> {
    load: L,
    operations: Cell<Option<u64>>,
}

impl<L: OneSided> Counted<L> {
    fn new(load: L) -> Counted<L> {
        Counted { load, operations: Cell::new(None) }
    }

    fn turn(&self, stage: &Stage, side: Side, seconds: Duration, operations: Option<u64>) -> Result<Sample> {
        let Ready { server, address, mut client } = self.load.start(stage, side, seconds)?;
        client.args(["--warm", &WARM.as_secs_f64().to_string()]);
        if let Some(operations) = operations {
            client.args(["--operations", &operations.to_string()]);
        }
        let turn = Turn { stage, side, seconds, is_counted: operations.is_some(), beside: None };
        turn.run(&server, &address, &mut client)
    }
}

impl<L: OneSided> Load for Counted<L> {
    fn missing(&self) -> Option<String> {
        self.load.missing()
    }

    fn around(&self) -> Duration {
        WARM + STARTS
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let operations = match self.operations.get() {
            Some(operations) => operations,
            None => {
                let rate = self.turn(stage, Side::TcpNodelay, seconds, None)?.rate;
                ((rate * seconds.as_secs_f64()) as u64).max(1)
            }
        };
        self.operations.set(Some(operations));
        self.turn(stage, side, seconds, Some(operations))
    }
}
