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

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use crate::comparison::Comparison;
use crate::interrupt::interruptible;
use crate::machine::Machine;
use crate::options::Output;
use crate::process::Process;
use crate::progress::Progress;
use crate::report::{TimeLine, time_lines as drawn};
use crate::worker::{Download, READY};
use lab::{Host, Lab, PORT, Settings};
use measure::{Burst, Cpu, Idle};
use report::Report;
use trace::Trace;
use way::{Name, Running};

/// `shunt bench relay`
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    output: Output,

    /// Write the plots to this directory, as first-byte.svg, total.svg and time-lines.svg
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,

    /// What is downloaded: bytes, or as many thousand (k) or million (m)
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "10k,50k,100k,1m,10m,50m", value_parser = parse_size)]
    sizes: Vec<u64>,

    /// The rate of every link
    #[arg(long, value_name = "N(k|m|g)bit", default_value = "500mbit", value_parser = parse_rate)]
    bandwidth: u64,

    /// The share of packets that every link loses
    #[arg(long, value_name = "PERCENT", default_value_t = 0.0, value_parser = parse_percent)]
    loss: f64,

    /// Only these ways [default: all]
    #[arg(long, value_enum, value_name = "WAY,...", value_delimiter = ',')]
    ways: Vec<Name>,

    /// Only these measurements [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    only: Vec<Group>,
}

/// What can be asked for by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Group {
    /// Who sends what when in a download of 50 KB
    TimeLines,
    /// Time to first byte and in all, by size
    Downloads,
    /// 200 new connections at once against a single one
    Burst,
    /// Processor time by volume
    Cpu,
    /// Memory of 1,000 idle connections
    Idle,
}

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

/// Runs the comparison and prints its report.
pub fn run(arguments: &Arguments) -> Result<()> {
    if let Some(missing) = arguments.missing() {
        bail!(missing);
    }
    interruptible(|| compare(arguments))
}

fn compare(arguments: &Arguments) -> Result<()> {
    let machine = Machine::describe();
    let begin = Instant::now();
    let rows = measure(arguments)?;
    write(&Report::new(machine, arguments.settings(), arguments, &rows, begin.elapsed()), arguments)?;
    write_time_lines(&rows, arguments)
}

fn measure(arguments: &Arguments) -> Result<Vec<Row>> {
    let lab = Lab::build(arguments.settings()).context("building the lab")?;
    let server = serve(&lab)?;
    let mut rows = arguments.rows();
    let (turns, turn) = arguments.length();
    let progress = Progress::begin(turns, turn);
    for round in 0..arguments.output.repeats as usize {
        for turn in 0..rows.len() {
            let index = (round + turn) % rows.len();
            let row = &mut rows[index];
            let label = row.name.label().trim();
            row.measure(&lab, arguments, &progress).with_context(|| format!("measuring {label}"))?;
        }
    }
    progress.end();
    server.finish()?;
    Ok(rows)
}

/// Starts the server, which all ways use.
fn serve(lab: &Lab) -> Result<Process> {
    let mut command = lab.worker(Host::Server, "serve");
    command.args(["--at", &format!("0.0.0.0:{PORT}")]);
    let mut server = Process::spawn_with_lines(&mut command, "the server")?;
    server.expect(READY, Duration::from_secs(10))?;
    Ok(server)
}

fn write(report: &Report, arguments: &Arguments) -> Result<()> {
    let plots = ["first-byte", "total"].into_iter().zip(report.plots());
    let (output, svg) = (&arguments.output, arguments.svg.as_deref());
    output.write_with_svg("shunt bench relay", report, plots, svg, &report.text())
}

fn write_time_lines(rows: &[Row], arguments: &Arguments) -> Result<()> {
    let lines: Vec<TimeLine> = time_lines(rows).collect();
    let Some(directory) = arguments.svg.as_ref().filter(|_| !lines.is_empty()) else { return Ok(()) };
    let path = directory.join("time-lines.svg");
    let drawn = drawn("Who sends what when, in the first round", &lines.iter().collect::<Vec<_>>())?;
    std::fs::write(&path, drawn).with_context(|| format!("writing {}", path.display()))
}

