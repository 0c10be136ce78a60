//! memcached with one thread, and Redis: under the synthetic load for caches, or redis-benchmark.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Result;

use super::super::point::Point;
use super::{Address, Program, Served, said_by_ours};
use crate::find;
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::{Cache, Measured, name};

/// Returns the lines of memcached.
pub(super) fn memcached() -> Vec<Point> {
    let kind = Cache::Memcached;
    let point = |connections: usize| {
        let label = format!("1 B to 4 KB, {connections} connections");
        Point::new(label, Side::PROGRAM, Served::new(Cached { kind, connections }, Placement::TwoCores))
    };
    let apart = |connections: usize| {
        let label = format!("the same, {connections}, across two containers");
        Point::new(label, Side::PROGRAM, Served::new(Cached { kind, connections }, Placement::Apart))
    };
    CONNECTIONS.map(point).into_iter().chain(CONNECTIONS.map(apart)).collect()
}

const CONNECTIONS: [usize; 5] = [1, 8, 50, 128, 512];

/// Returns the lines of Redis.
pub(super) fn redis() -> Vec<Point> {
    let point = |pipeline: u32| {
        let label = format!("GET, 100 B, 50 connections, pipeline {pipeline}");
        Point::new(label, Side::PROGRAM, Served::new(Benchmark { pipeline }, Placement::TwoCores))
    };
    [1, 16].map(point).into()
}

/// A cache under the synthetic load.
pub(in super::super) struct Cached {
    pub(in super::super) kind: Cache,
    pub(in super::super) connections: usize,
}

impl Program for Cached {
    fn needs(&self) -> &[&str] {
        match self.kind {
            Cache::Memcached => &["memcached"],
            Cache::Redis => &["redis-server"],
        }
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        if self.kind == Cache::Redis {
            return start_redis(stage, side, address);
        }
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
        command.args(["cache", "--kind", &name(self.kind), "--connections", &self.connections.to_string()]);
        command.args(["--seconds", &seconds.as_secs_f64().to_string(), "--to"]);
        match &address.socket {
            Some(socket) => command.arg(socket),
            None => command.arg(format!("{}:{}", address.host, address.port)),
        };
        Ok(command)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        said_by_ours(output)
    }
}

pub(super) fn start_redis(stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
    let program = find::installed("redis-server")?;
    let mut command = stage.command(&program, side, Role::Server, address.placement)?;
    command.args(["--save", "", "--appendonly", "no"]);
    match &address.socket {
        Some(socket) => command.args(["--port", "0", "--unixsocket", socket]),
        None => command.args(["--bind", "127.0.0.1", "--port", &address.port.to_string()]),
    };
    Ok(vec![Process::spawn(command.stdout(Stdio::null()), "Redis")?])
}

/// Redis with redis-benchmark.
struct Benchmark {
    pipeline: u32,
}

/// redis-benchmark runs a number of requests. This rate makes them take about the requested time
/// with plain TCP.
const REQUESTS_PER_SECOND: f64 = 150_000.0;

impl Program for Benchmark {
    fn needs(&self) -> &[&str] {
        &["redis-server", "redis-benchmark"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        start_redis(stage, side, address)
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

impl Benchmark {
    fn requests(&self, seconds: Duration) -> u64 {
        (REQUESTS_PER_SECOND * f64::from(self.pipeline).sqrt() * seconds.as_secs_f64()) as u64
    }
}
