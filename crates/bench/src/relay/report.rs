//! Formats the results: as text for a terminal, as plots like the paper's figures 3 and 4, and as
//! JSON.

use std::fmt::{Display, Write};
use std::time::Duration;

use serde::Serialize;

use super::Name;
use super::floor::Floor;
use super::lab::Settings;
use super::measure::{BURST, IDLE};
use super::trace::{MOMENTS, Trace};
use super::{Arguments, Row};
use crate::machine::Machine;
use crate::report::{Axes, Plot, Series, TextLine};
use crate::stats::Spread;
use crate::worker::Download;

/// The report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: Machine,
    links: Settings,
    repeats: u32,
    seconds_in_all: f64,
    /// The lower bounds by size.
    floors: Vec<(u64, Floor)>,
    ways: Vec<Line>,
    /// The ratios of the complete shunt relay by size; empty if it was not measured.
    ratios: Vec<Ratios>,
}

/// The time of a download with the complete shunt relay, relative to others.
#[derive(Clone, Copy, Debug, Serialize)]
struct Ratios {
    first_byte_to_ideal: Spread,
    total_to_ideal: Spread,
    /// The time of HAProxy with large windows relative to it, within each round.
    window_to_first_byte: Option<Spread>,
    window_to_total: Option<Spread>,
}

/// The results of one way.
#[derive(Debug, Serialize)]
struct Line {
    way: Name,
    missing: Option<String>,
    /// The times of `trace::MOMENTS`, in seconds.
    moments: Vec<Spread>,
    /// The packets of the first round's trace.
    time_line: Option<Trace>,
    downloads: Vec<Downloads>,
    burst: Option<BurstFigures>,
    cpu: Option<CpuFigures>,
    idle: Option<IdleFigures>,
}

/// Downloads of one size, in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Downloads {
    bytes: u64,
    first_byte: Spread,
    total: Spread,
}

/// Bursts, in seconds to the first byte.
#[derive(Clone, Copy, Debug, Serialize)]
struct BurstFigures {
    single: Spread,
    unannounced: Spread,
    p50: Spread,
    p90: Spread,
    /// The 90th percentile relative to the single connection, within each round.
    ratio: Spread,
}

/// Processor time in seconds for each 10^9 bytes.
#[derive(Clone, Copy, Debug, Serialize)]
struct CpuFigures {
    machine: Spread,
    lab: Spread,
    relays: Spread,
}

/// Memory in bytes for each connection.
#[derive(Clone, Copy, Debug, Serialize)]
struct IdleFigures {
    resident: Spread,
    slab: Spread,
}

impl Report {
    pub(super) fn new(
        machine: Machine,
        links: Settings,
        arguments: &Arguments,
        rows: &[Row],
        all: Duration,
    ) -> Report {
        let floor = |size: &u64| (*size, Floor::of(*size, links.bits_per_second));
        let floors: Vec<(u64, Floor)> = arguments.sizes.iter().map(floor).collect();
        Report {
            ratios: ratios(&floors, rows),
            machine,
            links,
            repeats: arguments.output.repeats,
            seconds_in_all: all.as_secs_f64(),
            floors,
            ways: rows.iter().map(|row| Line::of(row, &arguments.sizes)).collect(),
        }
    }

    /// Returns the plots of the time to the first byte and the total time.
    pub(super) fn plots(&self) -> [Plot; 2] {
        let plot = |title: &str, figure: fn(&Downloads) -> Spread, floor: fn(&Floor) -> f64| {
            let at = |seconds: f64| Spread { median: seconds, min: seconds, max: seconds };
            let floors = self.floors.iter().map(|(bytes, of)| (*bytes as f64, at(floor(of)))).collect();
            let mut series = vec![Series { label: FLOOR, points: floors }];
            series.extend(self.ways.iter().filter(|line| !line.downloads.is_empty()).map(|line| Series {
                label: line.way.label().trim_start(),
                points: line.downloads.iter().map(|of| (of.bytes as f64, figure(of))).collect(),
            }));
            Plot {
                title: title.to_owned(),
                x_label: "bytes".to_owned(),
                y_label: "seconds".to_owned(),
                axes: Axes::Logarithmic,
                series,
            }
        };
        [
            plot("Time to the first byte", |of| of.first_byte, |of| of.first_byte),
            plot("Time to the last byte", |of| of.total, |of| of.total),
        ]
    }

