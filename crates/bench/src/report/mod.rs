//! Formats a local comparison's results: as text for a terminal, as a page with plots, and as JSON.

mod bars;
mod bulk;
mod busy;
mod html;
mod one_sided;
mod plot;
mod text;
mod time_line;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::local::{Point, Sample, Table, Unit};
use crate::machine::Place;
use crate::side::Side;
use crate::stats::Spread;
use one_sided::ToNative;
use shunt_bench_args::local::Group as Compared;

pub(crate) use bars::{Bar, Bars, Group, OURS};
pub(crate) use html::{Column, Page, page};
pub(crate) use plot::{Axes, Plot, Series};
pub(crate) use text::{TextLine, against, number, or_dash, text, versus};
pub(crate) use time_line::{Arrow, Flow, TimeLine, time_lines};

/// The report.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    #[serde(rename = "machine")]
    pub(crate) place: Place,
    pub(crate) repeats: u32,
    pub(crate) seconds_per_turn: f64,
    pub(crate) seconds_in_all: f64,
    pub(crate) tables: Vec<TableReport>,
}

#[derive(Debug, Serialize)]
pub(crate) struct TableReport {
    #[serde(skip)]
    pub(crate) group: Compared,
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) axis: Option<&'static str>,
    pub(crate) lines: Vec<Line>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Line {
    pub(crate) label: String,
    pub(crate) x: Option<f64>,
    /// The reason why it was left out.
    pub(crate) missing: Option<String>,
    pub(crate) cells: Vec<Cell>,
}

/// A side of a line.
#[derive(Debug, Serialize)]
pub(crate) struct Cell {
    pub(crate) side: Side,
    /// The figure, in the table's unit.
    pub(crate) figure: Spread,
    /// The speed relative to each other side, within each round.
    pub(crate) ratio_to: BTreeMap<Side, Spread>,
    /// The processor time of an operation relative to each other side, of both programs together:
    /// less is better.
    pub(crate) cpu_to: BTreeMap<Side, Spread>,
    /// The processor time of both programs for a gigabyte, in milliseconds, if the unit is bytes.
    pub(crate) cpu_ms_per_gb: Option<Spread>,
    /// The speed relative to the faster method of the probe in the same round.
    pub(crate) to_best_probe: Option<Spread>,
    /// Each turn relative to the previous one of this side. The ratios have the same noise from
    /// other programs.
    pub(crate) to_itself: Option<Spread>,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) server_cpu_us: f64,
    pub(crate) client_cpu_us: f64,
    /// The processors that competing threads got.
    pub(crate) beside: Option<Spread>,
    /// The competing threads' processors relative to each other side, within each round.
    pub(crate) beside_to: BTreeMap<Side, Spread>,
    /// For turns with only one program under shunt.
    pub(crate) to_native: Option<ToNative>,
    /// In the turn with the fewest connections on shared memory in both directions: their number,
    /// and the number of all connections.
    pub(crate) on_shm: Option<(usize, usize)>,
    pub(crate) on_tcp_because: BTreeMap<&'static str, usize>,
    /// Turns without any connection under shunt.
    pub(crate) unseen: usize,
    /// Shared memory per connection, in bytes.
    pub(crate) link_bytes_per_connection: Option<f64>,
}

/// Describes shunt in reports, which are also read without its documentation.
pub(crate) const SHUNT: &str = "shunt moves TCP connections between programs of one machine to shared memory; the programs and their \
     addresses stay as they are.";

/// Returns an image of each table that has figures.
pub(crate) fn images(report: &Report) -> Result<Vec<String>> {
    report.tables.iter().filter_map(|table| table.svg().transpose()).collect()
}

impl Report {
    pub(crate) fn new(place: Place, tables: &[Table], repeats: u32, seconds: f64, all: Duration) -> Report {
        Report {
            place,
            repeats,
            seconds_per_turn: seconds,
            seconds_in_all: all.as_secs_f64(),
            tables: tables.iter().map(TableReport::of).collect(),
        }
    }
}

impl TableReport {
    fn of(table: &Table) -> TableReport {
        TableReport {
            group: table.group,
            title: table.title.clone(),
            unit: table.unit,
            axis: table.axis,
            lines: table.points.iter().map(|point| Line::of(point, table.unit)).collect(),
        }
    }

    /// Returns the table as an image, if it has figures: lines if it has an axis, otherwise bars.
    pub(crate) fn svg(&self) -> Result<Option<String>> {
        match self.lines.iter().any(|line| !line.cells.is_empty()) {
            true if self.axis.is_some() => Plot::of(self).svg().map(Some),
            true => Bars::of(self).svg().map(Some),
            false => Ok(None),
        }
    }

