//! Our own loads: a server and a client that do nothing but send and receive.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::pair;
use super::point::{Load, Sample};
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::{BEGIN, Call, Measured, Style};

/// What is sent how.
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
    /// Connections that end after so many exchanges.
    Short {
        exchanges: usize,
    },
}

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Synthetic {
    pattern: Pattern,
    size: usize,
    placement: Placement,
    once_settled: bool,
}

/// Seconds that a load runs before it is measured, where an offer must first have been in vain for long enough to be taken back.
pub(super) const LONG_WARM: &str = "1.6";

impl Load for Synthetic {
    fn missing(&self) -> Option<String> {
        self.placement.missing()
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let mut server = self.server(stage, side)?;
        pair::run(stage, side, &mut server, |address| self.client(stage, side, address, seconds), seconds)
    }
}

impl Synthetic {
    pub(super) fn new(pattern: Pattern, size: usize, placement: Placement) -> Synthetic {
        Synthetic { pattern, size, placement, once_settled: false }
    }

    /// Measured when it has shown that the peer is not under shunt.
    pub(super) fn once_settled(self) -> Synthetic {
        Synthetic { once_settled: true, ..self }
    }

    fn server(&self, stage: &Stage, side: Side) -> Result<Command> {
        let mut command = stage.worker(side, Role::Server, self.placement)?;
        match self.pattern {
            Pattern::Stream => command.arg("sink"),
            Pattern::RoundTrip { style, .. } => command.args(["echo", "--style", style.label()]),
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
                command.args(["round-trip", "--style", style.label(), "--threads", &threads.to_string()])
            }
            Pattern::Many { connections, depth } => {
                command.arg("many");
                command.args(["--connections", &connections.to_string(), "--depth", &depth.to_string()])
            }
            Pattern::Short { exchanges } => command.args(["short", "--exchanges", &exchanges.to_string()]),
        };
        command.args(["--to", address, "--seconds", &seconds.as_secs_f64().to_string()]);
        if self.once_settled {
            command.args(["--warm", LONG_WARM]);
        }
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

/// System calls that have nothing to do with connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calls(pub(super) Call);

impl Load for Calls {
    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let limit = seconds + Duration::from_secs(30);
        let mut command = stage.worker(side, Role::Client, Placement::TwoCores)?;
        command.args(["calls", self.0.label(), "--seconds", &seconds.as_secs_f64().to_string()]);
        let mut process = Process::spawn_with_lines(&mut command, "the caller")?;
        process.expect(BEGIN, limit)?;
        let before = process.cpu();
        let measured: Measured = serde_json::from_str(&process.line(limit)?)?;
        let cpu = process.cpu().saturating_sub(before);
        process.finish()?;
        Ok(Sample::of(&measured, Duration::ZERO, cpu))
    }
}