    /// Returns the report as text.
    pub(super) fn text(&self) -> String {
        let machine = &self.machine;
        let mut out = format!(
            "{machine})\n\
             Round trips of 32.7, 215 and 26 ms, each link {} Mbit/s with a queue of what is under way, {} % loss.\n\
             Medians of {} rounds, every way in turn within each; {:.0} s in all.\n",
            self.links.bits_per_second as f64 / 1e6,
            self.links.loss * 100.0,
            self.repeats,
            self.seconds_in_all
        );
        self.append_moments(&mut out);
        if self.ways.iter().any(|line| !line.downloads.is_empty()) {
            self.append_downloads(&mut out, "Time to the first byte", |of| of.first_byte, |of| of.first_byte);
            self.append_downloads(&mut out, "Time to the last byte", |of| of.total, |of| of.total);
        }
        self.append_ratios(&mut out);
        self.append_burst(&mut out);
        self.append_cpu(&mut out);
        self.append_idle(&mut out);
        for line in &self.ways {
            if let Some(missing) = &line.missing {
                let _ = writeln!(out, "left out: {}: {missing}", line.way.label().trim());
            }
        }
        out
    }

    fn append_downloads(
        &self,
        out: &mut String,
        title: &str,
        figure: fn(&Downloads) -> Spread,
        floor: fn(&Floor) -> f64,
    ) {
        let ideal = self.floors.iter().map(|(_, of)| format!("{:.1}", floor(of) * 1e3));
        let mut lines = vec![(FLOOR, ideal.collect())];
        lines.extend(self.lines(|line| {
            let cells: Vec<String> = line.downloads.iter().map(|of| milliseconds(figure(of))).collect();
            (!cells.is_empty()).then_some(cells)
        }));
        append_table(out, &format!("{title}, in ms (least-most)"), &self.sizes(), &lines);
    }

    fn append_moments(&self, out: &mut String) {
        let lines = self.lines(|line| {
            let cells: Vec<String> = line.moments.iter().map(|moment| milliseconds(*moment)).collect();
            (!cells.is_empty()).then_some(cells)
        });
        let title = "A download of 50 KB, from the client's SYN on, in ms (least-most)";
        append_table(out, title, &MOMENTS, &lines);
    }

    fn append_ratios(&self, out: &mut String) {
        let ratio = |spread: Spread| format!("{:.3}x ({:.3}-{:.3})", spread.median, spread.min, spread.max);
        let cells = |of: fn(&Ratios) -> Option<Spread>| -> Vec<String> {
            self.ratios.iter().filter_map(of).map(ratio).collect()
        };
        let lines = [
            ("first byte to ideal", cells(|of| Some(of.first_byte_to_ideal))),
            ("last byte to ideal", cells(|of| Some(of.total_to_ideal))),
            ("HAProxy's first byte to it", cells(|of| of.window_to_first_byte)),
            ("HAProxy's last byte to it", cells(|of| of.window_to_total)),
        ];
        let lines: Vec<_> = lines.into_iter().filter(|(_, cells)| !cells.is_empty()).collect();
        let title =
            "All of shunt relay against the ideal, and HAProxy with large windows against it (least-most)";
        append_table(out, title, &self.sizes(), &lines);
    }

    fn append_burst(&self, out: &mut String) {
        let columns = ["one alone", "first burst, 90th", "second, median", "second, 90th", "that to one"];
        let lines = self.lines(|line| {
            let of = line.burst?;
            let [single, unannounced, p50, p90] =
                [of.single, of.unannounced, of.p50, of.p90].map(milliseconds);
            Some(vec![single, unannounced, p50, p90, of.ratio.as_ratio()])
        });
        let title = format!("{BURST} new connections at once, to the first byte, in ms (least-most)");
        append_table(out, &title, &columns, &lines);
    }

    fn append_cpu(&self, out: &mut String) {
        let lines = self.lines(|line| {
            let of = line.cpu?;
            let show = |spread: Spread| format!("{:.2} ({:.2}-{:.2})", spread.median, spread.min, spread.max);
            Some([of.machine, of.lab, of.relays].map(show).into())
        });
        let title = "Processor time of a GB, in s (least-most); routed is what the lab itself takes";
        append_table(out, title, &["whole machine", "the lab's programs", "of these, the relays'"], &lines);
    }

    fn append_idle(&self, out: &mut String) {
        let routed = self.ways.iter().find(|line| line.way == Name::Routed).and_then(|line| line.idle);
        let lines = self.lines(|line| {
            let of = line.idle?;
            let show = |bytes: f64| format!("{:.1}", bytes / 1024.0);
            let relay =
                |lab: &IdleFigures| show((of.resident.median + of.slab.median - lab.slab.median) / 2.0);
            let relay = routed.as_ref().map_or_else(|| "not known without routed".to_owned(), relay);
            Some(vec![show(of.resident.median), show(of.slab.median), relay])
        });
        let title = format!(
            "Memory of each of {IDLE} idle connections, in KB; one relay: half of what exceeds the slabs of routed"
        );
        append_table(out, &title, &["both programs", "slabs", "one relay"], &lines);
    }

