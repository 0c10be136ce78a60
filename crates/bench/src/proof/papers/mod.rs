//! `shunt report --papers`: compares the results of the papers behind shunt with measurements on
//! this machine.

mod exhibit;
mod found;
mod page;
mod text;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Parser, Subcommand};
use regex::{Regex, RegexBuilder};
use serde::Serialize;
use shunt_bench_args::side::Side;
use shunt_bench_args::{ipc, local, overlay, relay, serve};

use super::surroundings::Surroundings;
use crate::comparison::{Comparison, Point, Quantity, Taken};
use crate::interrupt;
use crate::machine::Machine;
use crate::progress::time;
use crate::report::{Axes, Bar, Bars, Group, OURS, Plot, Series, TimeLine, time_lines};
use crate::stats::Spread;
use exhibit::{Claim, Exhibit, PAPERS, Paper};
use found::Found;

/// The results.
#[derive(Debug, Serialize)]
pub(super) struct Papers {
    surroundings: Surroundings,
    rounds: u32,
    seconds_in_all: f64,
    command: String,
    /// Commands that this process could not run, with the reasons.
    left_out: Vec<(String, String)>,
    /// Commands that failed, with the errors.
    failed: Vec<(String, String)>,
    exhibits: Vec<Answered>,
}

/// A figure or table with its comparisons.
#[derive(Debug, Serialize)]
struct Answered {
    paper: &'static str,
    title: &'static str,
    figure: &'static str,
    shows: &'static str,
    not_measured: Option<&'static str>,
    claims: Vec<Found>,
    #[serde(skip)]
    plots: Vec<String>,
}

/// What `shunt bench` is given.
#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Line {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    Local(local::Arguments),
    Overlay(overlay::Arguments),
    Ipc(ipc::Arguments),
    Serve(serve::Arguments),
    Relay(relay::Arguments),
}

/// The measurements by command.
#[derive(Default)]
struct Measured {
    /// The points, or the reason why there are none.
    points: BTreeMap<&'static str, Result<Vec<Point>, String>>,
    /// The time lines with their sides.
    time_lines: BTreeMap<&'static str, Vec<(&'static str, TimeLine)>>,
}

/// Compares all exhibits, or those whose paper, name or contents match the expression.
pub(super) fn answer(only: Option<&Regex>, rounds: u32, own: String) -> Result<Papers> {
    let (machine, begin) = (Machine::describe(), Instant::now());
    let wanted = wanted(only)?;
    let mut benches = Vec::new();
    for claim in wanted.iter().flat_map(|(_, exhibit)| &exhibit.claims) {
        if !benches.iter().any(|(command, _)| *command == claim.command) {
            benches.push((claim.command, bench(claim.command, rounds)?));
        }
    }
    let (measured, left_out, failed) = measure(&benches, rounds)?;
    let exhibits = wanted.into_iter().map(|(paper, exhibit)| Answered::of(paper, exhibit, &measured, rounds));
    let exhibits = exhibits.collect::<Result<Vec<_>>>()?;
    Ok(Papers {
        surroundings: Surroundings::describe(machine),
        rounds,
        seconds_in_all: begin.elapsed().as_secs_f64(),
        command: own,
        left_out,
        failed,
        exhibits,
    })
}

/// Parses the expression of `--only`.
pub(super) fn parse_only(text: &str) -> Result<Regex, regex::Error> {
    RegexBuilder::new(text).case_insensitive(true).build()
}

fn wanted(only: Option<&Regex>) -> Result<Vec<(&'static Paper, &'static Exhibit)>> {
    let all = PAPERS.iter().flat_map(|paper| paper.exhibits.iter().map(move |exhibit| (paper, exhibit)));
    let is_wanted = |(paper, exhibit): &(&Paper, &Exhibit)| {
        only.is_none_or(|only| only.is_match(&format!("{}, {}: {}", paper.name, exhibit.name, exhibit.shows)))
    };
    let wanted: Vec<_> = all.filter(is_wanted).collect();
    let papers: Vec<&str> = PAPERS.iter().map(|paper| paper.name).collect();
    ensure!(!wanted.is_empty(), "no figure is called so: the papers are {}", papers.join(", "));
    Ok(wanted)
}

