//! `shunt bench overlay`: containers of two hosts, on the overlay and under shunt, against programs on the hosts themselves.
//!
//! Every load is measured on all sides in turn, again and again; which side begins rotates. What is compared is always of the same round.

mod cpu;
mod lab;
mod load;
mod over_time;
mod report;
mod side;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::interrupt::interruptible;
use crate::machine::Machine;
use crate::options::{Output, parse_seconds};
use crate::progress::Progress;
use lab::Lab;
use load::{Group, Load, Sample};
use report::Report;
use side::Side;

/// `shunt bench overlay`
#[derive(Debug, Args)]
#[command(mut_arg("repeats", |repeats| repeats.default_value("7")))]
pub struct Arguments {
    #[command(flatten)]
    output: Output,

    /// Write the plots to this directory, as throughput.svg, cpu.svg, round-trip.svg and policy.svg
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,

    /// How long one turn is measured
    #[arg(long, value_name = "SECS", default_value_t = 1.0, value_parser = parse_seconds)]
    seconds: f64,

    /// What a round trip between the hosts takes: with much, set-up is counted in round trips, however busy this machine is
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..1000))]
    rtt: u64,

    /// Only these measurements [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    only: Vec<Group>,
}

/// What a turn takes besides: its programs start.
const AROUND: Duration = Duration::from_millis(600);

/// A load, and what came of it.
struct Line {
    load: Load,
    /// Why it was left out.
    missing: Option<String>,
    /// By side, round by round.
    samples: [Vec<Sample>; Side::ALL.len()],
}

/// Runs and prints it.
pub fn run(arguments: &Arguments) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "its hosts are network namespaces, which are made by root only"
    );
    interruptible(|| compare(arguments))
}

fn compare(arguments: &Arguments) -> Result<()> {
    let (machine, begin) = (Machine::describe(), Instant::now());
    let lab = Lab::build(Duration::from_millis(arguments.rtt)).context("building the lab")?;
    let mut lines = arguments.lines();
    let time = Duration::from_secs_f64(arguments.seconds);
    let present = lines.iter().filter(|line| line.missing.is_none()).count();
    let turns = present as u64 * Side::ALL.len() as u64 * u64::from(arguments.output.repeats);
    let (every, turn) = (time / 2, time + AROUND);
    // As many turns as it is long.
    let over_time = arguments
        .wants(Group::Policy)
        .then(|| over_time::length(every).as_secs_f64() / turn.as_secs_f64())
        .map(|turns| turns.ceil() as u64);
    let progress = Progress::begin(turns + over_time.unwrap_or(0), turn);
    for line in &mut lines {
        line.measure(&lab, arguments.output.repeats, time, &progress)?;
    }
    let measure = |turns| {
        progress.set_message("policy".to_owned());
        let measured = over_time::measure(&lab, every, &progress).context("policy");
        progress.inc(turns);
        measured
    };
    let over_time = over_time.map(measure).transpose()?.flatten();
    progress.end();
    write(&Report::new(machine, &lab, arguments, &lines, over_time, begin.elapsed()), arguments)
}

fn write(report: &Report, arguments: &Arguments) -> Result<()> {
    let (output, svg) = (&arguments.output, arguments.svg.as_deref());
    output.write_with_svg("shunt bench overlay", report, report.plots(), svg, &report.text())
}

impl Arguments {
    fn wants(&self, group: Group) -> bool {
        self.only.is_empty() || self.only.contains(&group)
    }

    fn lines(&self) -> Vec<Line> {
        let wanted = |load: &Load| self.wants(load.group());
        let line = |load: Load| Line { load, missing: load.missing(), samples: Default::default() };
        Load::all().into_iter().filter(wanted).map(line).collect()
    }
}

impl Line {
    fn measure(&mut self, lab: &Lab, repeats: u32, time: Duration, progress: &Progress) -> Result<()> {
        let label = self.load.label();
        if let Some(missing) = &self.missing {
            progress.say(&format!("left out: {label}: {missing}"));
            return Ok(());
        }
        for round in 0..repeats as usize {
            for turn in 0..Side::ALL.len() {
                let index = (round + turn) % Side::ALL.len();
                let side = Side::ALL[index];
                progress.set_message(format!("{label}: {}", side.label()));
                let sample = self.load.run(lab, side, time);
                self.samples[index].push(sample.with_context(|| format!("{label}: {}", side.label()))?);
                progress.inc(1);
            }
        }
        Ok(())
    }
}