    fn sizes(&self) -> Vec<String> {
        self.floors.iter().map(|(size, _)| bytes(*size)).collect()
    }

    fn lines(&self, cells: impl Fn(&Line) -> Option<Vec<String>>) -> Vec<(&'static str, Vec<String>)> {
        self.ways.iter().filter_map(|line| Some((line.way.label(), cells(line)?))).collect()
    }
}

/// Returns the ratios by size.
fn ratios(floors: &[(u64, Floor)], rows: &[Row]) -> Vec<Ratios> {
    let by_size = |name| rows.iter().find(|row| row.name == name).map(|row| &row.downloads);
    let Some(ours) = by_size(Name::RelayTurbo) else { return Vec::new() };
    let theirs = by_size(Name::HaproxyWindow);
    let of_size = |(index, (_, floor)): (usize, &(u64, Floor))| {
        let (ours, theirs) = (&ours[index], theirs.map(|theirs| &theirs[index]));
        let to_ideal =
            |figure: fn(&Download) -> f64, floor: f64| Spread::of(ours.iter().map(|of| figure(of) / floor));
        let to_theirs = |figure: fn(&Download) -> f64| Spread::of_ratios(theirs?, ours, figure);
        Some(Ratios {
            first_byte_to_ideal: to_ideal(|of| of.first_byte, floor.first_byte)?,
            total_to_ideal: to_ideal(|of| of.total, floor.total)?,
            window_to_first_byte: to_theirs(|of| of.first_byte),
            window_to_total: to_theirs(|of| of.total),
        })
    };
    floors.iter().enumerate().filter_map(of_size).collect()
}

impl Line {
    fn of(row: &Row, sizes: &[u64]) -> Line {
        let downloads = sizes.iter().zip(&row.downloads).filter_map(|(bytes, downloads)| {
            let [first_byte, total] = Spread::each(downloads, [|of| of.first_byte, |of| of.total])?;
            Some(Downloads { bytes: *bytes, first_byte, total })
        });
        let moment = |index: usize| Spread::of(row.traces.iter().map(|trace| trace.moments[index]));
        Line {
            way: row.name,
            missing: row.missing.clone(),
            moments: (0..MOMENTS.len()).filter_map(moment).collect(),
            time_line: row.traces.first().cloned(),
            downloads: downloads.collect(),
            burst: BurstFigures::of(row),
            cpu: CpuFigures::of(row),
            idle: IdleFigures::of(row),
        }
    }
}

impl BurstFigures {
    fn of(row: &Row) -> Option<BurstFigures> {
        let [single, unannounced, p50, p90, ratio] = Spread::each(
            &row.bursts,
            [|of| of.single, |of| of.unannounced, |of| of.p50, |of| of.p90, |of| of.p90 / of.single],
        )?;
        Some(BurstFigures { single, unannounced, p50, p90, ratio })
    }
}

impl CpuFigures {
    fn of(row: &Row) -> Option<CpuFigures> {
        let [machine, lab, relays] =
            Spread::each(&row.cpu, [|cpu| cpu.machine, |cpu| cpu.lab, |cpu| cpu.relays])?;
        Some(CpuFigures { machine, lab, relays })
    }
}

impl IdleFigures {
    fn of(row: &Row) -> Option<IdleFigures> {
        let [resident, slab] = Spread::each(&row.idle, [|idle| idle.resident, |idle| idle.slab])?;
        Some(IdleFigures { resident, slab })
    }
}

/// Formats a size.
pub(super) fn bytes(size: u64) -> String {
    match size {
        _ if size >= 1_000_000 && size.is_multiple_of(1_000_000) => format!("{} MB", size / 1_000_000),
        _ if size >= 1_000 && size.is_multiple_of(1_000) => format!("{} KB", size / 1_000),
        _ => format!("{size} B"),
    }
}

fn milliseconds(spread: Spread) -> String {
    let [median, min, max] = [spread.median, spread.min, spread.max].map(|seconds| seconds * 1e3);
    format!("{median:.1} ({min:.0}-{max:.0})")
}

fn append_table(out: &mut String, title: &str, columns: &[impl Display], lines: &[(&str, Vec<String>)]) {
    if lines.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{title}");
    TextLine::new("", WIDTH).cells(21, columns).end(out);
    for (label, cells) in lines {
        TextLine::new(label, WIDTH).cells(21, cells).end(out);
    }
}

const FLOOR: &str = "ideal";
/// The width of the first column.
const WIDTH: usize = 30;