fn bench(command: &str, rounds: u32) -> Result<Bench> {
    let line = Line::try_parse_from(full(command, rounds).split_whitespace().skip(2));
    Ok(line.with_context(|| format!("shunt bench {command}"))?.bench)
}

/// Returns the full command line.
fn full(command: &str, rounds: u32) -> String {
    format!("shunt bench {command} --repeats {rounds}")
}

type Commands = Vec<(String, String)>;

/// Runs each command once. Returns the results, and the commands that were left out or failed.
fn measure(benches: &[(&'static str, Bench)], rounds: u32) -> Result<(Measured, Commands, Commands)> {
    let (mut measured, mut left_out, mut failed) = (Measured::default(), Vec::new(), Vec::new());
    let mut present = Vec::new();
    for (command, bench) in benches {
        if let Some(missing) = bench.comparison().missing() {
            eprintln!("left out: {}: {missing}", full(command, rounds));
            left_out.push((full(command, rounds), missing.clone()));
            measured.points.insert(*command, Err(missing));
        } else {
            present.push((*command, bench.comparison()));
        }
    }
    let length = |(_, comparison): &(&str, &dyn Comparison)| {
        let (turns, turn) = comparison.length();
        turn.mul_f64(turns as f64)
    };
    let all: Duration = present.iter().map(length).sum();
    eprintln!("{} comparisons of {rounds} rounds, about {} in all", present.len(), time(all));
    for (number, (command, comparison)) in present.iter().enumerate() {
        eprintln!("{} of {}: {}", number + 1, present.len(), full(command, rounds));
        let taken = apart(*comparison);
        // An interruption is not a failure of the command.
        interrupt::pause(Duration::ZERO)?;
        let points = taken.map_err(|error| format!("{error:#}")).map(|taken| {
            measured.time_lines.insert(*command, taken.time_lines);
            taken.points
        });
        if let Err(error) = &points {
            eprintln!("{}: {error}", full(command, rounds));
            failed.push((full(command, rounds), error.clone()));
        }
        measured.points.insert(*command, points);
    }
    Ok((measured, left_out, failed))
}

/// Runs a comparison on a separate thread, because some leave their thread in another namespace.
fn apart(comparison: &dyn Comparison) -> Result<Taken> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| comparison.measure());
        thread.join().unwrap_or_else(|_| Err(anyhow!("it panicked")))
    })
}

impl Bench {
    fn comparison(&self) -> &dyn Comparison {
        match self {
            Bench::Local(arguments) => arguments,
            Bench::Overlay(arguments) => arguments,
            Bench::Ipc(arguments) => arguments,
            Bench::Serve(arguments) => arguments,
            Bench::Relay(arguments) => arguments,
        }
    }
}

impl Papers {
    pub(super) fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }

    /// Returns an error if a command failed.
    pub(super) fn check(&self) -> Result<()> {
        let failed: Vec<String> =
            self.failed.iter().map(|(command, error)| format!("{command}: {error}")).collect();
        ensure!(failed.is_empty(), "{}", failed.join("\n"));
        Ok(())
    }
}

impl Answered {
    fn of(paper: &Paper, exhibit: &Exhibit, measured: &Measured, rounds: u32) -> Result<Answered> {
        let found = |claim: &Claim| {
            let measured = measured.points.get(claim.command).context("every command has had its turn")?;
            Ok(Found::of(claim, full(claim.command, rounds), measured))
        };
        Ok(Answered {
            paper: paper.name,
            title: paper.title,
            figure: exhibit.name,
            shows: exhibit.shows,
            not_measured: exhibit.not_measured,
            claims: exhibit.claims.iter().map(found).collect::<Result<_>>()?,
            plots: [drawn(paper, exhibit, measured)?, plots(paper, exhibit, measured)?].concat(),
        })
    }

