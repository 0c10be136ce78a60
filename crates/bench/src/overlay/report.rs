//! Formats the results: as text for a terminal, as plots, and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::Group;
use super::lab::Lab;
use super::load::{Load, Sample};
use super::migration::Migration;
use super::over_time::OverTime;
use super::rules::Rules;
use super::side::Side;
use super::{Arguments, Line, Taken};
use crate::comparison::{self, Quantity, less};
use crate::machine::Machine;
use crate::report::{Axes, Plot, Series, TextLine};
use crate::stats::Spread;

/// The report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: Machine,
    /// The processors of the server's and the client's hosts.
    pinned: (usize, usize),
    rtt_ms: u64,
    repeats: u32,
    seconds_per_turn: f64,
    seconds_in_all: f64,
    loads: Vec<Table>,
    #[serde(skip_serializing_if = "Option::is_none")]
    over_time: Option<OverTime>,
    #[serde(skip_serializing_if = "Option::is_none")]
    migration: Option<Migration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rules: Option<Rules>,
}

/// The results of a load.
#[derive(Debug, Serialize)]
struct Table {
    what: Group,
    label: String,
    bytes: Option<usize>,
    missing: Option<String>,
    figures: Vec<Figure>,
    /// Under shunt, in all rounds: how many connections used the host network, and below, how many
    /// did not, by reason.
    on_host: u64,
    on_overlay: BTreeMap<String, u64>,
}

/// A line of a table.
#[derive(Debug, Serialize)]
struct Figure {
    label: &'static str,
    host: Spread,
    vxlan: Spread,
    shunt: Spread,
    secure: Spread,
    /// Ratios within each round.
    shunt_to_host: Spread,
    shunt_to_vxlan: Spread,
    secure_to_shunt: Spread,
}

impl Report {
    pub(super) fn new(
        machine: Machine,
        lab: &Lab,
        arguments: &Arguments,
        taken: Taken,
        all: Duration,
    ) -> Report {
        Report {
            machine,
            pinned: lab.cpus(),
            rtt_ms: arguments.rtt,
            repeats: arguments.output.repeats,
            seconds_per_turn: arguments.seconds,
            seconds_in_all: all.as_secs_f64(),
            loads: taken.lines.iter().map(Table::of).collect(),
            over_time: taken.over_time,
            migration: taken.migration,
            rules: taken.rules,
        }
    }

    /// Returns the plots with their file names.
    pub(super) fn plots(&self) -> Vec<(&'static str, Plot)> {
        let plot = |what: Group, of: Quantity, title: &str, y_label: &str| {
            let tables = || self.loads.iter().filter(|table| table.what == what);
            let series = Side::ALL.map(|side| Series {
                label: side.label(),
                points: tables().filter_map(|table| table.point(of.label, side)).collect(),
            });
            let series: Vec<Series> = series.into_iter().filter(|series| !series.points.is_empty()).collect();
            (!series.is_empty()).then(|| Plot {
                title: title.to_owned(),
                x_label: "bytes of a message".to_owned(),
                y_label: y_label.to_owned(),
                axes: Axes::Logarithmic,
                series,
            })
        };
        let named = |name, plot: Option<Plot>| Some((name, plot?));
        let plots = [
            named(
                "throughput",
                plot(Group::Throughput, Quantity::MEGABYTES, "Throughput of one connection", "MB/s"),
            ),
            named(
                "cpu",
                plot(Group::Throughput, Quantity::CPU_OF_GB, "Processor time of a GB, both hosts", "s"),
            ),
            named("round-trip", plot(Group::RoundTrip, Quantity::MEDIAN, "Round trip", "us")),
            named("policy", self.over_time.as_ref().map(OverTime::plot)),
        ];
        plots.into_iter().flatten().collect()
    }

    pub(super) fn text(&self) -> String {
        let machine = &self.machine;
        let mut out = format!(
            "{machine}); everything of the server's host on {}, of the client's on {}; \
             {} ms between them\n\
             Medians of {} turns of {} s each, sides in turn within each round (least-most); {:.0} s in all.\n",
            self.pinned.0,
            self.pinned.1,
            self.rtt_ms,
            self.repeats,
            self.seconds_per_turn,
            self.seconds_in_all
        );
        self.loads.iter().for_each(|table| table.write(&mut out));
        self.over_time.iter().for_each(|over_time| over_time.write(&mut out));
        self.migration.iter().for_each(|migration| migration.write(&mut out));
        self.rules.iter().for_each(|rules| rules.write(&mut out));
        out += "\nhost: both programs on the hosts themselves. shunt: secure = false. shunt secure: secure = true. CPU: processor time of both hosts, routers and supervisors included; sleeps: how often a thread of any of them went to sleep, to be woken again.\n";
        out
    }
}

