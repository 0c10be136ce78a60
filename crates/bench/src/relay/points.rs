//! Converts the results to the common form of all comparisons.

use std::time::Duration;

use anyhow::Result;
use shunt_bench_args::relay::Arguments;

use super::measure::{Cpu, Idle};
use super::trace::{MOMENTS, Trace};
use super::{MEASUREMENT, Row, measure, report, rows, time_lines, turns};
use crate::comparison::{Comparison, Figure, Line, Point, Quantity, Taken, root_only};
use crate::worker::Download;

impl Comparison for Arguments {
    fn missing(&self) -> Option<String> {
        root_only("its hosts are network namespaces, which are made by root only")
    }

    fn length(&self) -> (u64, Duration) {
        (turns(&rows(self), self), MEASUREMENT)
    }

    fn measure(&self) -> Result<Taken> {
        let rows = measure(self)?;
        let time_lines = time_lines(&rows).map(|line| (line.label, line)).collect();
        Ok(Taken { points: points(self, &rows), time_lines })
    }

    #[cfg(test)]
    fn outline(&self) -> Vec<Point> {
        points(self, &rows(self))
    }
}

fn points(arguments: &Arguments, rows: &[Row]) -> Vec<Point> {
    rows.iter().flat_map(|row| of_row(arguments, row)).collect()
}

fn of_row(arguments: &Arguments, row: &Row) -> Vec<Point> {
    const DOWNLOADS: [Figure<Download>; 2] = [
        (Quantity::FIRST_BYTE, |download| Some(download.first_byte * 1e3)),
        (Quantity::LAST_BYTE, |download| Some(download.total * 1e3)),
    ];
    const CPU: [Figure<Cpu>; 1] = [(Quantity::CPU_OF_GB, |cpu| Some(cpu.relays))];
    const IDLE: [Figure<Idle>; 1] =
        [(Quantity::MEMORY, |idle| Some((idle.resident + idle.slab) / 1024.0 / 2.0))];
    let mut points = Vec::new();
    for (size, downloads) in arguments.sizes.iter().zip(&row.downloads) {
        let line = line(row, "downloads", report::bytes(*size), downloads);
        let line = Line { at: Some(("bytes", *size as f64)), ..line };
        points.extend(line.points(&DOWNLOADS));
    }
    for (index, moment) in MOMENTS.into_iter().enumerate() {
        let at = move |trace: &Trace| Some(trace.moments[index] * 1e3);
        points.extend(line(row, "time lines", moment, &row.traces).points(&[(Quantity::MOMENT, at)]));
    }
    points.extend(line(row, "cpu", "a large download, the relays'", &row.cpu).points(&CPU));
    points.extend(line(row, "idle", "half of both relays and of all hosts", &row.idle).points(&IDLE));
    points
}

/// Returns a line of one way, without a position.
fn line<'a, T>(row: &Row, table: &str, label: impl Into<String>, samples: &'a [T]) -> Line<'a, T> {
    Line {
        table: table.to_owned(),
        line: label.into(),
        at: None,
        sides: vec![(row.name.label().trim(), samples)],
        missing: row.missing.clone(),
    }
}
