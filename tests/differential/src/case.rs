//! Compares one sequence in two worlds, and handles a difference.

use crate::generate::epilogue;
use crate::judge::{Judge, Match, show, show_outcome};
use crate::processor::Processor;
use crate::run::{Record, Run};
use crate::world::{Shim, World};
use anyhow::Result;
use shunt_abi::reason::Transport;
use shunt_abi::status::Connection;
use shunt_differential::script::{Sequence, Step, Verb};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A world on TCP, and one to compare with it.
pub(crate) struct Worlds {
    tcp: World,
    other: World,
    /// A second world on TCP. After a difference it shows whether TCP agrees with itself.
    control: World,
    broker: Option<PathBuf>,
    /// Whether every step of a comparison is printed.
    pub(crate) tells: bool,
}

/// The result of the comparison of a sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct Verdict {
    /// Place and kind of the first difference.
    pub(crate) difference: Option<String>,
    /// The index of that step, in the sequence or its epilogue.
    pub(crate) at: usize,
    /// Whether a direction of a connection was on shared memory.
    pub(crate) on_shm: bool,
    pub(crate) late: u32,
    pub(crate) extra_edges: u32,
    /// Whether the comparison ended early because TCP leaves the continuation open.
    pub(crate) open: bool,
    /// Steps compared.
    pub(crate) steps: usize,
}

impl Worlds {
    /// Returns two worlds. Without a shim both are on TCP, which tests the judge.
    pub(crate) fn new(shim: Option<Shim>, actor: Option<&Path>, processor: &Rc<Processor>) -> Worlds {
        let broker = shim.as_ref().map(|shim| shim.broker.clone());
        let [tcp, other, control] = [None, shim, None].map(|shim| World::new(shim, actor, processor.clone()));
        Worlds { tcp, other, control, broker, tells: false }
    }

    /// Ends all processes.
    pub(crate) fn end(&mut self) {
        self.tcp.end();
        self.other.end();
        self.control.end();
    }

    /// Marks the worlds as worn, so that the next comparison begins with new processes.
    pub(crate) fn renew(&mut self) {
        self.tcp.worn = true;
        self.other.worn = true;
    }

    /// Runs a sequence in both worlds.
    pub(crate) fn compare(&mut self, sequence: &Sequence) -> Result<Verdict> {
        let steps = [sequence.steps.clone(), epilogue(sequence)].concat();
        let mut attempts = 0;
        let trace = loop {
            match on_tcp(&mut self.tcp, sequence, &steps) {
                Ok(trace) => break trace,
                Err(error) if attempts == 2 => return Err(error.context("on TCP")),
                Err(_) => {
                    attempts += 1;
                    self.tcp.worn = true;
                }
            }
        };
        self.other.prepare(sequence)?;
        let mut verdict = Verdict::default();
        let mut judge = Judge::new(sequence.is_warm());
        let mut run = Run::new(&mut self.other, sequence, &steps, Some(&trace));
        for (index, record) in trace.iter().enumerate() {
            if index + 1 == sequence.steps.len().min(2) || index == sequence.steps.len() {
                verdict.on_shm |= self.broker.as_ref().is_some_and(is_on_shm);
            }
            verdict.at = index;
            let warms = sequence.is_warm() && matches!(steps[index].verb, Verb::Open | Verb::Connect);
            let broker = self.broker.as_ref().filter(|_| warms);
            let before = broker.map(ends_on_shm);
            if let Err(error) = run.next() {
                verdict.difference = Some(format!("`{}`: {error:#}", steps[index]));
                break;
            }
            // On a busy machine the broker's answer may come too late.
            if before.is_some_and(|before| broker.map(ends_on_shm) < Some(before + 2)) {
                judge.is_not_warm(&steps[index]);
            }
            if self.tells {
                println!("{}", tell(&steps, index, record, &run.trace[index]));
            }
            match judge.next(&steps, record, &run.trace[index]) {
                Match::Same => verdict.steps += 1,
                Match::ExtraEdge => {
                    verdict.steps += 1;
                    verdict.extra_edges += 1;
                    if run.trace[index].woken != record.woken || run.trace[index].outcome != record.outcome {
                        verdict.open = true;
                        break;
                    }
                }
                Match::Open => {
                    verdict.open = true;
                    break;
                }
                Match::Different(what) => {
                    verdict.difference = Some(what);
                    break;
                }
            }
        }
        verdict.late = run.late;
        self.other.worn |= verdict.open || verdict.difference.is_some();
        self.other.tidy();
        Ok(verdict)
    }

