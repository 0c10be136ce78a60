//! `shunt bench overlay`: compares containers of two hosts on the overlay and under shunt with
//! programs on the hosts themselves.
//!
//! Each round measures every load on all sides in turn, and the first side rotates. Ratios are
//! always between figures of one round.

mod cpu;
mod lab;
mod load;
mod migration;
mod over_time;
mod points;
mod report;
mod rules;
mod side;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use shunt_bench_args::overlay::{Arguments, Group};

use crate::comparison::{Comparison, take_turns};
use crate::machine::Machine;
use crate::output::write_with_svg;
use crate::progress::Progress;
use lab::Lab;
use load::{Load, Sample};
use migration::Migration;
use over_time::OverTime;
use report::Report;
use rules::Rules;
use side::Side;

/// The overhead of a turn: its programs start.
const AROUND: Duration = Duration::from_millis(600);

/// A load and its results.
struct Line {
    load: Load,
    /// The reason why it was left out.
    missing: Option<String>,
    /// The samples by side, in the order of the rounds.
    samples: Vec<Vec<Sample>>,
}

/// Compares, and prints the report.
pub(crate) fn compare(arguments: &Arguments) -> Result<()> {
    let (machine, begin) = (Machine::describe(), Instant::now());
    let lab = lab(arguments)?;
    let measured = measure(arguments, &lab)?;
    let report = Report::new(machine, &lab, arguments, measured, begin.elapsed());
    let (output, svg) = (&arguments.output, arguments.svg.as_deref());
    write_with_svg(output, "shunt bench overlay", &report, report.plots(), svg, &report.text())
}

/// All requested results.
struct Taken {
    lines: Vec<Line>,
    over_time: Option<OverTime>,
    migration: Option<Migration>,
    rules: Option<Rules>,
}

fn measure(arguments: &Arguments, lab: &Lab) -> Result<Taken> {
    let mut lines = lines(arguments);
    let (turns, turn) = arguments.length();
    let progress = Progress::begin(turns, turn);
    for line in &mut lines {
        line.measure(lab, arguments.output.repeats, arguments.time(), &progress)?;
    }
    let measure = |turns| {
        progress.set_message("policy".to_owned());
        let measured = over_time::measure(lab, every(arguments), &progress).context("policy");
        progress.inc(turns);
        measured
    };
    let over_time = turns_of_policy(arguments).map(measure).transpose()?.flatten();
    let repeats = arguments.output.repeats;
    let measure = |turns| {
        let measured = migration::measure(repeats, &progress);
        progress.inc(turns);
        measured
    };
    let migration = turns_of_migration(arguments).map(measure).transpose()?;
    let rules = arguments.wants(Group::Rules).then(rules::measure).transpose()?;
    progress.end();
    Ok(Taken { lines, over_time, migration, rules })
}

fn lab(arguments: &Arguments) -> Result<Lab> {
    Lab::build(Duration::from_millis(arguments.rtt)).context("building the lab")
}

/// Returns the interval between two points of the measurement over time.
fn every(arguments: &Arguments) -> Duration {
    arguments.time() / 2
}

/// Returns the length of the policy measurement, in turns.
fn turns_of_policy(arguments: &Arguments) -> Option<u64> {
    in_turns(arguments, Group::Policy, over_time::length(every(arguments)))
}

/// Returns the length of the migration measurement, in turns.
fn turns_of_migration(arguments: &Arguments) -> Option<u64> {
    in_turns(arguments, Group::Migration, migration::TURN * migration::turns(arguments.output.repeats))
}

/// Returns how many turns take as long as a measurement, if it is wanted.
fn in_turns(arguments: &Arguments, group: Group, length: Duration) -> Option<u64> {
    let turns = length.as_secs_f64() / (arguments.time() + AROUND).as_secs_f64();
    arguments.wants(group).then(|| turns.ceil() as u64)
}

fn lines(arguments: &Arguments) -> Vec<Line> {
    let wanted = |load: &Load| arguments.wants(load.group());
    let line =
        |load: Load| Line { load, missing: load.missing(), samples: vec![Vec::new(); Side::ALL.len()] };
    Load::all().into_iter().filter(wanted).map(line).collect()
}

impl Line {
    fn measure(&mut self, lab: &Lab, repeats: u32, time: Duration, progress: &Progress) -> Result<()> {
        let label = self.load.label();
        if let Some(missing) = &self.missing {
            progress.say(&format!("left out: {label}: {missing}"));
            return Ok(());
        }
        let turn = |side: usize| self.load.run(lab, Side::ALL[side], time).map(Some);
        self.samples = take_turns(progress, repeats, &label, &Side::ALL.map(Side::label), turn)?;
        Ok(())
    }
}
