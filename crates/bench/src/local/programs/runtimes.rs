//! Round trips in other languages, with their runtimes' socket options. The programs are part of
//! shunt, because there is no third-party benchmark that is the same in all three.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::super::point::{Load, Point, Sample};
use super::super::tables::{Table, Unit, bytes};
use super::super::{Group, pair};
use crate::find;
use crate::process::run;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};

pub(super) fn points() -> Vec<Point> {
    let point =
        |runtime: &'static Runtime| Point::new(runtime.label, Side::PROGRAM, Messages { runtime, size: 64 });
    RUNTIMES.iter().map(point).collect()
}

pub(super) fn java_by_size() -> Table {
    let java = &RUNTIMES[0];
    let point = |size| Point::new(bytes(size), Side::PROGRAM, Messages { runtime: java, size }).at(size);
    Table {
        group: Group::Runtimes,
        title: format!("Round trip in {}", java.label),
        unit: Unit::Microseconds,
        axis: Some("bytes"),
        points: [1, 1 << 10, 16 << 10, 64 << 10, 1 << 20].map(point).into(),
    }
}

/// Round trips of messages of one size.
struct Messages {
    runtime: &'static Runtime,
    size: usize,
}

struct Runtime {
    label: &'static str,
    program: &'static str,
    file: &'static str,
    text: &'static str,
    /// The compiler of the file and its arguments, if there is one.
    compiler: Option<(&'static str, &'static [&'static str])>,
}

const RUNTIMES: [Runtime; 3] = [
    Runtime {
        label: "Java, blocking channels",
        program: "java",
        file: "RoundTrip.java",
        text: include_str!("../../../programs/RoundTrip.java"),
        compiler: Some(("javac", &["-Xshare:auto", "-cp", ".", "RoundTrip"])),
    },
    Runtime {
        label: "Node.js, net.Socket",
        program: "node",
        file: "round_trip.js",
        text: include_str!("../../../programs/round_trip.js"),
        compiler: None,
    },
    Runtime {
        label: "Python, asyncio streams",
        program: "python3",
        file: "round_trip.py",
        text: include_str!("../../../programs/round_trip.py"),
        compiler: None,
    },
];

const PLACEMENT: Placement = Placement::TwoCores;

impl Load for Messages {
    fn missing(&self) -> Option<String> {
        let Runtime { program, compiler, .. } = self.runtime;
        find::missing(&[*program]).or_else(|| find::missing(&[compiler.as_ref()?.0]))
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        self.runtime.prepare(stage)?;
        let size = self.size.to_string();
        let mut server = self.runtime.command(stage, side, Role::Server)?;
        server.args(["serve", &pair::listen_at(stage, side, PLACEMENT)?, &size]);
        let mut client = self.runtime.command(stage, side, Role::Client)?;
        let client = |address: &str| {
            client.args(["load", address, &size, &seconds.as_secs_f64().to_string()]);
            Ok(client)
        };
        pair::run(stage, side, &mut server, client, seconds)
    }
}

impl Runtime {
    fn prepare(&self, stage: &Stage) -> Result<()> {
        let file = stage.path(self.file);
        if file.exists() {
            return Ok(());
        }
        std::fs::write(&file, self.text)?;
        if let Some((compiler, _)) = self.compiler {
            run(Command::new(find::installed(compiler)?).arg("-d").arg(stage.path("")).arg(&file))
                .with_context(|| format!("{compiler} refuses {}", self.file))?;
        }
        Ok(())
    }

    fn command(&self, stage: &Stage, side: Side, role: Role) -> Result<Command> {
        let program: PathBuf = find::installed(self.program)?;
        let mut command = stage.command(&program, side, role, PLACEMENT)?;
        match self.compiler {
            Some((_, arguments)) => command.args(arguments),
            None => command.arg(self.file),
        };
        Ok(command)
    }
}