    /// Returns how often a sequence differs in `times` runs, each with new processes, and the last
    /// difference.
    pub(crate) fn confirm(&mut self, sequence: &Sequence, times: u32) -> Result<(u32, Verdict)> {
        let mut differing = 0;
        let mut last = Verdict::default();
        for _ in 0..times {
            self.renew();
            let verdict = self.compare(sequence)?;
            if verdict.difference.is_some() {
                differing += 1;
                last = verdict;
            }
        }
        Ok((differing, last))
    }

    /// Returns how often TCP differs from itself in `times` runs.
    pub(crate) fn control(&mut self, sequence: &Sequence, times: u32) -> Result<u32> {
        std::mem::swap(&mut self.other, &mut self.control);
        let result = self.confirm(sequence, times);
        std::mem::swap(&mut self.other, &mut self.control);
        self.control.end();
        Ok(result?.0)
    }

    /// Makes a failing sequence as short as possible while it still fails.
    pub(crate) fn shrink(&mut self, sequence: &Sequence, at: usize) -> Result<Sequence> {
        let mut best = sequence.clone();
        best.steps.truncate(at + 1);
        if !self.fails(&best)? {
            best = sequence.clone();
        }
        let mut size = best.steps.len().div_ceil(2);
        while size > 0 {
            let mut from = best.steps.len();
            while from > 0 {
                from = from.saturating_sub(size);
                let mut fewer = best.clone();
                fewer.steps.drain(from..(from + size).min(best.steps.len()));
                if self.fails(&fewer)? {
                    best = fewer;
                }
            }
            size /= 2;
        }
        for smaller in simpler(&best) {
            if self.fails(&smaller)? {
                best = smaller;
            }
        }
        Ok(best)
    }

    fn fails(&mut self, sequence: &Sequence) -> Result<bool> {
        if sequence.steps.is_empty() {
            return Ok(false);
        }
        for _ in 0..2 {
            self.renew();
            if self.compare(sequence)?.difference.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn on_tcp(world: &mut World, sequence: &Sequence, steps: &[Step]) -> Result<Vec<Record>> {
    world.prepare(sequence)?;
    let mut run = Run::new(world, sequence, steps, None);
    for _ in steps {
        run.next()?;
    }
    let trace = std::mem::take(&mut run.trace);
    world.tidy();
    Ok(trace)
}

/// Returns the results of a step on TCP and in the other world, as text.
fn tell(steps: &[Step], index: usize, tcp: &Record, other: &Record) -> String {
    let of = |record: &Record| {
        let woken =
            record.woken.iter().map(|(step, answer)| format!("; step {}: {}", step + 1, show(answer)));
        show_outcome(&record.outcome) + &woken.collect::<String>()
    };
    format!("{:3} {}\n        {}\n        {}", index + 1, steps[index], of(tcp), of(other))
}

/// Returns the same steps with all connections warm, and in two processes.
fn simpler(sequence: &Sequence) -> Vec<Sequence> {
    let warm = Sequence { warm: 12, ..sequence.clone() };
    let apart = Sequence { alone: false, ..warm.clone() };
    if sequence.alone { vec![warm] } else { vec![warm, apart] }
}

/// Returns whether a connection of the broker's only processes is on shared memory.
fn is_on_shm(broker: &PathBuf) -> bool {
    connections(broker)
        .iter()
        .any(|one| one.send.transport == Transport::Shm || one.receive.transport == Transport::Shm)
}

/// Returns the number of connection ends that send and receive by shared memory.
fn ends_on_shm(broker: &PathBuf) -> usize {
    let is_whole =
        |one: &&Connection| one.send.transport == Transport::Shm && one.receive.transport == Transport::Shm;
    connections(broker).iter().filter(is_whole).count()
}

fn connections(broker: &PathBuf) -> Vec<Connection> {
    let snapshot = shunt_broker::status(broker).ok();
    snapshot.into_iter().flat_map(|all| all.processes).flat_map(|process| process.connections).collect()
}
