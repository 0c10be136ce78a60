//! Formats the results as tables, plots and JSON.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::load::{CACHE_CLIENTS, CLIENTS, Load, SINKS, Sample};
use super::way::{WAYS, Way, ways};
use super::{Arguments, Group, Line, Measured, proxy, starts};
use crate::machine::Machine;
use crate::report::{Axes, Plot, Series, TextLine, or_dash};
use crate::stats::Spread;

/// The report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: Machine,
    repeats: u32,
    seconds_per_turn: f64,
    /// Programs that computed meanwhile.
    busy: usize,
    seconds_in_all: f64,
    tables: Vec<Table>,
    proxies: Vec<proxy::Row>,
    starts: Vec<starts::Row>,
}

#[derive(Debug, Serialize)]
struct Table {
    name: &'static str,
    title: String,
    /// The figures are latencies in microseconds, instead of messages per second.
    is_latency: bool,
    lines: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    load: Load,
    cells: Vec<Cell>,
}

#[derive(Debug, Serialize)]
struct Cell {
    way: Way,
    figure: Spread,
    /// The ratio to the plain program within each round.
    to_plain: Spread,
    p50_us: Spread,
    p99_us: Spread,
    processor_us: Spread,
    /// The ratio of the processor time to the plain program's within each round.
    processor_to_plain: Spread,
}

impl Report {
    pub(super) fn new(
        machine: Machine,
        arguments: &Arguments,
        Measured { lines, proxies, starts }: Measured,
        all: Duration,
    ) -> Report {
        let groups = [Group::Echo, Group::EchoMany, Group::Forward, Group::Sparse, Group::Cache];
        let table = |group: Group| {
            let lines: Vec<&Line> = lines.iter().filter(|line| line.group == group).collect();
            (!lines.is_empty()).then(|| Table::of(group, &lines))
        };
        Report {
            machine,
            repeats: arguments.output.repeats,
            seconds_per_turn: arguments.seconds,
            busy: arguments.busy,
            seconds_in_all: all.as_secs_f64(),
            tables: groups.into_iter().filter_map(table).collect(),
            proxies,
            starts,
        }
    }

    pub(super) fn text(&self) -> String {
        let machine = &self.machine;
        let mut out = format!(
            "{machine})\n\
             Medians of {} turns of {} s each, ways in turn within each round; {:.0} s in all.\n",
            self.repeats, self.seconds_per_turn, self.seconds_in_all
        );
        if self.busy > 0 {
            let _ = writeln!(out, "Next to {} programs that only compute.", self.busy);
        }
        for table in &self.tables {
            table.write(&mut out);
        }
        for contest in [proxy::PROXIES, proxy::STATIC] {
            if self.proxies.iter().any(|row| row.is_of(contest)) {
                proxy::write(contest, &self.proxies, &mut out);
            }
        }
        if !self.starts.is_empty() {
            starts::write(&self.starts, &mut out);
        }
        out
    }

    /// Returns the plots of the thesis with their file names. The cache has one size, and so no plot.
    pub(super) fn plots(&self) -> Vec<(&'static str, Plot)> {
        self.tables
            .iter()
            .filter(|table| table.name != "cache")
            .map(|table| (table.name, table.plot()))
            .collect()
    }
}

impl Table {
    fn of(group: Group, lines: &[&Line]) -> Table {
        let (name, title) = match group {
            Group::Echo => ("echo", format!("Echo, {CLIENTS} clients, one message under way each")),
            Group::EchoMany => ("echo-many", format!("Echo, {CLIENTS} clients, 16 messages under way each")),
            Group::Forward => ("forward", format!("Thrift forwarder, {CLIENTS} clients, {SINKS} sinks")),
            Group::Sparse => ("sparse", "Thrift forwarder, a message each millisecond".to_owned()),
            Group::Cache => (
                "cache",
                format!("Cache, {CACHE_CLIENTS} connections, items of {} B, one thread", super::CACHED),
            ),
            Group::Proxy | Group::Static | Group::Start => unreachable!("it has a table of another kind"),
        };
        let is_latency = group == Group::Sparse;
        let lines = lines.iter().map(|line| Row::of(line, is_latency)).collect();
        Table { name, title, is_latency, lines }
    }

    fn write(&self, out: &mut String) {
        let unit =
            if self.is_latency { "us from client to sink, median" } else { "thousand messages a second" };
        let _ = writeln!(out, "\n{} ({unit})", self.title);
        // The columns of the latency and of the processor time are those of one table each.
        let latency = (self.name == "echo").then_some(0);
        let is_cache = self.name == "cache";
        let ways = ways(is_cache);
        let head = TextLine::new("", 24).cells(10, ways.iter().map(|way| way.label()));
        let head = head.cells(22, ways[1..].iter().map(|way| format!("{} to plain", way.label())));
        head.cells(0, latency.map(|_| "  latency p50, us")).end(out);
        for row in &self.lines {
            let cells = || ways.iter().map(|way| row.cells.iter().find(|cell| cell.way == *way));
            let figures = cells().map(|cell| or_dash(cell.map(|cell| format!("{:.1}", cell.figure.median))));
            let ratios = cells().skip(1).map(|cell| or_dash(cell.map(|cell| cell.to_plain.as_ratio())));
            let p50 = row.cells.iter().map(|cell| format!("{:.0}", cell.p50_us.median));
            let p50 = latency.map(|_| format!("  {}", p50.collect::<Vec<_>>().join(" / ")));
            TextLine::new(row.load.label(), 24).cells(10, figures).cells(22, ratios).cells(0, p50).end(out);
            if is_cache {
                let times =
                    cells().map(|cell| or_dash(cell.map(|cell| format!("{:.2}", cell.processor_us.median))));
                let ratios =
                    cells().skip(1).map(|cell| or_dash(cell.map(|cell| cell.processor_to_plain.as_ratio())));
                TextLine::new("  processor time, us", 24).cells(10, times).cells(22, ratios).end(out);
            }
        }
    }

    fn plot(&self) -> Plot {
        let series = WAYS.into_iter().map(|way| {
            let point = |row: &Row| {
                let cell = row.cells.iter().find(|cell| cell.way == way)?;
                Some((row.load.bytes() as f64, cell.figure))
            };
            Series { label: way.label(), points: self.lines.iter().filter_map(point).collect() }
        });
        Plot {
            title: self.title.clone(),
            x_label: "bytes".to_owned(),
            y_label: if self.is_latency { "us" } else { "thousand messages a second" }.to_owned(),
            axes: Axes::Logarithmic,
            series: series.collect(),
        }
    }
}

impl Row {
    fn of(line: &Line, is_latency: bool) -> Row {
        let figure = |sample: &Sample| if is_latency { sample.p50_us } else { sample.rate / 1e3 };
        // Not every load measures it.
        let processor = |sample: &Sample| sample.processor_us.max(f64::MIN_POSITIVE);
        let cell = |(way, samples): (Way, &Vec<Sample>)| {
            Some(Cell {
                way,
                figure: Spread::of(samples.iter().map(figure))?,
                to_plain: Spread::of_ratios(samples, &line.samples[0], figure)?,
                p50_us: Spread::of(samples.iter().map(|sample| sample.p50_us))?,
                p99_us: Spread::of(samples.iter().map(|sample| sample.p99_us))?,
                processor_us: Spread::of(samples.iter().map(|sample| sample.processor_us))?,
                processor_to_plain: Spread::of_ratios(samples, &line.samples[0], processor)?,
            })
        };
        Row { load: line.load, cells: WAYS.into_iter().zip(&line.samples).filter_map(cell).collect() }
    }
}
