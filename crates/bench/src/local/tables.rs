//! The tables of the comparison.

use serde::Serialize;

use super::Group;
use super::bulk;
use super::busy;
use super::containers;
use super::one_sided;
use super::point::{Load, Point};
use super::programs;
use super::relaying;
use super::synthetic::{Calls, Pattern, Synthetic};
use crate::side::Side;
use crate::stage::Placement;
use crate::worker::{Call, Style, name};

/// The unit of a cell's figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    /// Operations per second.
    PerSecond,
    /// Microseconds for an operation; lower is better.
    Microseconds,
    /// Megabytes per second.
    Megabytes,
}

/// A table.
pub(crate) struct Table {
    pub(crate) group: Group,
    pub(crate) title: String,
    pub(crate) unit: Unit,
    /// The parameter of the points, which labels the plot's axis.
    pub(crate) axis: Option<&'static str>,
    pub(crate) points: Vec<Point>,
}

pub(super) const SIZES: [usize; 9] = [1, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
const STREAM_SIZES: [usize; 9] = [32, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
pub(super) const FEW_SIZES: [usize; 3] = [64, 4 << 10, 64 << 10];

/// Returns all tables, in the order of their runs.
pub(super) fn all() -> Vec<Table> {
    let mut tables = vec![
        round_trips(Style::Blocking, Placement::TwoCores, &SIZES),
        round_trips(Style::Blocking, Placement::OneCore, &FEW_SIZES),
        round_trips(Style::Epoll, Placement::TwoCores, &FEW_SIZES),
        round_trips(Style::Epoll, Placement::OneCore, &FEW_SIZES),
        round_trips(Style::Blocking, Placement::Apart, &SIZES),
        containers::table(),
        streams(),
        connections(1),
        connections(16),
        crowd(),
        short_lives(),
        with_and_without(),
    ];
    tables.extend(bulk::tables());
    tables.extend(busy::tables());
    tables.extend(one_sided::tables());
    tables.extend(programs::tables());
    tables.extend(relaying::tables());
    tables
}

fn round_trips(style: Style, placement: Placement, sizes: &[usize]) -> Table {
    let pattern = Pattern::RoundTrip { style, threads: 1 };
    // Like programs across two containers.
    let sides = if placement == Placement::Apart { Side::PROGRAM } else { Side::TRANSPORTS };
    Table {
        group: Group::RoundTrip,
        title: format!("Round trip, {}, {}", name(style), placement.label()),
        unit: Unit::Microseconds,
        axis: Some("bytes"),
        points: sizes
            .iter()
            .map(|&size| Point::new(bytes(size), sides, Synthetic::new(pattern, size, placement)).at(size))
            .collect(),
    }
}

fn streams() -> Table {
    let placement = Placement::TwoCores;
    let load = |size| Synthetic::new(Pattern::Stream, size, placement);
    Table {
        group: Group::Stream,
        title: format!("Messages in one direction, {}", placement.label()),
        unit: Unit::Megabytes,
        axis: Some("bytes"),
        points: STREAM_SIZES
            .iter()
            .map(|&size| Point::new(bytes(size), Side::BACKPRESSURE, load(size)).at(size).of_bytes(size))
            .collect(),
    }
}

fn connections(depth: usize) -> Table {
    let numbers: &[usize] = if depth == 1 { &[1, 8, 50, 500, 5000] } else { &[1, 8, 50, 500] };
    let load = |connections| Synthetic::new(Pattern::Many { connections, depth }, 64, Placement::TwoCores);
    let under_way = if depth == 1 { "one request".to_owned() } else { format!("{depth} requests") };
    Table {
        group: Group::Connections,
        title: format!("Connections to an epoll server, {under_way} of 64 B under way on each"),
        unit: Unit::PerSecond,
        axis: Some("connections"),
        points: numbers
            .iter()
            .map(|&number| Point::new(number.to_string(), Side::TRANSPORTS, load(number)).at(number))
            .collect(),
    }
}

/// Returns the table with four times as many runnable threads as processors.
fn crowd() -> Table {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = 4 * processors;
    let pattern = Pattern::RoundTrip { style: Style::Blocking, threads };
    let load = Synthetic::new(pattern, 64, Placement::Free);
    Table {
        group: Group::Crowd,
        title: format!("{threads} threads in round trips of 64 B on {processors} processors"),
        unit: Unit::PerSecond,
        axis: None,
        points: vec![Point::new(format!("{threads} threads"), Side::TRANSPORTS, load)],
    }
}

/// Returns the table of the cost of attaching, and of how many exchanges amortise it.
fn short_lives() -> Table {
    let load = |exchanges| Synthetic::new(Pattern::Short { exchanges }, 64, Placement::TwoCores);
    Table {
        group: Group::Cost,
        title: "Connections that end after a few exchanges of 64 B, one after another".to_owned(),
        unit: Unit::PerSecond,
        axis: Some("exchanges"),
        points: [1, 4, 16, 64, 256, 1024]
            .map(|exchanges| {
                Point::new(exchanges.to_string(), Side::WITH_AND_WITHOUT, load(exchanges)).at(exchanges)
            })
            .into(),
    }
}

fn with_and_without() -> Table {
    fn point(label: &str, load: impl Load + 'static) -> Point {
        Point::new(label, Side::WITH_AND_WITHOUT, load)
    }
    Table {
        group: Group::Cost,
        title: "Nothing to gain".to_owned(),
        unit: Unit::Microseconds,
        axis: None,
        points: vec![
            point("open and close of a file", Calls(Call::OpenClose)),
            point("select on 100 descriptors", Calls(Call::Select)),
            point("select on 100 connections", Calls(Call::SelectConnections)),
            point(
                "connect and close",
                Synthetic::new(Pattern::Short { exchanges: 0 }, 64, Placement::TwoCores),
            ),
            point("start and end of a thread", Calls(Call::Thread)),
            point("fork", Calls(Call::Fork)),
            point("spawn of a program", Calls(Call::Spawn)),
        ],
    }
}

pub(super) fn bytes(size: usize) -> String {
    match size {
        _ if size >= 1 << 20 => format!("{} MiB", size >> 20),
        _ if size >= 1 << 10 => format!("{} KiB", size >> 10),
        _ => format!("{size} B"),
    }
}
