//! Tables about the ways to spin while other threads need the processors.

use super::Group;
use super::point::Point;
use super::synthetic::{Pattern, Synthetic};
use super::tables::{Table, Unit};
use crate::side::Side;
use crate::stage::Placement;
use crate::worker::Style;

/// Returns a table for each load, always on two processors and with the same work in every
/// placement.
pub(super) fn tables() -> [Table; 3] {
    let blocking = |threads| Pattern::RoundTrip { style: Style::Blocking, threads };
    [
        ("A round trip of 64 B at a time", blocking(1)),
        ("8 connections to an epoll server, 64 B", Pattern::Many { connections: 8, depth: 1 }),
        ("8 threads in round trips of 64 B", blocking(8)),
    ]
    .map(|(title, pattern)| Table {
        group: Group::Busy,
        title: title.to_owned(),
        unit: Unit::PerSecond,
        axis: None,
        points: WHERE.map(|place| point(pattern, place)).into(),
    })
}

/// The label of a line, the placement of the programs, and the number of competing threads.
const WHERE: [(&str, Placement, usize); 5] = [
    ("two processors, nothing beside it", Placement::Either, 0),
    ("1 thread computes beside it", Placement::Either, 1),
    ("4 threads compute beside it", Placement::Either, 4),
    ("half a processor, by a control group", Placement::Half, 0),
    ("both programs on one processor", Placement::OneCore, 0),
];

fn point(pattern: Pattern, (label, placement, beside): (&str, Placement, usize)) -> Point {
    Point::new(label, Side::SPINS, Synthetic::new(pattern, 64, placement).beside(beside))
}