    /// Returns true if any of its claims was measured.
    fn is_measured(&self) -> bool {
        self.claims.iter().any(|found| found.missing.is_none())
    }
}

/// Draws the time lines of the sides in an exhibit's claims, in a row.
fn drawn(paper: &Paper, exhibit: &Exhibit, measured: &Measured) -> Result<Vec<String>> {
    let is_of = |side: &str| {
        exhibit.claims.iter().any(|claim| {
            let (one, other) = claim.form.sides();
            claim.quantity == Quantity::MOMENT && (side == one || Some(side) == other)
        })
    };
    let commands = in_order(exhibit.claims.iter().map(|claim| claim.command));
    let lines = commands.iter().filter_map(|command| measured.time_lines.get(command)).flatten();
    let panels: Vec<&TimeLine> = lines.filter(|(side, _)| is_of(side)).map(|(_, line)| line).collect();
    if panels.is_empty() {
        return Ok(Vec::new());
    }
    let title = format!("{}, {}: who sends what when, in the first round", paper.name, exhibit.name);
    Ok(vec![time_lines(&title, &panels)?])
}

/// Draws a plot of each table in an exhibit's claims, with all sides.
fn plots(paper: &Paper, exhibit: &Exhibit, measured: &Measured) -> Result<Vec<String>> {
    let mut drawn: Vec<(&str, &str)> = Vec::new();
    let mut plots = Vec::new();
    for claim in &exhibit.claims {
        let what = (claim.table, claim.quantity.label);
        let Some(Ok(points)) = measured.points.get(claim.command) else { continue };
        if drawn.contains(&what) {
            continue;
        }
        drawn.push(what);
        let is_of_table = |point: &&Point| {
            point.quantity == claim.quantity
                && point.table.starts_with(claim.table)
                && !point.rounds.is_empty()
        };
        let points: Vec<&Point> = points.iter().filter(is_of_table).collect();
        let Some(first) = points.first() else { continue };
        plots.push(plot(&format!("{}, {}: {}", paper.name, exhibit.name, first.table), &points)?);
    }
    Ok(plots)
}

/// Draws a line for each side if there is an axis, otherwise bars.
fn plot(title: &str, points: &[&Point]) -> Result<String> {
    let unit = points[0].quantity.label.trim().to_owned();
    let Some((axis, _)) = points[0].at.filter(|_| points.iter().all(|point| point.at.is_some())) else {
        let groups = in_order(points.iter().map(|point| point.line.as_str())).into_iter().map(|line| {
            let bars =
                points.iter().filter(|point| point.line == line).filter_map(|point| bar(points, point));
            Group { label: line.to_owned(), bars: bars.collect() }
        });
        return Bars { title: title.to_owned(), unit, groups: groups.collect() }.svg();
    };
    let series = sides(points).into_iter().map(|side| {
        let points = points.iter().filter(|point| point.side == side);
        let points =
            points.filter_map(|point| Some((point.at?.1, Spread::of(point.rounds.iter().copied())?)));
        Series { label: side, points: points.collect() }
    });
    Plot {
        title: title.to_owned(),
        x_label: axis.to_owned(),
        y_label: unit,
        axes: Axes::Logarithmic,
        series: series.collect(),
    }
    .svg()
}

fn bar(all: &[&Point], point: &Point) -> Option<Bar> {
    let place = sides(all).iter().position(|side| *side == point.side)?;
    Some(Bar {
        label: point.side,
        color: if point.side == Side::Shunt.label() { OURS } else { place },
        figure: Spread::of(point.rounds.iter().copied())?,
        rounds: Vec::new(),
    })
}

fn sides(points: &[&Point]) -> Vec<&'static str> {
    in_order(points.iter().map(|point| point.side))
}

