//! `shunt bench stacks`: compares whole stacks of third-party programs, with nothing under shunt
//! and with everything under shunt.
//!
//! Both stacks are always running, and idle except in their turns. They take turns in every round,
//! and the first one rotates. Ratios are always between figures of one round.

mod load;
mod report;
mod running;
mod stack;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use shunt_bench_args::Output;
use shunt_bench_args::side::Side;
use shunt_bench_args::stacks::Arguments;

use crate::comparison::take_turns;
use crate::interrupt::{interruptible, pause};
use crate::machine::Machine;
use crate::output;
use crate::progress::Progress;
use crate::stage::Stage;
use report::Report;
use running::{Running, Sample};
use stack::{STACKS, Stack};

/// Nothing under shunt, and everything.
const SIDES: usize = 2;
/// The overhead of a turn: the load starts, and the broker is asked.
const AROUND: Duration = Duration::from_millis(200);

/// A stack with a number of connections.
struct Line {
    stack: &'static Stack,
    connections: u32,
    /// The samples by side, in the order of the rounds.
    samples: Vec<Vec<Sample>>,
    /// The memory by side, in bytes.
    memory: [u64; SIDES],
}

/// Runs the comparison and prints its report.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    interruptible(|| compare(arguments))
}

fn compare(arguments: &Arguments) -> Result<()> {
    let (machine, begin) = (Machine::describe(), Instant::now());
    let stage = Stage::set().context("setting the stage")?;
    let is_asked = |stack: &&Stack| arguments.stacks.is_empty() || arguments.stacks.contains(&stack.name);
    let (mut stacks, mut left_out) = (Vec::new(), BTreeMap::new());
    for stack in STACKS.iter().filter(is_asked) {
        match stack.missing() {
            None => stacks.push(stack),
            Some(missing) => {
                eprintln!("left out: {}: {missing}", stack.name);
                left_out.insert(stack.name.as_str(), missing);
            }
        }
    }
    // For each stack and number of connections, one extra turn of each side measures the memory and
    // warms up.
    let turns = (arguments.rounds as usize + 1) * SIDES * arguments.connections.len() * stacks.len();
    let progress = Progress::begin(turns as u64, arguments.time() + AROUND);
    let (mut lines, mut failed) = (Vec::new(), BTreeMap::new());
    for stack in stacks {
        progress.set_message(format!("{}: starts", stack.name));
        match measure(stack, &stage, arguments, &progress) {
            Ok(measured) => lines.extend(measured),
            Err(error) => {
                // This returns an error if the comparison was interrupted.
                pause(Duration::ZERO)?;
                progress.say(&format!("failed: {}: {error:#}", stack.name));
                failed.insert(stack.name.as_str(), format!("{error:#}"));
            }
        }
    }
    progress.end();
    let names: Vec<&str> = failed.keys().copied().collect();
    let report = Report::new(machine, arguments, &lines, (left_out, failed), begin.elapsed());
    let output = Output { json: arguments.json, html: None, repeats: arguments.rounds };
    output::write(&output, "shunt bench stacks", &report, &[], &report.text())?;
    ensure!(names.is_empty(), "failed: {}", names.join(", "));
    Ok(())
}

fn measure(
    stack: &'static Stack,
    stage: &Stage,
    arguments: &Arguments,
    progress: &Progress,
) -> Result<Vec<Line>> {
    let [native, shunt] = sides(arguments);
    let running = [Running::start(stack, stage, native)?, Running::start(stack, stage, shunt)?];
    let mut lines = Vec::new();
    for connections in arguments.connections.iter().copied() {
        let mut line = Line { stack, connections, samples: Vec::new(), memory: [0; SIDES] };
        for (running, memory) in running.iter().zip(&mut line.memory) {
            progress.set_message(format!("{}, {connections} connections: memory", stack.name));
            *memory = running.memory(connections, arguments.time())?;
            progress.inc(1);
        }
        let label = format!("{}, {connections} connections", stack.name);
        let turn = |side: usize| running[side].turn(connections, arguments.time()).map(Some);
        let labels = [native, shunt].map(Side::label);
        line.samples = take_turns(progress, arguments.rounds, &label, &labels, turn)?;
        lines.push(line);
    }
    Ok(lines)
}

/// Returns the names of all stacks.
#[cfg(test)]
pub(crate) fn names() -> Vec<&'static str> {
    STACKS.iter().map(|stack| stack.name.as_str()).collect()
}

fn sides(arguments: &Arguments) -> [Side; SIDES] {
    [Side::Tcp, if arguments.no_spin { Side::ShuntSleep } else { Side::Shunt }]
}
