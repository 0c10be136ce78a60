//! Go programs, a server and a client with plain messages and with net/http: without cgo, where
//! they do not use libc, and with cgo.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::super::pair;
use super::super::point::{Load, Point, Sample};
use super::{Address, Program, Served};
use crate::find;
use crate::nginx;
use crate::process::{Process, run};
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::Measured;

/// Go sets TCP_NODELAY itself. Its servers and wrk are not measured on Unix sockets.
const SIDES: &[Side] = &[Side::Tcp, Side::ShuntSleep, Side::Shunt];
const PLACEMENT: Placement = Placement::TwoCores;

pub(super) fn round_trips() -> Vec<Point> {
    let talk = |line, cgo| Point::new(line, SIDES, Talk { kind: "echo", connections: 1, cgo });
    vec![talk("Go, 64 B, one connection", Cgo::Without), talk("Go with cgo, 64 B, one connection", Cgo::With)]
}

pub(super) fn points() -> Vec<Point> {
    let talk = |line, kind, connections, cgo| Point::new(line, SIDES, Talk { kind, connections, cgo });
    let without = |line, kind, connections| talk(line, kind, connections, Cgo::Without);
    vec![
        without("echo of 64 B, 50 connections", "echo", 50),
        talk("with cgo, echo of 64 B, 50 connections", "echo", 50, Cgo::With),
        without("net/http, 1 KB, one connection", "http", 1),
        without("net/http, 1 KB, 8 connections", "http", 8),
        talk("with cgo, net/http, 1 KB, 8 connections", "http", 8, Cgo::With),
        without("net/http, 1 KB, 50 connections", "http", 50),
        talk("with cgo, net/http, 1 KB, 50 connections", "http", 50, Cgo::With),
        without("net/http, 64 KB, 8 connections", "files", 8),
        Point::new(
            "net/http, 1 KB, 50 connections of wrk's",
            SIDES,
            Served::new(Http { connections: 50 }, PLACEMENT),
        ),
    ]
}

/// With cgo, the package net makes a program use libc. Without, it makes all system calls itself.
#[derive(Clone, Copy, Debug)]
enum Cgo {
    Without,
    With,
}

impl Cgo {
    /// Returns the programs that the build needs.
    fn needs(self) -> &'static [&'static str] {
        match self {
            Cgo::Without => &["go"],
            Cgo::With => &["go", "gcc"],
        }
    }

    /// Builds the program once and returns its path.
    fn program(self, stage: &Stage) -> Result<PathBuf> {
        let (name, enabled) = match self {
            Cgo::Without => ("go_load", "0"),
            Cgo::With => ("go_load_cgo", "1"),
        };
        let (source, program) = (stage.path("go_load.go"), stage.path(name));
        if !program.exists() {
            std::fs::write(&source, include_str!("../../../programs/go_load.go"))?;
            let mut go = Command::new(find::installed("go")?);
            go.args(["build", "-o"]).arg(&program).arg(&source).env("GOCACHE", stage.path("go-cache"));
            go.envs([("CGO_ENABLED", enabled), ("GO111MODULE", "off"), ("GOTOOLCHAIN", "local")]);
            run(&mut go).context("go refuses go_load.go")?;
        }
        Ok(program)
    }
}

/// Plain messages between two Go programs.
struct Talk {
    kind: &'static str,
    connections: usize,
    cgo: Cgo,
}

impl Load for Talk {
    fn missing(&self) -> Option<String> {
        find::missing(self.cgo.needs())
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let program = self.cgo.program(stage)?;
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

/// A Go server with wrk as the client.
struct Http {
    connections: u32,
}

impl Program for Http {
    fn needs(&self) -> &[&str] {
        &["go", "wrk"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let mut command =
            stage.command(&Cgo::Without.program(stage)?, side, Role::Server, address.placement)?;
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
