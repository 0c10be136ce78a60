//! PostgreSQL with pgbench: SELECT only and TPC-B, simple and prepared.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::super::Group;
use super::super::point::Point;
use super::super::tables::{Table, Unit};
use super::{Address, Program, START_LIMIT, Served};
use crate::find;
use crate::interrupt::pause;
use crate::process::{Process, run};
use crate::side::Side;
use crate::stage::{Placement, Role, Stage};
use crate::user;
use crate::worker::Measured;

pub(super) fn points() -> Vec<Point> {
    vec![
        point("SELECT, simple protocol", SELECT, SCALE),
        point("SELECT, prepared statements", &["-S", "-M", "prepared"], SCALE),
        point("TPC-B, simple protocol", TPC_B, SCALE),
    ]
}

pub(super) fn by_scale() -> [Table; 2] {
    let table = |what, arguments| Table {
        group: Group::PostgresScales,
        title: format!("PostgreSQL, {what}, 8 clients, by scale"),
        unit: Unit::PerSecond,
        axis: Some("scale"),
        points: SCALES.map(|scale| point(scale.to_string(), arguments, scale).at(scale)).into(),
    };
    [table("SELECT", SELECT), table("TPC-B", TPC_B)]
}

fn point(label: impl Into<String>, arguments: &'static [&'static str], scale: usize) -> Point {
    Point::new(label, Side::PROGRAM, Served::new(Pgbench { arguments, scale }, Placement::Free))
}

pub(super) struct Pgbench {
    arguments: &'static [&'static str],
    scale: usize,
}

/// A server with one branch.
pub(super) const SMALL: Pgbench = Pgbench { arguments: SELECT, scale: 1 };

const SELECT: &[&str] = &["-S", "-M", "simple"];
const TPC_B: &[&str] = &["-M", "simple"];

/// PostgreSQL refuses to run as root. Debian creates this user.
const USER: &str = "postgres";
/// Branches of the bank. Every TPC-B transaction locks one, so there are more branches than
/// clients.
const SCALE: usize = 10;
/// 16 MB of data each.
const SCALES: [usize; 4] = [1, 4, 10, 40];

impl Program for Pgbench {
    fn needs(&self) -> &[&str] {
        &["initdb", "postgres", "pgbench", "setpriv"]
    }

    fn socket(&self, stage: &Stage, port: u16) -> PathBuf {
        stage.path(&format!("data-{port}/.s.PGSQL.{port}"))
    }

    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>> {
        let data = data_directory(stage, address.port)?;
        let mut initdb = Command::new(find::installed("setpriv")?);
        initdb.args(user::becomes(USER, &find::installed("initdb")?));
        initdb.args(["--auth", "trust", "--no-sync", "--username", "postgres", "--pgdata"]).arg(&data);
        run(&mut initdb).context("initdb")?;
        let mut server =
            stage.command(&find::installed("setpriv")?, side, Role::Server, address.placement)?;
        server.args(user::becomes(USER, &find::installed("postgres")?));
        server.arg("-D").arg(&data).args(["-p", &address.port.to_string(), "-c", "fsync=off"]);
        server.args(["-c", "listen_addresses=127.0.0.1", "-c", "max_wal_size=1GB", "-c"]);
        server.arg(format!("unix_socket_directories={}", data.display()));
        let server = Process::spawn(server.stdout(Stdio::null()).stderr(Stdio::null()), "PostgreSQL")?;
        self.fill(stage, address)?;
        Ok(vec![server])
    }

    fn load(&self, stage: &Stage, side: Side, address: &Address, seconds: Duration) -> Result<Command> {
        let program = find::installed("pgbench")?;
        let mut command = stage.command(&program, side, Role::Client, address.placement)?;
        let whole = seconds.as_secs_f64().ceil() as u64;
        command.args(["-n", "-c", "8", "-j", "1", "-T", &whole.to_string(), "-U", "postgres"]);
        command.args(self.arguments).args(["-p", &address.port.to_string(), "-h"]);
        match &address.socket {
            Some(_) => command.arg(stage.path(&format!("data-{}", address.port))),
            None => command.arg("127.0.0.1"),
        };
        command.arg("postgres").stderr(Stdio::null());
        Ok(command)
    }

    fn parse(&self, output: &str, _: Duration) -> Option<Measured> {
        let after =
            |label: &str| output.lines().find_map(|line| line.strip_prefix(label)?.split_whitespace().next());
        let rate: f64 = after("tps = ")?.parse().ok()?;
        let average_ms: f64 = after("latency average = ")?.parse().ok()?;
        let all = after("number of transactions actually processed: ")?;
        let operations: u64 = all.split('/').next()?.parse().ok()?;
        let seconds = operations as f64 / rate;
        Some(Measured { operations, seconds, p50_us: average_ms * 1e3, p99_us: 0.0 })
    }
}

impl Pgbench {
    fn fill(&self, stage: &Stage, address: &Address) -> Result<()> {
        let (data, port) = (stage.path(&format!("data-{}", address.port)), address.port.to_string());
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let mut fill = Command::new(find::installed("pgbench")?);
            fill.args(["-i", "-q", "-s", &self.scale.to_string(), "-U", "postgres", "-p", &port, "-h"]);
            match run(fill.arg(&data).arg("postgres")) {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error.context("pgbench -i")),
                Err(_) => pause(Duration::from_millis(100))?,
            }
        }
    }
}

/// Creates a directory that belongs to the server's user.
fn data_directory(stage: &Stage, port: u16) -> Result<PathBuf> {
    let data = stage.path(&format!("data-{port}"));
    std::fs::create_dir(&data)?;
    // Allow that user to enter the stage's directory, which only root can.
    std::fs::set_permissions(stage.path(""), std::fs::Permissions::from_mode(0o755))?;
    user::give(&data, USER)?;
    Ok(data)
}
