//! `shunt bench relay`: compares relays between two distant sites, and their alternatives, in the
//! paper's topology.
//!
//! Each round sets up, measures and takes down every way in turn, and the first one rotates. Only
//! one way exists at a time, because some change the hosts' settings.

mod floor;
mod lab;
mod measure;
mod points;
mod report;
mod trace;
mod way;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use shunt_bench_args::relay::{Arguments, Group, Name};

use crate::comparison::{Comparison, rotated};
use crate::machine::Machine;
use crate::output::write_with_svg;
use crate::process::Process;
use crate::progress::Progress;
use crate::report::{TimeLine, time_lines as drawn};
use crate::worker::Download;
use lab::{Host, Lab, PORT, Settings};
use measure::{Burst, Cpu, Idle};
use report::Report;
use trace::Trace;
use way::Running;

/// The measurements of one way, in the order of the rounds.
struct Row {
    name: Name,
    /// The reason why it was left out.
    missing: Option<String>,
    traces: Vec<Trace>,
    /// The downloads by size.
    downloads: Vec<Vec<Download>>,
    bursts: Vec<Burst>,
    cpu: Vec<Cpu>,
    idle: Vec<Idle>,
}

/// The approximate length of a measurement, over links with long round trips.
const MEASUREMENT: Duration = Duration::from_secs(6);

/// Compares, and prints the report.
pub(crate) fn compare(arguments: &Arguments) -> Result<()> {
    let machine = Machine::describe();
    let begin = Instant::now();
    let rows = measure(arguments)?;
    let report = Report::new(machine, settings(arguments), arguments, &rows, begin.elapsed());
    let plots = ["first-byte", "total"].into_iter().zip(report.plots());
    let (output, svg) = (&arguments.output, arguments.svg.as_deref());
    write_with_svg(output, "shunt bench relay", &report, plots, svg, &report.text())?;
    write_time_lines(&rows, arguments)
}

fn measure(arguments: &Arguments) -> Result<Vec<Row>> {
    let lab = Lab::build(settings(arguments)).context("building the lab")?;
    let server = serve(&lab)?;
    let mut rows = rows(arguments);
    let (turns, turn) = arguments.length();
    let progress = Progress::begin(turns, turn);
    for (_, index) in rotated(arguments.output.repeats, rows.len()) {
        let row = &mut rows[index];
        let label = row.name.label().trim();
        row.measure(&lab, arguments, &progress).with_context(|| format!("measuring {label}"))?;
    }
    progress.end();
    server.finish()?;
    Ok(rows)
}

/// Starts the server, which all ways use.
fn serve(lab: &Lab) -> Result<Process> {
    let mut command = lab.worker(Host::Server, "serve");
    command.args(["--at", &format!("0.0.0.0:{PORT}")]);
    Ok(Process::serving(&mut command, "the server")?.0)
}

fn write_time_lines(rows: &[Row], arguments: &Arguments) -> Result<()> {
    let lines: Vec<TimeLine> = time_lines(rows).collect();
    let Some(directory) = arguments.svg.as_ref().filter(|_| !lines.is_empty()) else { return Ok(()) };
    let path = directory.join("time-lines.svg");
    let drawn = drawn("Who sends what when, in the first round", &lines.iter().collect::<Vec<_>>())?;
    std::fs::write(&path, drawn).with_context(|| format!("writing {}", path.display()))
}

fn settings(arguments: &Arguments) -> Settings {
    Settings { bits_per_second: arguments.bandwidth, loss: arguments.loss / 100.0 }
}

fn rows(arguments: &Arguments) -> Vec<Row> {
    arguments.ways().into_iter().map(|name| Row::new(name, arguments)).collect()
}

/// Returns the number of measurements of a way in a round.
fn measurements(arguments: &Arguments, name: Name) -> usize {
    let time_lines = usize::from(arguments.wants(Group::TimeLines));
    let downloads = if arguments.wants(Group::Downloads) { arguments.sizes.len() } else { 0 };
    let others = [Group::Burst, Group::Cpu, Group::Idle].into_iter().filter(|group| arguments.wants(*group));
    time_lines + downloads + if way::is_weighed(name) { others.count() } else { 0 }
}

impl Row {
    fn new(name: Name, arguments: &Arguments) -> Row {
        Row {
            name,
            missing: way::way(name).missing(),
            traces: Vec::new(),
            downloads: vec![Vec::new(); arguments.sizes.len()],
            bursts: Vec::new(),
            cpu: Vec::new(),
            idle: Vec::new(),
        }
    }

    /// Runs a turn.
    fn measure(&mut self, lab: &Lab, arguments: &Arguments, progress: &Progress) -> Result<()> {
        if self.missing.is_some() || measurements(arguments, self.name) == 0 {
            return Ok(());
        }
        let way = way::way(self.name);
        let running = way.start(lab).context("starting it")?;
        self.measure_running(lab, arguments, &running, progress)?;
        drop(running);
        way.end(lab)
    }

    fn measure_running(
        &mut self,
        lab: &Lab,
        arguments: &Arguments,
        way: &Running,
        progress: &Progress,
    ) -> Result<()> {
        let name = self.name;
        let say = |what: &str| progress.set_message(format!("{}: {what}", name.label().trim()));
        let wants = |group| way::is_weighed(name) && arguments.wants(group);
        if arguments.wants(Group::TimeLines) {
            say("a time line");
            self.traces.push(measure::time_line(lab, way)?);
            progress.inc(1);
        }
        if arguments.wants(Group::Downloads) {
            for (size, downloads) in arguments.sizes.iter().zip(&mut self.downloads) {
                say(&report::bytes(*size));
                downloads.push(measure::download(lab, way, *size)?);
                progress.inc(1);
            }
        }
        if wants(Group::Burst) {
            say("a burst");
            self.bursts.push(measure::burst(lab, way)?);
            progress.inc(1);
        }
        if wants(Group::Cpu) {
            say("processor time");
            self.cpu.push(measure::cpu(lab, way)?);
            progress.inc(1);
        }
        if wants(Group::Idle) {
            say("idle connections");
            self.idle.push(measure::idle(lab, way)?);
            progress.inc(1);
        }
        Ok(())
    }
}

/// Returns the time line of each way's first round.
fn time_lines(rows: &[Row]) -> impl Iterator<Item = TimeLine> {
    rows.iter().filter_map(|row| Some(row.traces.first()?.time_line(row.name.label().trim())))
}

/// Returns the number of all measurements.
fn turns(rows: &[Row], arguments: &Arguments) -> u64 {
    let present = rows.iter().filter(|row| row.missing.is_none());
    let once: usize = present.map(|row| measurements(arguments, row.name)).sum();
    once as u64 * u64::from(arguments.output.repeats)
}
