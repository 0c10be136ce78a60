//! `shunt bench local`: compares the shared-memory transport with TCP and Unix sockets.
//!
//! Each round measures every point of every table on all its sides in turn, and the first side
//! rotates. Ratios are always between figures of one round.

mod bulk;
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
use shunt_bench_args::local::{Arguments, Group};
use shunt_bench_args::side::Side;

use crate::comparison::take_turns;
use crate::machine::Place;
use crate::output;
use crate::progress::Progress;
use crate::report::{self, Report};
use crate::stage::Stage;
pub(crate) use point::{Point, Sample};
pub(crate) use tables::{Table, Unit};

/// Compares, and prints the report.
pub(crate) fn compare(arguments: &Arguments) -> Result<()> {
    let output = &arguments.output;
    let report = reported(points::tables(arguments), output.repeats, arguments.seconds)?;
    let (images, text) = (report::images(&report)?, report::text(&report));
    output::write_with_images(output, "shunt bench local", &report, &images, &text)
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
        let line = format!("{}, {}", table.title, point.label);
        let sides: Vec<&str> = point.sides.iter().map(|side| side.label()).collect();
        let turn = |side: usize| point.load.run(stage, point.sides[side], seconds).map(Some);
        point.samples = take_turns(progress, repeats, &line, &sides, turn)?;
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
        assert_eq!(repeats("local bulk"), 10);
        assert_eq!(repeats("local bulk-programs"), 5);
    }

    #[test]
    fn lines_can_be_chosen() {
        let labels = |line| -> Vec<String> {
            let tables = points::tables(&arguments(line));
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
