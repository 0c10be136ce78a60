//! Programs that move bulk data: iperf3, nginx with large files, programs that copy [files], a copy of
//! a Redis data set, and COPY of PostgreSQL.
//!
//! [files]: super::files

use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::super::point::Point;
use super::{Address, Program, START_LIMIT, Served, caches, files, nginx, postgres, said_by_ours};
use crate::find;
use crate::interrupt::wait_until;
use crate::process::{Process, run};
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::worker::Measured;

const MIB: usize = 1 << 20;
/// What a turn moves of a program that ends by itself.
pub(super) const MOVED: usize = 256 * MIB;

pub(super) fn points() -> Vec<Point> {
    fn point(label: &str, bytes: usize, placement: Placement, program: impl Program + 'static) -> Point {
        Point::new(label, Side::BULK_PROGRAM, Served::new(program, placement)).of_bytes(bytes)
    }
    vec![
        point("iperf3, one stream", MIB, Placement::TwoCores, Iperf),
        point("nginx, files of 1 MiB, 10 connections", MIB, Placement::TwoCores, nginx::LARGE),
        point("curl, PUT to nginx", MOVED, Placement::TwoCores, files::Objects),
        point("smbclient, one file", MOVED, Placement::TwoCores, files::Samba),
        point("redis-cli --rdb", MOVED, Placement::TwoCores, DataSet),
        point("rsync daemon, one file", MOVED, Placement::TwoCores, files::Rsync),
        point("PostgreSQL, COPY to psql", MOVED, Placement::Free, Copy),
    ]
}

/// Returns the command of a client that is timed as a whole.
pub(super) fn timed(stage: &Stage, side: Side, address: &Address, program: &str) -> Result<Command> {
    let mut command = stage.worker(side, Role::Client, address.placement)?;
    command.args(["timed", "--"]).arg(find::installed(program)?);
    Ok(command)
}

struct Iperf;

/// iperf3 sends so many bytes for each requested second.
const IPERF_BYTES: f64 = 2e9;

#[derive(Deserialize)]
struct IperfSaid {
    end: IperfEnd,
}

#[derive(Deserialize)]
struct IperfEnd {
    sum_received: IperfSum,
}

#[derive(Deserialize)]
struct IperfSum {
    seconds: f64,
    bytes: f64,
}

impl Program for Iperf {
    fn needs(&self) -> &[&str] {
        &["iperf3"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let mut server = stage.command(&find::installed("iperf3")?, side, Role::Server, address.placement)?;
        server.args(["-s", "-B", address.host, "-p", &address.port.to_string()]);
        Ok(vec![Process::spawn(server.stdout(Stdio::null()).stderr(Stdio::null()), "iperf3")?])
    }

    /// Its server has one client at a time, so a connection that only looks would be in the way of
    /// the load.
    fn wait(&self, address: &Address) -> Result<()> {
        let mut client = Command::new(find::installed("iperf3")?);
        client.args(["-c", address.host, "-p", &address.port.to_string(), "-n", "1"]);
        let complaint = || format!("iperf3 does not answer within {START_LIMIT:?}");
        wait_until(START_LIMIT, || Ok(run(&mut client).is_ok()), complaint)
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, seconds: Duration) -> Result<Command> {
        let mut client = stage.command(&find::installed("iperf3")?, side, Role::Client, address.placement)?;
        let bytes = (IPERF_BYTES * seconds.as_secs_f64()) as u64;
        client.args(["-J", "-c", address.host, "-p", &address.port.to_string(), "-n", &bytes.to_string()]);
        Ok(client)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        let IperfSum { seconds, bytes } = serde_json::from_str::<IperfSaid>(output).ok()?.end.sum_received;
        let operations = (bytes / MIB as f64).round() as u64;
        (operations > 0).then_some(Measured { operations, seconds, p50_us: 0.0, p99_us: 0.0 })
    }
}

/// A data set that redis-cli fetches as a replica would.
struct DataSet;

/// The length of a value.
const VALUE: usize = 32 * 1024;

impl Program for DataSet {
    fn needs(&self) -> &[&str] {
        &["redis-server", "redis-cli"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let server = caches::start_redis(stage, side, address)?;
        let is_there = || Ok(TcpStream::connect((address.host, address.port)).is_ok());
        wait_until(START_LIMIT, is_there, || "Redis does not answer".to_owned())?;
        let tell = |words: &[&str]| {
            let mut command = Command::new(find::installed("redis-cli")?);
            let said = run(command.args(["-h", address.host, "-p", &address.port.to_string()]).args(words))?;
            ensure!(said == "OK", "Redis answered {said:?} to {words:?}");
            Ok(())
        };
        tell(&["CONFIG", "SET", "repl-diskless-sync-delay", "0", "rdbcompression", "no"])?;
        let value = "x".repeat(VALUE);
        let mut fill = Command::new(find::installed("redis-cli")?);
        fill.args(["-h", address.host, "-p", &address.port.to_string(), "EVAL", FILL, "0"]);
        run(fill.args([&(MOVED / VALUE).to_string(), &value])).context("filling Redis")?;
        Ok(server)
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, _: Duration) -> Result<Command> {
        let mut client = timed(stage, side, address, "redis-cli")?;
        client.args(["-h", address.host, "-p", &address.port.to_string(), "--rdb", "-"]);
        client.stderr(Stdio::null());
        Ok(client)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        said_by_ours(output)
    }
}

const FILL: &str = "for key = 1, ARGV[1] do redis.call('SET', 'key:' .. key, ARGV[2]) end";

struct Copy;

/// The length of a row.
const ROW: usize = 8192;

impl Program for Copy {
    fn needs(&self) -> &[&str] {
        &["initdb", "postgres", "pgbench", "psql", "setpriv"]
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        postgres::SMALL.start(stage, side, address)
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, _: Duration) -> Result<Command> {
        let mut client = timed(stage, side, address, "psql")?;
        client.args(["-h", "127.0.0.1", "-p", &address.port.to_string(), "-U", "postgres", "-c"]);
        let rows = format!("SELECT repeat('x', {}) FROM generate_series(1, {})", ROW - 1, MOVED / ROW);
        client.arg(format!("COPY ({rows}) TO STDOUT")).arg("postgres");
        Ok(client)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        said_by_ours(output)
    }
}
