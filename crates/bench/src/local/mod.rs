//! `shunt bench local`: compares the shared-memory transport with TCP and Unix sockets.
//!
//! Each round measures every point of every table on all its sides in turn, and the first side
//! rotates. Ratios are always between figures of one round.

mod busy;
mod containers;
mod one_sided;
mod pair;
mod point;
mod points;
mod programs;
mod relaying;
mod synthetic;
mod tables;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};

use crate::interrupt::interruptible;
use crate::machine::Place;
use crate::options::{Output, parse_seconds};
use crate::progress::Progress;
use crate::report::{self, Report};
use crate::side::Side;
use crate::stage::Stage;
pub(crate) use point::{Point, Sample};
pub(crate) use tables::{Table, Unit};

/// `shunt bench local`
#[derive(Debug, Args)]
#[command(mut_arg("repeats", |repeats| repeats
    .help("How often every side has its turn; 31 times where one-sided is named, if nothing else is said")
    .default_value_if("only", "one-sided", "31")))]
pub struct Arguments {
    #[command(flatten)]
    output: Output,

    /// How long one turn is measured
    #[arg(long, value_name = "SECS", default_value_t = 0.5, value_parser = parse_seconds)]
    seconds: f64,

    /// Only these sides [default: all]
    #[arg(long, value_enum, value_name = "SIDE,...", value_delimiter = ',')]
    sides: Vec<Side>,

    /// Only lines whose names have this in them; may be given again
    #[arg(long = "line", value_name = "TEXT")]
    lines: Vec<String>,

    /// Only these [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    only: Vec<Group>,
}

/// What can be asked for by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Group {
    /// One message there and back, by size
    RoundTrip,
    /// One message there and back between two containers of Docker, by size
    Containers,
    /// Messages in one direction, by size
    Stream,
    /// Many connections to one server, by number
    Connections,
    /// memcached under our own load
    Memcached,
    /// Redis with redis-benchmark
    Redis,
    /// nginx with wrk
    Nginx,
    /// PostgreSQL with pgbench
    Postgres,
    /// The same by the size of its database
    PostgresScales,
    /// Java, Node.js and Python
    Runtimes,
    /// Go without cgo and with it: plain messages, and net/http with its own client and with wrk
    Go,
    /// One server in C with glibc and with musl, dynamic and static
    Musl,
    /// What shunt costs where it cannot help
    Cost,
    /// What shunt costs where only one side is under it: is it less than a percent? memcached, Redis and our own loads
    OneSided,
    /// More threads than processors
    Crowd,
    /// Ways to spin and to sleep where others want the processors: beside threads that compute, with half a processor, on one
    Busy,
    /// What a relay with a thread for each connection pays, and its buffers; shunt has no part in it
    Relaying,
}

/// Runs the comparison and prints its report.
pub fn run(arguments: &Arguments) -> Result<()> {
    interruptible(|| compare(arguments))
}

fn compare(arguments: &Arguments) -> Result<()> {
    let output = &arguments.output;
    let report = reported(arguments.tables(), output.repeats, arguments.seconds)?;
    output.write("shunt bench local", &report, &report::plots(&report), &report::text(&report))
}

/// Measures these groups on the selected sides.
pub(crate) fn measured(
    only: &[Group],
    is_wanted: impl Fn(Side) -> bool,
    repeats: u32,
    seconds: f64,
) -> Result<Report> {
    reported(wanted_tables(only, &[], is_wanted), repeats, seconds)
}

fn reported(tables: Vec<Table>, repeats: u32, seconds: f64) -> Result<Report> {
    let begin = Instant::now();
    let (place, tables) = measured_tables(tables, repeats, seconds)?;
    Ok(Report::new(place, &tables, repeats, seconds, begin.elapsed()))
}

/// Returns the selected tables and lines, or all, with the selected sides.
fn wanted_tables(only: &[Group], lines: &[String], is_wanted: impl Fn(Side) -> bool) -> Vec<Table> {
    let mut tables: Vec<Table> =
        tables::all().into_iter().filter(|table| only.is_empty() || only.contains(&table.group)).collect();
    for table in &mut tables {
        table
            .points
            .retain(|point| lines.is_empty() || lines.iter().any(|text| point.label.contains(text.as_str())));
    }
    leave_out(&mut tables, |side| !is_wanted(side));
    tables
}

