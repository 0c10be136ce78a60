//! Formats the results: a table, and the figures that miss their targets.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;

use super::running::Sample;
use super::{Arguments, Line};
use crate::coverage::Coverage;
use crate::machine::Machine;
use crate::report::number;
use crate::stats::{ROUNDS, Spread};

/// The report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: Machine,
    /// The load average of the last minute at the end.
    load_after: f64,
    rounds: u32,
    /// The spin setting of the programs under shunt.
    spin: &'static str,
    seconds_per_turn: f64,
    seconds_in_all: f64,
    stacks: Vec<StackReport>,
    /// Stacks that were not run, with the reasons.
    left_out: BTreeMap<&'static str, String>,
    /// Stacks in which a turn failed, with the errors. Their figures are not shown.
    failed: BTreeMap<&'static str, String>,
}

#[derive(Debug, Serialize)]
struct StackReport {
    name: &'static str,
    title: &'static str,
    lines: Vec<LineReport>,
}

/// The results with a number of connections.
#[derive(Debug, Serialize)]
struct LineReport {
    connections: u32,
    /// Requests per second.
    rate: Figure,
    p50_us: Figure,
    p99_us: Figure,
    /// Processor time of a request in all programs.
    cpu_us: Figure,
    /// The memory of all programs in bytes: native and under shunt.
    memory: [u64; 2],
    /// Processes of the stack that ended during all turns: native and under shunt.
    ended: [usize; 2],
    /// The coverage of all turns.
    coverage: Coverage,
    /// The share of the bytes that used shared memory.
    on_shm: f64,
}

#[derive(Debug, Serialize)]
struct Figure {
    native: Spread,
    shunt: Spread,
    /// The ratio within each round.
    shunt_to_native: Spread,
}

