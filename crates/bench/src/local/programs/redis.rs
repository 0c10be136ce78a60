//! Redis with redis-benchmark, or under the synthetic load.

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
    let point = |pipeline: u32| {
        let label = format!("GET, 100 B, 50 connections, pipeline {pipeline}");
        Point::new(label, Side::PROGRAM, Served::new(Redis { pipeline }, Placement::TwoCores))
    };
    [1, 16].map(point).into()
}

struct Redis {
    pipeline: u32,
}

/// redis-benchmark runs a number of requests. This rate makes them take about the requested time
/// with plain TCP.
const REQUESTS_PER_SECOND: f64 = 150_000.0;

impl Program for Redis {
    fn needs(&self) -> &[&str] {
        &["redis-server", "redis-benchmark"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        start(stage, side, address)
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, seconds: Duration) -> Result<Command> {
        let program = find::installed("redis-benchmark")?;
        let mut command = stage.command(&program, side, Role::Client, address.placement)?;
        command.args(["-t", "get", "-c", "50", "-d", "100", "-r", "10000", "--csv"]);
        command.args(["-n", &self.requests(seconds).to_string(), "-P", &self.pipeline.to_string()]);
        match &address.socket {
            Some(socket) => command.args(["-s", socket]),
            None => command.args(["-h", "127.0.0.1", "-p", &address.port.to_string()]),
        };
        Ok(command)
    }

    /// Parses a line with the rate and the latencies in milliseconds:
    /// "test","rps","avg","min","p50","p95","p99","max".
    fn parse(&self, output: &str, seconds: Duration) -> Option<Measured> {
        let line = output.lines().nth(1)?;
        let cells: Vec<f64> =
            line.split(',').skip(1).map(|cell| cell.trim_matches('"').parse().ok()).collect::<Option<_>>()?;
        let [rate, _, _, p50, _, p99, _] = cells[..] else { return None };
        let operations = self.requests(seconds);
        Some(Measured { operations, seconds: operations as f64 / rate, p50_us: p50 * 1e3, p99_us: p99 * 1e3 })
    }
}

/// Redis under the synthetic load that memcached gets.
pub(in super::super) struct Cached {
    pub(in super::super) connections: usize,
}

impl Program for Cached {
    fn needs(&self) -> &[&str] {
        &["redis-server"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        start(stage, side, address)
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, seconds: Duration) -> Result<Command> {
        load_on_cache(stage, side, address, (Cache::Redis, self.connections), seconds)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        said_by_ours(output)
    }
}

fn start(stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
    let program = find::installed("redis-server")?;
    let mut command = stage.command(&program, side, Role::Server, address.placement)?;
    command.args(["--save", "", "--appendonly", "no"]);
    match &address.socket {
        Some(socket) => command.args(["--port", "0", "--unixsocket", socket]),
        None => command.args(["--bind", "127.0.0.1", "--port", &address.port.to_string()]),
    };
    Ok(vec![Process::spawn(command.stdout(std::process::Stdio::null()), "Redis")?])
}

impl Redis {
    fn requests(&self, seconds: Duration) -> u64 {
        (REQUESTS_PER_SECOND * f64::from(self.pipeline).sqrt() * seconds.as_secs_f64()) as u64
    }
}