/// Removes missing sides, and then points and tables without sides.
fn leave_out(tables: &mut Vec<Table>, is_missing: impl Fn(Side) -> bool) {
    for table in &mut *tables {
        table.points.iter_mut().for_each(|point| point.leave_out(&is_missing));
        table.points.retain(|point| !point.sides.is_empty());
    }
    tables.retain(|table| !table.points.is_empty());
}

fn measured_tables(mut tables: Vec<Table>, repeats: u32, seconds: f64) -> Result<(Place, Vec<Table>)> {
    let stage = Stage::set().context("setting the stage")?;
    let place = Place::describe(&stage);
    let mut points = tables.iter().flat_map(|table| &table.points);
    let missing = stage.missing(Side::Sockmap);
    if let Some(missing) = missing.filter(|_| points.any(|point| point.sides.contains(&Side::Sockmap))) {
        eprintln!("left out: {}: {missing}", Side::Sockmap.label());
    }
    leave_out(&mut tables, |side| stage.missing(side).is_some());
    let turn = Duration::from_secs_f64(seconds);
    let (turns, each) = length(&tables, repeats, turn);
    let progress = Progress::begin(turns, each);
    for table in &mut tables {
        measure(table, &stage, repeats, turn, &progress)?;
    }
    progress.end();
    Ok((place, tables))
}

impl Arguments {
    fn wants(&self, side: Side) -> bool {
        self.sides.is_empty() || self.sides.contains(&side)
    }
}

fn measure(
    table: &mut Table,
    stage: &Stage,
    repeats: u32,
    seconds: Duration,
    progress: &Progress,
) -> Result<()> {
    for point in &mut table.points {
        if let Some(missing) = point.load.missing() {
            progress.say(&format!("left out: {}, {}: {missing}", table.title, point.label));
            point.missing = Some(missing);
            progress.inc(u64::from(repeats) * point.sides.len() as u64);
            continue;
        }
        for round in 0..repeats as usize {
            for turn in 0..point.sides.len() {
                let index = (round + turn) % point.sides.len();
                let side = point.sides[index];
                progress.set_message(format!("{}, {}: {}", table.title, point.label, side.label()));
                let sample: Sample = point
                    .load
                    .run(stage, side, seconds)
                    .with_context(|| format!("{}, {}, by {}", table.title, point.label, side.label()))?;
                point.samples[index].push(sample);
                progress.inc(1);
            }
        }
        point.load.close();
    }
    Ok(())
}

/// Returns the number of all turns, and their approximate length.
fn length(tables: &[Table], repeats: u32, turn: Duration) -> (u64, Duration) {
    let points = || tables.iter().flat_map(|table| &table.points);
    let sides: u32 = points().map(|point| point.sides.len() as u32).sum();
    let around: Duration = points().map(|point| point.load.around() * point.sides.len() as u32).sum();
    (u64::from(sides) * u64::from(repeats), turn + around / sides.max(1))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn arguments(line: &str) -> Arguments {
        Line::try_parse_from(line.split_whitespace()).unwrap().arguments
    }

    #[test]
    fn what_is_to_be_told_to_a_percent_has_more_turns_than_the_rest() {
        let repeats = |line| arguments(line).output.repeats;
        assert_eq!(repeats("local"), 5);
        assert_eq!(repeats("local busy"), 5);
        assert_eq!(repeats("local one-sided"), 31);
        assert_eq!(repeats("local memcached one-sided"), 31);
        assert_eq!(repeats("local one-sided --repeats 3"), 3);
    }

    #[test]
    fn lines_can_be_chosen() {
        let labels = |line| -> Vec<String> {
            let tables = arguments(line).tables();
            tables.iter().flat_map(|table| &table.points).map(|point| point.label.clone()).collect()
        };
        let one_connection = ["memcached, one connection", "Redis, one connection"];
        assert_eq!(labels("local one-sided --line one"), one_connection);
        assert_eq!(
            labels("local one-sided --line Redis --line nothing"),
            ["Redis, one connection", "Redis, 50 connections"]
        );
        assert_eq!(labels("local busy").len(), 3 * 5);
    }
}
