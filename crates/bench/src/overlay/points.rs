//! Converts the results to the common form of all comparisons.

use std::time::Duration;

use anyhow::Result;
use shunt_bench_args::overlay::Arguments;

use super::load::Load;
use super::migration::Migration;
use super::over_time::OverTime;
use super::report::values;
use super::side::Side;
use super::{AROUND, Line, lab, lines, measure, turns_of_migration, turns_of_policy};
use crate::comparison::{self, Comparison, Point, Taken, root_only};
use crate::worker::name;

impl Comparison for Arguments {
    fn missing(&self) -> Option<String> {
        root_only("its hosts are network namespaces, which are made by root only")
    }

    fn length(&self) -> (u64, Duration) {
        let present = lines(self).iter().filter(|line| line.missing.is_none()).count();
        let turns = present as u64 * Side::ALL.len() as u64 * u64::from(self.output.repeats);
        let others = turns_of_policy(self).into_iter().chain(turns_of_migration(self));
        (turns + others.sum::<u64>(), self.time() + AROUND)
    }

    fn measure(&self) -> Result<Taken> {
        let taken = measure(self, &lab(self)?)?;
        let mut points = points(&taken.lines);
        points.extend(taken.over_time.iter().flat_map(OverTime::points));
        points.extend(taken.migration.iter().flat_map(Migration::points));
        Ok(points.into())
    }

    #[cfg(test)]
    fn outline(&self) -> Vec<Point> {
        let mut points = points(&lines(self));
        points.extend(turns_of_policy(self).iter().flat_map(|_| OverTime::outline()));
        points.extend(turns_of_migration(self).iter().flat_map(|_| Migration::outline()));
        points
    }
}

fn points(lines: &[Line]) -> Vec<Point> {
    lines.iter().flat_map(of_line).collect()
}

fn of_line(line: &Line) -> Vec<Point> {
    let sides = Side::ALL.into_iter().zip(&line.samples);
    let of = comparison::Line {
        table: name(line.load.group()),
        line: label(line.load),
        at: line.load.bytes().map(|bytes| ("bytes of a message", bytes as f64)),
        sides: sides.map(|(side, samples)| (side.label(), &samples[..])).collect(),
        missing: line.missing.clone(),
    };
    of.points(&values(line.load))
}

/// Returns the label of a load within its table.
fn label(load: Load) -> String {
    match load {
        Load::Throughput { bytes } | Load::RoundTrip { bytes } => format!("{bytes} B"),
        Load::Memcached { connections } => format!("{connections} connections"),
        _ => load.label(),
    }
}
