//! `shunt bench serve`: the two benchmarks of the Slick thesis, an echo and a forwarder of Thrift
//! messages, and a cache. It compares a plain program in user space with each engine of `shunt
//! serve`. `proxy` compares HTTP proxies and caches, and `starts` how long services take to begin.
//! All take turns in every round, and the first one rotates.

mod cache;
mod closed;
mod load;
mod points;
mod proxy;
mod report;
mod side;
mod starts;
mod way;

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::ValueEnum;
use shunt_bench_args::serve::{Arguments, Group};

use crate::comparison::{Comparison, take_turns};
use crate::machine::Machine;
use crate::output::write_with_svg;
use crate::process::Process;
use crate::progress::Progress;
use load::{Load, Sample, Sinks};
use report::Report;
use way::{Stage, WAYS, Way};

/// The overhead of a turn: its programs start.
const AROUND: Duration = Duration::from_millis(100);

/// Bytes of an item of the cache.
const CACHED: usize = 100;

/// A line of a table.
struct Line {
    group: Group,
    load: Load,
    /// The samples by way, in the order of the rounds.
    samples: Vec<Vec<Sample>>,
}

impl Line {
    /// Returns the ways that are measured. Only the cache has controls: the plain echo does no more
    /// than a floor anyway.
    fn ways(&self) -> &'static [Way] {
        // With more outstanding, a server may answer several messages with one send.
        let has_floor = !matches!(self.load, Load::Cache { outstanding, .. } if outstanding > 1);
        let ways = way::ways(self.group == Group::Cache);
        if has_floor { ways } else { &ways[..ways.len() - 1] }
    }
}

/// Compares, and prints the report.
pub(crate) fn compare(arguments: &Arguments) -> Result<()> {
    ensure!(arguments.payloads.iter().all(|payload| *payload >= 32), "a payload has 32 bytes at least");
    let (machine, begin) = (Machine::describe(), Instant::now());
    let report = Report::new(machine, arguments, measure(arguments)?, begin.elapsed());
    let (output, svg) = (&arguments.output, arguments.svg.as_deref());
    write_with_svg(output, "shunt bench serve", &report, report.plots(), svg, &report.text())
}

/// The results of all measurements.
struct Measured {
    lines: Vec<Line>,
    proxies: Vec<proxy::Row>,
    starts: Vec<starts::Row>,
}

fn measure(arguments: &Arguments) -> Result<Measured> {
    let stage = Stage::set()?;
    let _busy = (0..arguments.busy).map(|_| compute()).collect::<Result<Vec<_>>>()?;
    let sinks = stage.namespace.inside(Sinks::open)?;
    let mut lines = lines(arguments);
    let time = arguments.time();
    let (turns, turn) = arguments.length();
    let progress = Progress::begin(turns, turn);
    for line in &mut lines {
        let ways = line.ways();
        let turn = |way: usize| {
            let server = stage.start(ways[way], line.load)?;
            let id = server.id();
            let run = || {
                if let Load::Cache { bytes, .. } = line.load
                    && ways[way] != Way::Floor
                {
                    cache::fill(bytes)?;
                }
                line.load.run(&sinks, time, id)
            };
            stage.namespace.inside(run).map(Some)
        };
        let (repeats, label) = (arguments.output.repeats, line.load.label());
        let labels: Vec<&str> = ways.iter().map(|way| way.label()).collect();
        line.samples = take_turns(&progress, repeats, &label, &labels, turn)?;
    }
    let mut proxies = Vec::new();
    for contest in contests(arguments) {
        proxies.extend(proxy::measure(contest, arguments, &stage, &progress)?);
    }
    let starts = match is_wanted(arguments, Group::Start) {
        true => starts::measure(arguments.output.repeats, &stage, &progress)?,
        false => Vec::new(),
    };
    progress.end();
    Ok(Measured { lines, proxies, starts })
}

/// Starts a program that only computes.
fn compute() -> Result<Process> {
    Process::spawn(Command::new("sh").args(["-c", "while :; do :; done"]), "a program that computes")
}

/// Returns true if a measurement is asked for.
fn is_wanted(arguments: &Arguments, group: Group) -> bool {
    arguments.only.is_empty() || arguments.only.contains(&group)
}

/// Returns the comparisons of the HTTP proxy that are wanted.
fn contests(arguments: &Arguments) -> Vec<proxy::Contest> {
    let all = [(Group::Proxy, proxy::PROXIES), (Group::Static, proxy::STATIC)];
    all.into_iter().filter(|(group, _)| is_wanted(arguments, *group)).map(|(_, contest)| contest).collect()
}

fn lines(arguments: &Arguments) -> Vec<Line> {
    let loads = |group: Group| -> Vec<Load> {
        let sizes = arguments.sizes.iter();
        let echo = |outstanding| sizes.map(move |bytes| Load::Echo { bytes: *bytes, outstanding });
        let payloads = arguments.payloads.iter().copied();
        match group {
            Group::Echo => echo(1).collect(),
            Group::EchoMany => echo(16).collect(),
            Group::Forward => payloads.map(|payload| Load::Forward { payload }).collect(),
            Group::Sparse => payloads.map(|payload| Load::Sparse { payload }).collect(),
            Group::Cache => [1, 16].map(|outstanding| Load::Cache { bytes: CACHED, outstanding }).to_vec(),
            // They have other tables.
            Group::Proxy | Group::Static | Group::Start => Vec::new(),
        }
    };
    let groups = Group::value_variants().iter().copied().filter(|group| is_wanted(arguments, *group));
    let line = |group, load| Line { group, load, samples: vec![Vec::new(); WAYS.len()] };
    groups.flat_map(|group| loads(group).into_iter().map(move |load| line(group, load))).collect()
}
