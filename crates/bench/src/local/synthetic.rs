//! The synthetic loads: a server and a client that only send and receive.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::one_sided::{OneSided, Ready};
use super::pair::{self, Turn};
use super::point::{Load, Sample};
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::{Call, Measured, Style, name};

/// The pattern of the messages.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pattern {
    RoundTrip {
        style: Style,
        threads: usize,
    },
    Stream,
    Many {
        connections: usize,
        depth: usize,
    },
    /// Connections that end after this many exchanges.
    Short {
        exchanges: usize,
    },
}

/// A synthetic load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Synthetic {
    pattern: Pattern,
    size: usize,
    placement: Placement,
    /// The number of competing threads, which only compute.
    beside: usize,
}

impl Load for Synthetic {
    fn missing(&self) -> Option<String> {
        self.placement.missing()
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let beside = (self.beside > 0).then(|| computing(stage, self.beside, self.placement)).transpose()?;
        let (server, address) = Process::serving(&mut self.server(stage, side)?, "the server")?;
        let turn = Turn { stage, side, seconds, is_counted: false, beside: beside.as_ref() };
        let sample = turn.run(&server, &address, &mut self.client(stage, side, &address, seconds)?)?;
        server.finish()?;
        Ok(sample)
    }
}

impl OneSided for Synthetic {
    fn start(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Ready> {
        let (server, address) = Process::serving(&mut self.server(stage, side)?, "the server")?;
        let client = self.client(stage, side, &address, seconds)?;
        Ok(Ready { server, address, client })
    }
}

impl Synthetic {
    pub(super) fn new(pattern: Pattern, size: usize, placement: Placement) -> Synthetic {
        Synthetic { pattern, size, placement, beside: 0 }
    }

    /// Adds competing threads on its processors, which only compute.
    pub(super) fn beside(self, threads: usize) -> Synthetic {
        Synthetic { beside: threads, ..self }
    }

    fn server(&self, stage: &Stage, side: Side) -> Result<Command> {
        let mut command = stage.worker(side, Role::Server, self.placement)?;
        match self.pattern {
            Pattern::Stream => command.arg("sink"),
            Pattern::RoundTrip { style, .. } => command.args(["echo", "--style", &name(style)]),
            Pattern::Many { .. } | Pattern::Short { .. } => command.args(["echo", "--style", "epoll"]),
        };
        command.args(["--at", &pair::listen_at(stage, side, self.placement)?]);
        self.common(&mut command, side);
        Ok(command)
    }

    fn client(&self, stage: &Stage, side: Side, address: &str, seconds: Duration) -> Result<Command> {
        let mut command = stage.worker(side, Role::Client, self.placement)?;
        match self.pattern {
            Pattern::Stream => command.arg("stream"),
            Pattern::RoundTrip { style, threads } => {
                command.args(["round-trip", "--style", &name(style), "--threads", &threads.to_string()])
            }
            Pattern::Many { connections, depth } => {
                command.arg("many");
                command.args(["--connections", &connections.to_string(), "--depth", &depth.to_string()])
            }
            Pattern::Short { exchanges } => command.args(["short", "--exchanges", &exchanges.to_string()]),
        };
        command.args(["--to", address, "--seconds", &seconds.as_secs_f64().to_string()]);
        self.common(&mut command, side);
        Ok(command)
    }

    fn common(&self, command: &mut Command, side: Side) {
        command.args(["--size", &self.size.to_string()]);
        if side.nodelay() {
            command.arg("--nodelay");
        }
    }
}

/// Starts the competing threads, always natively.
fn computing(stage: &Stage, threads: usize, placement: Placement) -> Result<Process> {
    let mut command = stage.worker(Side::Tcp, Role::Server, placement)?;
    command.args(["compute", "--threads", &threads.to_string()]);
    Ok(Process::serving(&mut command, "the threads beside it")?.0)
}

/// System calls that are unrelated to connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calls(pub(super) Call);

impl Load for Calls {
    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let mut command = stage.worker(side, Role::Client, Placement::TwoCores)?;
        command.args(["calls", &name(self.0), "--seconds", &seconds.as_secs_f64().to_string()]);
        let mut process = Process::begun(&mut command, "the caller")?;
        let before = process.cpu();
        let measured: Measured = process.results(seconds)?;
        let cpu = process.cpu().saturating_sub(before);
        process.finish()?;
        Ok(Sample::of(&measured, Duration::ZERO, cpu))
    }
}