    /// Returns the sides of all lines, in the order of the columns.
    pub(crate) fn sides(&self) -> Vec<Side> {
        let mut sides: Vec<Side> =
            self.lines.iter().flat_map(|line| &line.cells).map(|cell| cell.side).collect();
        sides.sort();
        sides.dedup();
        sides
    }
}

impl Line {
    fn of(point: &Point, unit: Unit) -> Line {
        let cells = point.sides.iter().zip(&point.samples);
        Line {
            label: point.label.clone(),
            x: point.x,
            missing: point.missing.clone(),
            cells: cells.filter_map(|(side, samples)| Cell::of(point, *side, samples, unit)).collect(),
        }
    }

    pub(crate) fn cell(&self, side: Side) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.side == side)
    }
}

impl Cell {
    fn of(point: &Point, side: Side, samples: &[Sample], unit: Unit) -> Option<Cell> {
        let median = |figure: fn(&Sample) -> f64| {
            Spread::of(samples.iter().map(figure)).map_or(0.0, |spread| spread.median)
        };
        let to_others = |figure: fn(&Sample) -> Option<f64>| -> BTreeMap<Side, Spread> {
            let others = point.sides.iter().zip(&point.samples).filter(|(other, _)| **other != side);
            let ratios = others.filter_map(|(other, theirs)| {
                let rounds = samples.iter().zip(theirs);
                let ratios = rounds.filter_map(|(ours, theirs)| Some(figure(ours)? / figure(theirs)?));
                Some((*other, Spread::of(ratios.filter(|ratio| ratio.is_finite()))?))
            });
            ratios.collect()
        };
        let least = samples.iter().min_by_key(|sample| sample.on_shm)?;
        let mut on_tcp_because = BTreeMap::new();
        for (reason, count) in samples.iter().flat_map(|sample| &sample.reasons) {
            *on_tcp_because.entry(*reason).or_default() += count;
        }
        Some(Cell {
            side,
            figure: Spread::of(samples.iter().map(|sample| unit.figure(sample.rate, point.bytes)))?,
            ratio_to: to_others(|sample| Some(sample.rate)),
            cpu_to: to_others(|sample| Some(sample.cpu_us())),
            cpu_ms_per_gb: bulk::cpu_ms_per_gb(point.bytes, samples, unit),
            to_best_probe: bulk::to_best_probe(point, samples),
            to_itself: to_itself(samples),
            p50_us: median(|sample| sample.p50_us),
            p99_us: median(|sample| sample.p99_us),
            server_cpu_us: median(|sample| sample.server_us),
            client_cpu_us: median(|sample| sample.client_us),
            beside: Spread::of(samples.iter().filter_map(|sample| sample.beside)),
            beside_to: to_others(|sample| sample.beside),
            to_native: ToNative::of(point, side, samples),
            on_shm: side.is_under_shunt().then_some((least.on_shm, least.connections)),
            on_tcp_because,
            unseen: samples.iter().filter(|sample| sample.is_unseen).count(),
            link_bytes_per_connection: (least.on_shm > 0 && least.link_bytes > 0)
                .then(|| least.link_bytes as f64 / least.on_shm as f64),
        })
    }
}

fn to_itself(samples: &[Sample]) -> Option<Spread> {
    Spread::of(samples.windows(2).map(|pair| pair[1].rate / pair[0].rate))
}

impl Unit {
    pub(crate) fn figure(self, rate: f64, bytes: usize) -> f64 {
        match self {
            Unit::PerSecond => rate,
            Unit::Microseconds => 1e6 / rate,
            Unit::Megabytes => rate * bytes as f64 / 1e6,
        }
    }

    pub(crate) fn label(self) -> &'static str {
        match self {
            Unit::PerSecond => "a second",
            Unit::Microseconds => "us each, lower is better",
            Unit::Megabytes => "MB/s",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_is_compared_with_itself_turn_by_turn() {
        let turns = |rates: &[f64]| -> Vec<Sample> {
            rates.iter().map(|rate| Sample { rate: *rate, ..Sample::default() }).collect()
        };
        assert_eq!(to_itself(&turns(&[100.0])), None, "there is none before it");
        let spread = to_itself(&turns(&[100.0, 50.0, 200.0, 200.0]));
        assert_eq!(spread, Some(Spread { median: 1.0, min: 0.5, max: 4.0 }));
    }
}