/// A target: the name of a figure, the figure, and the test of its ratio.
type Aim = (&'static str, fn(&LineReport) -> &Figure, fn(f64) -> bool);
const AIMS: [Aim; 3] = [
    ("rate", |line| &line.rate, |ratio| ratio >= 0.99),
    ("processor time", |line| &line.cpu_us, |ratio| ratio <= 1.0),
    ("p99", |line| &line.p99_us, |ratio| ratio <= 1.05),
];
const COVERAGE: f64 = 0.95;

impl Report {
    pub(super) fn new(
        machine: Machine,
        arguments: &Arguments,
        lines: &[Line],
        (left_out, failed): (BTreeMap<&'static str, String>, BTreeMap<&'static str, String>),
        all: Duration,
    ) -> Report {
        let stacks = lines.chunk_by(|one, next| one.stack.name == next.stack.name).map(|lines| StackReport {
            name: &lines[0].stack.name,
            title: &lines[0].stack.title,
            lines: lines.iter().filter_map(LineReport::of).collect(),
        });
        Report {
            machine,
            load_after: Machine::describe().load_before,
            rounds: arguments.rounds,
            spin: if arguments.no_spin { "off" } else { "auto" },
            seconds_per_turn: arguments.seconds,
            seconds_in_all: all.as_secs_f64(),
            stacks: stacks.collect(),
            left_out,
            failed,
        }
    }

    pub(super) fn text(&self) -> String {
        let machine = &self.machine;
        let mut out = format!(
            "{machine}, {:.1} after)\n\
             Medians of {} rounds of {} s for each side, in turn; {:.0} s in all. Spinning under shunt: {}.\n\
             Ratios are of shunt to native, round by round, with the least and the most. CPU: processor time of all programs for a\n\
             request, in microseconds, native. MB: memory of all programs. On shm: the part of all bytes between programs that went\n\
             through shared memory.\n",
            self.load_after, self.rounds, self.seconds_per_turn, self.seconds_in_all, self.spin
        );
        for stack in &self.stacks {
            stack.write(&mut out);
        }
        self.write_misses(&mut out);
        for (name, missing) in &self.left_out {
            let _ = writeln!(out, "left out: {name}: {missing}");
        }
        for (name, why) in &self.failed {
            let _ = writeln!(out, "failed: {name}: {why}");
        }
        out
    }

    fn write_misses(&self, out: &mut String) {
        let lines =
            self.stacks.iter().flat_map(|stack| stack.lines.iter().map(move |line| (stack.name, line)));
        let missed: Vec<String> = lines
            .filter_map(|(name, line)| {
                let misses = line.misses();
                (!misses.is_empty()).then(|| format!("{name}, {} connections: {misses}\n", line.connections))
            })
            .collect();
        if self.rounds < ROUNDS {
            let _ = writeln!(out, "\nNo verdict: at least {ROUNDS} rounds are needed.");
        } else if !missed.is_empty() {
            let _ = write!(out, "\nLess than aimed at:\n{}", missed.concat());
        }
    }
}

impl StackReport {
    fn write(&self, out: &mut String) {
        let _ = writeln!(out, "\n{}: {}", self.name, self.title);
        let _ = writeln!(
            out,
            "{:>5} {:>9} {:>18} {:>9} {:>18} {:>9} {:>18} {:>9} {:>18} {:>13} {:>7}",
            "conns", "native/s", "rate", "p50, us", "p50", "p99, us", "p99", "CPU", "CPU", "MB", "on shm"
        );
        for line in &self.lines {
            let _ = write!(out, "{:>5}", line.connections);
            for figure in [&line.rate, &line.p50_us, &line.p99_us, &line.cpu_us] {
                let ratio = figure.shunt_to_native.as_ratio();
                let _ = write!(out, " {:>9} {ratio:>18}", number(figure.native.median));
            }
            let megabytes = line.memory.map(|bytes| number(bytes as f64 / 1e6)).join(" to ");
            let _ = writeln!(out, " {megabytes:>13} {:>6.1}%", line.on_shm * 100.0);
        }
        for line in &self.lines {
            line.write_reasons(out);
        }
    }
}

impl LineReport {
    /// Returns `None` without a round.
    fn of(line: &Line) -> Option<LineReport> {
        let [native, shunt] = &line.samples[..] else { return None };
        let figure = |pick: fn(&Sample) -> f64| {
            Some(Figure {
                native: Spread::of(native.iter().map(pick))?,
                shunt: Spread::of(shunt.iter().map(pick))?,
                shunt_to_native: Spread::of_ratios(shunt, native, pick)?,
            })
        };
        let coverage = Coverage::sum(shunt.iter().filter_map(|sample| sample.coverage.as_ref()));
        Some(LineReport {
            connections: line.connections,
            rate: figure(|sample| sample.rate)?,
            p50_us: figure(|sample| sample.p50_us)?,
            p99_us: figure(|sample| sample.p99_us)?,
            cpu_us: figure(|sample| sample.cpu_us)?,
            memory: line.memory,
            ended: [native, shunt].map(|samples| samples.iter().map(|sample| sample.ended).sum()),
            on_shm: coverage.share(),
            coverage,
        })
    }

    fn write_reasons(&self, out: &mut String) {
        let reasons: Vec<String> = self
            .coverage
            .reasons()
            .into_iter()
            .map(|(reason, part)| format!("{reason} {:.1}%", part * 100.0))
            .collect();
        if !reasons.is_empty() {
            let _ = writeln!(out, "  {} connections, by TCP: {}", self.connections, reasons.join(", "));
        }
    }

    /// Returns the missed targets.
    fn misses(&self) -> String {
        let mut misses: Vec<String> = AIMS
            .iter()
            .map(|(name, figure, is_enough)| (name, figure(self).shunt_to_native.median, is_enough))
            .filter(|(_, ratio, is_enough)| !is_enough(*ratio))
            .map(|(name, ratio, _)| format!("{name} {ratio:.2}x"))
            .collect();
        if self.on_shm < COVERAGE {
            misses.push(format!("{:.1}% on shared memory", self.on_shm * 100.0));
        }
        let [native, shunt] = self.ended;
        if shunt > native {
            misses.push(format!("{shunt} processes ended, natively {native}"));
        }
        misses.join(", ")
    }
}
