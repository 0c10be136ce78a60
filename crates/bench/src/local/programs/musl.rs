//! A C server with glibc, with musl, and static with musl, each under the same synthetic load.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::super::pair;
use super::super::point::{Load, Point, Sample};
use crate::find;
use crate::process::run;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};

const SIDES: &[Side] = &[Side::TcpNodelay, Side::ShuntSleep, Side::Shunt];
const PLACEMENT: Placement = Placement::TwoCores;
const CONNECTIONS: &str = "50";
const SIZE: &str = "64";

pub(super) fn points() -> Vec<Point> {
    [
        Built { label: "glibc", compiler: "gcc", flag: None },
        Built { label: "musl", compiler: "musl-gcc", flag: None },
        Built { label: "glibc, static", compiler: "gcc", flag: Some("-static") },
        Built { label: "musl, static", compiler: "musl-gcc", flag: Some("-static") },
    ]
    .map(|built| Point::new(built.label, SIDES, built))
    .into()
}

struct Built {
    label: &'static str,
    compiler: &'static str,
    flag: Option<&'static str>,
}

impl Load for Built {
    fn missing(&self) -> Option<String> {
        find::missing(&[self.compiler])
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let mut server = stage.command(&self.program(stage)?, side, Role::Server, PLACEMENT)?;
        server.arg(pair::listen_at(stage, side, PLACEMENT)?);
        let client = |address: &str| {
            let mut client = stage.worker(side, Role::Client, PLACEMENT)?;
            client.args(["many", "--connections", CONNECTIONS, "--size", SIZE, "--nodelay", "--to", address]);
            client.args(["--seconds", &seconds.as_secs_f64().to_string()]);
            Ok(client)
        };
        pair::run(stage, side, &mut server, client, seconds)
    }
}

impl Built {
    /// Builds the program once and returns its path.
    fn program(&self, stage: &Stage) -> Result<PathBuf> {
        let name = format!("epoll_echo.{}{}", self.compiler, self.flag.unwrap_or_default());
        let (source, program) = (stage.path("epoll_echo.c"), stage.path(&name));
        if !program.exists() {
            std::fs::write(&source, include_str!("../../../programs/epoll_echo.c"))?;
            let mut compiler = Command::new(find::installed(self.compiler)?);
            compiler.arg("-O2").args(self.flag).arg("-o").arg(&program).arg(&source);
            run(&mut compiler).with_context(|| format!("{} refuses epoll_echo.c", self.compiler))?;
        }
        Ok(program)
    }
}
