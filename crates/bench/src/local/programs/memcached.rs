//! memcached with one thread, under the synthetic load.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::super::point::Point;
use super::{Address, Program, Served, load_on_cache, said_by_ours};
use crate::find;
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::{Cache, Measured};

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

const CONNECTIONS: [usize; 5] = [1, 8, 50, 128, 512];

fn served(connections: usize, placement: Placement) -> Served<Memcached> {
    Served::new(Memcached { connections }, placement)
}

pub(in super::super) struct Memcached {
    pub(in super::super) connections: usize,
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
        load_on_cache(stage, side, address, (Cache::Memcached, self.connections), seconds)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        said_by_ours(output)
    }
}