/// Returns the quantities of a load.
pub(super) fn values(load: Load) -> Vec<comparison::Figure<Sample>> {
    let (rate, cpu) = match load.group() {
        Group::Throughput => (Quantity::MEGABYTES, Quantity::CPU_OF_GB),
        _ => (Quantity::RATE, Quantity::CPU_OF_ONE),
    };
    let mut values: Vec<comparison::Figure<Sample>> = vec![
        (rate, |sample| Some(sample.rate)),
        (Quantity::MEDIAN, |sample| (sample.p50 > 0.0).then_some(sample.p50)),
        (Quantity::P99, |sample| (sample.p99 > 0.0).then_some(sample.p99)),
        (cpu, |sample| Some(sample.cpu?.all)),
        (less("  user"), |sample| Some(sample.cpu?.user)),
        (less("  system"), |sample| Some(sample.cpu?.system)),
        (Quantity::SOFTIRQ, |sample| Some(sample.cpu?.softirq)),
    ];
    if load.group() != Group::Throughput {
        values.push((less("sleeps in one"), |sample| Some(sample.cpu?.sleeps)));
    }
    values
}

impl Table {
    fn of(line: &Line) -> Table {
        let figures =
            values(line.load).into_iter().filter_map(|(quantity, of)| Figure::of(quantity.label, line, of));
        let paths = || line.samples.iter().flatten().filter_map(|sample| sample.paths.as_ref());
        let mut on_overlay = BTreeMap::new();
        for (reason, count) in paths().flat_map(|paths| &paths.overlay) {
            *on_overlay.entry(reason.clone()).or_default() += count;
        }
        Table {
            what: line.load.group(),
            label: line.load.label(),
            bytes: line.load.bytes(),
            missing: line.missing.clone(),
            figures: figures.collect(),
            on_host: paths().map(|paths| paths.host).sum(),
            on_overlay,
        }
    }

    fn point(&self, label: &str, side: Side) -> Option<(f64, Spread)> {
        let figure = self.figures.iter().find(|figure| figure.label == label)?;
        Some((self.bytes? as f64, figure.side(side)))
    }

    fn write(&self, out: &mut String) {
        let _ = write!(out, "\n{}\n", self.label);
        if let Some(missing) = &self.missing {
            let _ = writeln!(out, "left out: {missing}");
            return;
        }
        let ratios = ["shunt to host", "shunt to VXLAN", "secure to shunt"];
        TextLine::new("", 21).cells(22, Side::ALL.map(Side::label)).cells(22, ratios).end(out);
        for figure in &self.figures {
            let ratios = [figure.shunt_to_host, figure.shunt_to_vxlan, figure.secure_to_shunt];
            TextLine::new(figure.label, 21)
                .cells(22, Side::ALL.map(|side| figure.side(side).shown()))
                .cells(22, ratios.map(Spread::as_ratio))
                .end(out);
        }
        if !self.on_overlay.is_empty() {
            let reasons: Vec<String> =
                self.on_overlay.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
            let _ = writeln!(
                out,
                "  {} connections took the host network, others stayed on the overlay: {}",
                self.on_host,
                reasons.join(", ")
            );
        }
    }
}

impl Figure {
    /// Returns a line, or `None` if it was not measured.
    fn of(label: &'static str, line: &Line, of: fn(&Sample) -> Option<f64>) -> Option<Figure> {
        let all: Vec<Vec<f64>> =
            line.samples.iter().map(|samples| samples.iter().filter_map(of).collect()).collect();
        let [host, vxlan, shunt, secure] = &all[..] else { return None };
        let ratio = |one: &[f64], other: &[f64]| {
            let rounds = one.iter().zip(other).filter(|(_, theirs)| **theirs > 0.0);
            Spread::of(rounds.map(|(ours, theirs)| ours / theirs))
        };
        let spread = |figures: &[f64]| Spread::of(figures.iter().copied());
        Some(Figure {
            label,
            host: spread(host)?,
            vxlan: spread(vxlan)?,
            shunt: spread(shunt)?,
            secure: spread(secure)?,
            shunt_to_host: ratio(shunt, host)?,
            shunt_to_vxlan: ratio(shunt, vxlan)?,
            secure_to_shunt: ratio(secure, shunt)?,
        })
    }

    fn side(&self, side: Side) -> Spread {
        match side {
            Side::Host => self.host,
            Side::Vxlan => self.vxlan,
            Side::Shunt => self.shunt,
            Side::Secure => self.secure,
        }
    }
}
