//! memcached with one thread, under our own load.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::super::point::Point;
use super::super::synthetic::LONG_WARM;
use super::{Address, Program, Served};
use crate::find;
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::Measured;

pub(super) fn points() -> Vec<Point> {
    let point = |connections: usize| {
        let label = format!("1 B to 4 KB, {connections} connections");
        Point::new(label, Side::PROGRAM, served(connections, Placement::TwoCores))
    };
    let apart = |connections: usize| {
        let label = format!("the same, {connections}, across two containers");
        Point::new(label, Side::PROGRAM, served(connections, Placement::Apart))
    };
    CONNECTIONS.map(point).into_iter().chain(CONNECTIONS.map(apart)).collect()
}

/// Only one of both programs under shunt.
pub(in super::super) fn one_sided() -> Point {
    let memcached = Memcached { connections: 50, warm: Some(LONG_WARM) };
    Point::new("memcached, 50 connections", Side::ONE_SIDED, Served::new(memcached, Placement::TwoCores))
}

const CONNECTIONS: [usize; 5] = [1, 8, 50, 128, 512];

fn served(connections: usize, placement: Placement) -> Served<Memcached> {
    Served::new(Memcached { connections, warm: None }, placement)
}

struct Memcached {
    connections: usize,
    /// Seconds that the load runs before it is measured.
    warm: Option<&'static str>,
}

impl Program for Memcached {
    fn needs(&self) -> &[&str] {
        &["memcached"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let program = find::installed("memcached")?;
        let mut command = stage.command(&program, side, Role::Server, address.placement)?;
        command.args(["-t", "1", "-m", "256"]);
        if rustix::process::geteuid().is_root() {
            command.args(["-u", "root"]);
        }
        match &address.socket {
            Some(socket) => command.args(["-s", socket]),
            None => command.args(["-l", address.host, "-U", "0", "-p", &address.port.to_string()]),
        };
        Ok(vec![Process::spawn(&mut command, "memcached")?])
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, seconds: Duration) -> Result<Command> {
        let mut command = stage.worker(side, Role::Client, address.placement)?;
        command.args(["memcached", "--connections", &self.connections.to_string()]);
        if let Some(warm) = self.warm {
            command.args(["--warm", warm]);
        }
        command.args(["--seconds", &seconds.as_secs_f64().to_string(), "--to"]);
        match &address.socket {
            Some(socket) => command.arg(socket),
            None => command.arg(format!("{}:{}", address.host, address.port)),
        };
        Ok(command)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        output.lines().find_map(|line| serde_json::from_str(line).ok())
    }
}