fn in_order<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    all.fold(Vec::new(), |mut seen, one| {
        if !seen.contains(&one) {
            seen.push(one);
        }
        seen
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims() -> impl Iterator<Item = (&'static Exhibit, &'static Claim)> {
        let exhibits = PAPERS.iter().flat_map(|paper| &paper.exhibits);
        exhibits.flat_map(|exhibit| exhibit.claims.iter().map(move |claim| (exhibit, claim)))
    }

    #[test]
    fn every_figure_and_table_is_answered_or_has_a_reason() {
        let numbered =
            |kind: &str, last: usize| (1..=last).map(|number| format!("{kind} {number}")).collect();
        let slick = ["Table 3.1", "Figure 3.1", "Table 3.2", "Figure 3.2", "Table 3.3"].map(str::to_owned);
        let inferno = ["Results, first table", "Results, second table", "Conclusion, session", "Addendum"]
            .map(str::to_owned);
        let expected: [(&str, Vec<Vec<String>>); 5] = [
            ("Slipstream", vec![numbered("Figure", 10), numbered("Table", 1)]),
            ("Slim", vec![numbered("Figure", 12), numbered("Table", 4)]),
            ("Inferno", vec![inferno.into()]),
            ("Slick", vec![slick.into()]),
            ("KTCP", vec![numbered("Figure", 4)]),
        ];
        for (paper, (name, figures)) in PAPERS.iter().zip(expected) {
            assert_eq!(paper.name, name);
            for figure in figures.concat() {
                let is_it = |exhibit: &&Exhibit| {
                    exhibit.name == figure || exhibit.name.split(", ").any(|part| part == figure)
                };
                let found: Vec<_> = paper.exhibits.iter().filter(is_it).collect();
                assert_eq!(found.len(), 1, "{name}, {figure}");
                assert!(found[0].claims.is_empty() == found[0].not_measured.is_some(), "{name}, {figure}");
            }
        }
    }

    /// Without this test, a changed command or a renamed table or side would be noticed only after
    /// a whole run.
    #[test]
    fn every_claim_is_about_something_that_its_command_measures() {
        for (exhibit, claim) in claims() {
            let outline = bench(claim.command, 2).unwrap().comparison().outline();
            let (side, other) = claim.form.sides();
            for side in [Some(side), other].into_iter().flatten() {
                let found = outline.iter().any(|point| claim.is_about(point) && point.side == side);
                assert!(found, "{}: {}: nothing of {side}", exhibit.name, claim.what);
            }
            if let exhibit::Lines::Only(lines) = claim.lines {
                for line in lines {
                    let found = outline.iter().any(|point| claim.is_about(point) && point.line == *line);
                    assert!(found, "{}: {}: no line {line:?}", exhibit.name, claim.what);
                }
            }
            if let exhibit::Theirs::Each(figures) = claim.theirs {
                let is_at =
                    |x| move |point: &Point| claim.is_about(point) && point.at.is_some_and(|(_, at)| at == x);
                let missing = figures.iter().find(|(x, _)| !outline.iter().any(is_at(*x)));
                assert!(missing.is_none(), "{}: nothing at {missing:?}", exhibit.name);
            }
        }
    }

    #[test]
    fn what_is_wanted_is_named_by_its_paper_its_figure_or_what_it_shows() {
        let names = |only: &str| -> Vec<String> {
            let wanted = wanted(Some(&parse_only(only).unwrap())).unwrap();
            wanted.iter().map(|(paper, exhibit)| format!("{}, {}", paper.name, exhibit.name)).collect()
        };
        assert_eq!(names("slick").len(), 4);
        assert_eq!(names("slipstream, figure 7"), ["Slipstream, Figure 7"]);
        assert!(names("memcached").contains(&"Slim, Figure 8".to_owned()));
        assert!(wanted(Some(&parse_only("nothing of that").unwrap())).is_err());
        let all: usize = PAPERS.iter().map(|paper| paper.exhibits.len()).sum();
        assert_eq!(wanted(None).unwrap().len(), all);
    }
}
