//! A turn of one way: a receiving and a sending process, and their measurements.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Serialize;
use tempfile::TempDir;

use crate::find;
use crate::process::Process;
use crate::worker::{BEGIN, IpcMeasured, READY, name};
use shunt_bench_args::ipc::Way;

/// The directory where the processes meet, and their processors.
pub(super) struct Place {
    pub(super) directory: TempDir,
    pub(super) program: std::path::PathBuf,
    /// The processors of the receiver and the sender, if there are two.
    pub(super) cpus: Option<(usize, usize)>,
    /// The file system of temporary files.
    pub(super) file_system: String,
}

/// The result of a turn, in microseconds for each message.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Sample {
    pub(super) wall: f64,
    /// Of the receiver, from one message to the next; in sessions of the asking end, from a message
    /// to its answer.
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) sender_user: f64,
    pub(super) sender_system: f64,
    pub(super) receiver_user: f64,
    pub(super) receiver_system: f64,
}

/// The synthetic loads of the two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exchange {
    receiver: &'static str,
    sender: &'static str,
}

/// Messages in one direction, as fast as possible.
pub(super) const ONE_WAY: Exchange = Exchange { receiver: "ipc-receive", sender: "ipc-send" };
/// Sessions of five sequential messages, which count as one.
pub(super) const SESSIONS: Exchange = Exchange { receiver: "ipc-answer", sender: "ipc-ask" };

/// The measurement of one turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) exchange: Exchange,
    pub(super) way: Way,
    pub(super) size: usize,
    pub(super) descriptors: usize,
}

/// Two started processes, of which one is about to send.
pub(super) struct Pair {
    pub(super) receiver: Process,
    pub(super) sender: Process,
    messages: u64,
    /// Whether the sender waits for answers.
    asks: bool,
    /// The directory where they meet, and where the file way creates its files.
    _meeting: TempDir,
}

/// Messages of the first attempt, which is also the minimum of a turn, and below, the maximum.
const FEW: u64 = 20;
const MANY: u64 = 5_000_000;

impl Place {
    pub(super) fn find() -> Result<Place> {
        let allowed = sched_getaffinity(None)?;
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
        let cpus = cpus.next().zip(cpus.next());
        let directory = tempfile::Builder::new().prefix("shunt-bench-").tempdir()?;
        let file_system = file_system(directory.path());
        Ok(Place { directory, program: find::own()?, cpus, file_system })
    }

    /// Returns how many messages take about this time, or `None` if the way does not support them.
    pub(super) fn find_messages(&self, turn: Turn, time: Duration) -> Result<Option<u64>> {
        find_messages(time, |messages| self.take(turn, messages))
    }

    /// Runs a turn. Returns `None` if the way does not support such messages.
    pub(super) fn take(&self, turn: Turn, messages: u64) -> Result<Option<Sample>> {
        self.start(turn, messages, |_| Ok(()))?.sample()
    }

    /// Returns the command of a process that meets others in a directory, on a processor.
    pub(super) fn worker(
        &self,
        role: &str,
        way: &str,
        meeting: &TempDir,
        numbers: &[(&str, u64)],
        cpu: Option<usize>,
    ) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["bench-worker", role, "--way", way, "--at"]);
        command.arg(meeting.path().join("socket"));
        for (flag, number) in numbers {
            command.arg(flag).arg(number.to_string());
        }
        if let Some(cpu) = cpu {
            command.arg("--cpu").arg(cpu.to_string());
        }
        command
    }

    /// Starts both processes, and calls `between` for each before it does anything.
    pub(super) fn start(
        &self,
        Turn { exchange, way, size, descriptors }: Turn,
        messages: u64,
        mut between: impl FnMut(&Process) -> Result<()>,
    ) -> Result<Pair> {
        let meeting = tempfile::Builder::new().prefix("turn-").tempdir_in(self.directory.path())?;
        let numbers =
            [("--size", size as u64), ("--descriptors", descriptors as u64), ("--messages", messages)];
        let command = |role, cpu| self.worker(role, &name(way), &meeting, &numbers, cpu);
        let (receiving, sending) = (self.cpus.map(|cpus| cpus.0), self.cpus.map(|cpus| cpus.1));
        let mut receiver =
            Process::spawn_with_lines(&mut command(exchange.receiver, receiving), "the receiver")?;
        between(&receiver)?;
        receiver.expect(READY)?;
        let mut sender = Process::spawn_with_lines(&mut command(exchange.sender, sending), "the sender")?;
        between(&sender)?;
        sender.expect(BEGIN)?;
        let asks = exchange == SESSIONS;
        Ok(Pair { receiver, sender, messages, asks, _meeting: meeting })
    }
}

/// Returns how many messages take about this time, or `None` if `take` returns that for a turn.
pub(super) fn find_messages(
    time: Duration,
    mut take: impl FnMut(u64) -> Result<Option<Sample>>,
) -> Result<Option<u64>> {
    let mut messages = FEW;
    loop {
        let Some(sample) = take(messages)? else { return Ok(None) };
        let fitting = (time.as_secs_f64() * 1e6 / sample.wall) as u64;
        let next = fitting.clamp(FEW, MANY).min(messages * 20);
        if next <= messages * 2 {
            return Ok(Some(next));
        }
        messages = next;
    }
}

impl Pair {
    /// Waits for the measurements and the end of both.
    pub(super) fn sample(mut self) -> Result<Option<Sample>> {
        let sample = self.finish()?;
        if sample.is_some() {
            self.sender.finish()?;
            self.receiver.finish()?;
        }
        Ok(sample)
    }

    /// Waits for the measurements of both, which stay alive.
    pub(super) fn finish(&mut self) -> Result<Option<Sample>> {
        let sent: IpcMeasured = self.sender.results(Duration::ZERO)?;
        if sent.refused {
            return Ok(None);
        }
        let received: IpcMeasured = self.receiver.results(Duration::ZERO)?;
        let each = |seconds: f64| seconds * 1e6 / self.messages as f64;
        Ok(Some(Sample {
            wall: each(received.seconds),
            p50: if self.asks { sent.p50_us } else { received.p50_us },
            p99: if self.asks { sent.p99_us } else { received.p99_us },
            sender_user: each(sent.user),
            sender_system: each(sent.system),
            receiver_user: each(received.user),
            receiver_system: each(received.system),
        }))
    }
}

/// Returns the type of a directory's file system.
fn file_system(path: &std::path::Path) -> String {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let fields = mounts.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        Some((fields.next()?, fields.next()?))
    });
    let longest = fields.filter(|(at, _)| path.starts_with(at)).max_by_key(|(at, _)| at.len());
    longest.map_or_else(|| "unknown".to_owned(), |(_, kind)| kind.to_owned())
}