impl Arguments {
    fn settings(&self) -> Settings {
        Settings { bits_per_second: self.bandwidth, loss: self.loss / 100.0 }
    }

    fn rows(&self) -> Vec<Row> {
        self.ways().into_iter().map(|name| Row::new(name, self)).collect()
    }

    fn ways(&self) -> Vec<Name> {
        let all = Name::value_variants().iter().copied();
        all.filter(|name| self.ways.is_empty() || self.ways.contains(name)).collect()
    }

    fn wants(&self, group: Group) -> bool {
        self.only.is_empty() || self.only.contains(&group)
    }

    /// Returns the number of measurements of a way in a round.
    fn measurements(&self, name: Name) -> usize {
        let time_lines = usize::from(self.wants(Group::TimeLines));
        let downloads = if self.wants(Group::Downloads) { self.sizes.len() } else { 0 };
        let others = [Group::Burst, Group::Cpu, Group::Idle].into_iter().filter(|group| self.wants(*group));
        time_lines + downloads + if name.is_weighed() { others.count() } else { 0 }
    }
}

impl Row {
    fn new(name: Name, arguments: &Arguments) -> Row {
        Row {
            name,
            missing: name.way().missing(),
            traces: Vec::new(),
            downloads: vec![Vec::new(); arguments.sizes.len()],
            bursts: Vec::new(),
            cpu: Vec::new(),
            idle: Vec::new(),
        }
    }

    /// Runs a turn.
    fn measure(&mut self, lab: &Lab, arguments: &Arguments, progress: &Progress) -> Result<()> {
        if self.missing.is_some() || arguments.measurements(self.name) == 0 {
            return Ok(());
        }
        let way = self.name.way();
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
        let wants = |group| name.is_weighed() && arguments.wants(group);
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
    let once: usize = present.map(|row| arguments.measurements(row.name)).sum();
    once as u64 * u64::from(arguments.output.repeats)
}

fn parse_size(text: &str) -> Result<u64, String> {
    let size = scaled(&text.to_ascii_lowercase()).filter(|size| (1..=1_000_000_000).contains(size));
    size.ok_or_else(|| "expected bytes, from 1 to 1000m".to_owned())
}

fn parse_rate(text: &str) -> Result<u64, String> {
    let text = text.to_ascii_lowercase();
    let rate = text.strip_suffix("bit").and_then(scaled);
    let rate = rate.filter(|rate| (100_000..=10_000_000_000).contains(rate));
    rate.ok_or_else(|| "expected a rate such as 500mbit, from 100kbit to 10gbit".to_owned())
}

fn parse_percent(text: &str) -> Result<f64, String> {
    let percent = text.parse().ok().filter(|percent| (0.0..=50.0).contains(percent));
    percent.ok_or_else(|| "expected percent, from 0 to 50".to_owned())
}

/// Parses a number that may end in k, m or g.
fn scaled(text: &str) -> Option<u64> {
    let scales = [('k', 1_000), ('m', 1_000_000), ('g', 1_000_000_000)];
    let scale = scales.into_iter().find_map(|(letter, scale)| Some((text.strip_suffix(letter)?, scale)));
    let (number, scale) = scale.unwrap_or((text, 1));
    number.parse::<u64>().ok()?.checked_mul(scale)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_rates_are_of_thousands() {
        assert_eq!(parse_size("10k"), Ok(10_000));
        assert_eq!(parse_size("50M"), Ok(50_000_000));
        assert_eq!(parse_size("7"), Ok(7));
        assert_eq!(parse_rate("500mbit"), Ok(500_000_000));
        for bad in ["", "0", "k", "-1", "1.5m", "2g", "99999999999999999999"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        for bad in ["500", "mbit", "1kbit", "100gbit", "500mb"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
        for bad in ["-1", "51", "nan", ""] {
            assert!(parse_percent(bad).is_err(), "{bad}");
        }
    }
}
