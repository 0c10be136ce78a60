//! Converts the results to the common form of all comparisons.

use std::time::Duration;

use anyhow::Result;
use shunt_bench_args::relay::Arguments;

use super::measure::{Cpu, Idle};
use super::trace::{MOMENTS, Trace};
use super::{MEASUREMENT, Row, measure, report, rows, time_lines, turns};
use crate::comparison::{Comparison, Figure, Point, Quantity, Taken};
use crate::worker::Download;

impl Comparison for Arguments {
    fn missing(&self) -> Option<String> {
        let missing = "its hosts are network namespaces, which are made by root only";
        (!rustix::process::geteuid().is_root()).then(|| missing.to_owned())
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
        (Quantity::FIRST_BYTE, |download| download.first_byte * 1e3),
        (Quantity::LAST_BYTE, |download| download.total * 1e3),
    ];
    let point = |table: &str, line: String, at, quantity, rounds| Point {
        table: table.to_owned(),
        line,
        at,
        side: row.name.label().trim(),
        quantity,
        rounds,
        missing: row.missing.clone(),
    };
    let downloads = arguments.sizes.iter().zip(&row.downloads).flat_map(|(size, downloads)| {
        DOWNLOADS.map(|(quantity, figure)| {
            let rounds = downloads.iter().map(figure).collect();
            point("downloads", report::bytes(*size), Some(("bytes", *size as f64)), quantity, rounds)
        })
    });
    let moments = MOMENTS.into_iter().enumerate().map(|(index, moment)| {
        let rounds = row.traces.iter().map(|trace: &Trace| trace.moments[index] * 1e3).collect();
        point("time lines", moment.to_owned(), None, Quantity::MOMENT, rounds)
    });
    let cpu = row.cpu.iter().map(|cpu: &Cpu| cpu.relays).collect();
    let idle = row.idle.iter().map(|idle: &Idle| (idle.resident + idle.slab) / 1024.0 / 2.0).collect();
    downloads
        .chain(moments)
        .chain([
            point("cpu", "a large download, the relays'".to_owned(), None, Quantity::CPU_OF_GB, cpu),
            point("idle", "half of both relays and of all hosts".to_owned(), None, Quantity::MEMORY, idle),
        ])
        .collect()
}
