//! `shunt bench local`: the local path against TCP and Unix sockets.
//!
//! Every point of every table is measured on all its sides in turn, again and again; which side begins rotates. What is
//! compared is always of the same round.

mod pair;
mod point;
mod programs;
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
pub struct Arguments {
    #[command(flatten)]
    output: Output,

    /// How long one turn is measured
    #[arg(long, value_name = "SECS", default_value_t = 0.5, value_parser = parse_seconds)]
    seconds: f64,

    /// Only these [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    only: Vec<Group>,
}

/// What a turn takes besides: its programs start, and come onto their road.
const AROUND: Duration = Duration::from_millis(300);

/// What can be asked for by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Group {
    /// One message there and back, by size
    RoundTrip,
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
    /// Java, Node.js and Python
    Runtimes,
    /// Go without cgo: plain messages, and net/http with its own client and with wrk
    Go,
    /// One server in C with glibc and with musl, dynamic and static
    Musl,
    /// What shunt costs where it cannot help
    Cost,
    /// More threads than processors
    Crowd,
}

/// Runs and prints it.
pub fn run(arguments: &Arguments) -> Result<()> {
    interruptible(|| compare(arguments))
}

fn compare(arguments: &Arguments) -> Result<()> {
    let stage = Stage::set().context("setting the stage")?;
    let place = Place::describe(&stage);
    let mut tables: Vec<Table> = tables::all()
        .into_iter()
        .filter(|table| arguments.only.is_empty() || arguments.only.contains(&table.group))
        .collect();
    if let Some(missing) = stage.missing(Side::Sockmap) {
        eprintln!("left out: {}: {missing}", Side::Sockmap.label());
    }
    for point in tables.iter_mut().flat_map(|table| &mut table.points) {
        point.leave_out(|side| stage.missing(side).is_some());
    }
    let begin = Instant::now();
    let turn = Duration::from_secs_f64(arguments.seconds) + AROUND;
    let progress = Progress::begin(turns(&tables, arguments.output.repeats), turn);
    for table in &mut tables {
        measure(table, &stage, arguments, &progress)?;
    }
    progress.end();
    let report = Report::new(place, &tables, arguments.output.repeats, arguments.seconds, begin.elapsed());
    arguments.output.write("shunt bench local", &report, &report::plots(&report), &report::text(&report))
}

fn measure(table: &mut Table, stage: &Stage, arguments: &Arguments, progress: &Progress) -> Result<()> {
    let seconds = Duration::from_secs_f64(arguments.seconds);
    for point in &mut table.points {
        if let Some(missing) = point.load.missing() {
            progress.say(&format!("left out: {}, {}: {missing}", table.title, point.label));
            point.missing = Some(missing);
            progress.inc(u64::from(arguments.output.repeats) * point.sides.len() as u64);
            continue;
        }
        for round in 0..arguments.output.repeats as usize {
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

/// How often any side has its turn.
fn turns(tables: &[Table], repeats: u32) -> u64 {
    let sides: usize = tables.iter().flat_map(|table| &table.points).map(|point| point.sides.len()).sum();
    sides as u64 * u64::from(repeats)
}
