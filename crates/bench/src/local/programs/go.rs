//! Programs of Go's without cgo, which have no libc: a server and a client of net/http, and of plain messages.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::super::pair;
use super::super::point::{Load, Point, Sample};
use super::{Address, Program, Served};
use crate::find;
use crate::nginx;
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::Measured;

/// Go sets TCP_NODELAY by itself; its servers and wrk are not asked for Unix sockets.
const SIDES: &[Side] = &[Side::Tcp, Side::ShuntSleep, Side::Shunt];
const PLACEMENT: Placement = Placement::TwoCores;

pub(super) fn round_trips() -> Vec<Point> {
    vec![Point::new("Go, 64 B, one connection", SIDES, Talk { kind: "echo", connections: 1 })]
}

pub(super) fn points() -> Vec<Point> {
    vec![
        Point::new("echo of 64 B, 50 connections", SIDES, Talk { kind: "echo", connections: 50 }),
        Point::new("net/http, 1 KB, one connection", SIDES, Talk { kind: "http", connections: 1 }),
        Point::new("net/http, 1 KB, 8 connections", SIDES, Talk { kind: "http", connections: 8 }),
        Point::new("net/http, 1 KB, 50 connections", SIDES, Talk { kind: "http", connections: 50 }),
        Point::new("net/http, 64 KB, 8 connections", SIDES, Talk { kind: "files", connections: 8 }),
        Point::new(
            "net/http, 1 KB, 50 connections of wrk's",
            SIDES,
            Served::new(Http { connections: 50 }, PLACEMENT),
        ),
    ]
}

/// Builds the program once, and says where it is.
fn program(stage: &Stage) -> Result<PathBuf> {
    let (source, program) = (stage.path("go_load.go"), stage.path("go_load"));
    if !program.exists() {
        std::fs::write(&source, include_str!("../../../programs/go_load.go"))?;
        let status = Command::new(find::installed("go")?)
            .args(["build", "-o"])
            .arg(&program)
            .arg(&source)
            .envs([("CGO_ENABLED", "0"), ("GO111MODULE", "off"), ("GOTOOLCHAIN", "local")])
            .env("GOCACHE", stage.path("go-cache"))
            .status();
        ensure!(status.context("go")?.success(), "go refuses go_load.go");
    }
    Ok(program)
}

/// Both ends are Go's.
struct Talk {
    kind: &'static str,
    connections: usize,
}

impl Load for Talk {
    fn missing(&self) -> Option<String> {
        find::program("go").is_none().then(|| "go is not installed".to_owned())
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let program = program(stage)?;
        let mut server = stage.command(&program, side, Role::Server, PLACEMENT)?;
        server.args(["serve", self.kind, &pair::listen_at(stage, side, PLACEMENT)?]);
        let mut client = stage.command(&program, side, Role::Client, PLACEMENT)?;
        let client = |address: &str| {
            client.args(["load", self.kind, address, &self.connections.to_string()]);
            client.arg(seconds.as_secs_f64().to_string());
            Ok(client)
        };
        pair::run(stage, side, &mut server, client, seconds)
    }
}

/// The server is Go's.
struct Http {
    connections: u32,
}

impl Program for Http {
    fn needs(&self) -> &[&str] {
        &["go", "wrk"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let mut command = stage.command(&program(stage)?, side, Role::Server, address.placement)?;
        command.args(["serve", "http", &format!("{}:{}", address.host, address.port)]);
        Ok(vec![Process::spawn_with_lines(&mut command, "Go")?])
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, seconds: Duration) -> Result<Command> {
        let mut command = stage.command(&find::installed("wrk")?, side, Role::Client, address.placement)?;
        let url = format!("http://{}:{}/", address.host, address.port);
        command.args(nginx::wrk(self.connections, seconds, &url));
        Ok(command)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        nginx::measured(output)
    }
}
