//! The loads of the comparison, and a turn of a load on one side.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use shunt_bench_args::overlay::Group;

use super::cpu::{Cpu, Used};
use super::lab::{Brief, Lab, Paths, Routers};
use super::side::Side;
use crate::process::Process;
use crate::stage::Role;
use crate::worker::{Download, Measured};
use crate::{find, nginx};

/// A load.
#[derive(Clone, Copy, Debug)]
pub(super) enum Load {
    Throughput {
        bytes: usize,
    },
    RoundTrip {
        bytes: usize,
    },
    /// Set-up between routers that are connected.
    SetUp,
    /// The first connection after the routers' start.
    FirstSetUp,
    /// Short connections, which the routers do not move by default.
    Short {
        exchanges: u32,
    },
    Memcached {
        connections: u32,
    },
    Nginx {
        file: (&'static str, usize),
        connections: u32,
    },
}

/// The result of a turn.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    /// Operations a second, or MB a second.
    pub(super) rate: f64,
    /// Latency of an operation in microseconds; 0 if it is not measured.
    pub(super) p50: f64,
    pub(super) p99: f64,
    /// Processor time: microseconds for an operation, or seconds for a GB. `None` if it is not
    /// measured.
    pub(super) cpu: Option<Cpu>,
    /// The paths of the connections, under shunt.
    pub(super) paths: Option<Paths>,
}

/// How long a program may take to be ready, or to report its results after its time.
const LIMIT: Duration = Duration::from_secs(30);
const MEMCACHED_PORT: u16 = 11211;
const NGINX_PORT: u16 = 80;

impl Load {
    pub(super) fn all() -> Vec<Load> {
        [1_024, 16_384, 65_536]
            .map(|bytes| Load::Throughput { bytes })
            .into_iter()
            .chain([1, 128, 4_096].map(|bytes| Load::RoundTrip { bytes }))
            .chain([Load::SetUp, Load::FirstSetUp])
            .chain([1, 10, 100].map(|exchanges| Load::Short { exchanges }))
            .chain([1, 8, 50].map(|connections| Load::Memcached { connections }))
            .chain([
                Load::Nginx { file: nginx::SMALL, connections: 50 },
                Load::Nginx { file: nginx::LARGE, connections: 10 },
            ])
            .collect()
    }

    pub(super) fn group(self) -> Group {
        match self {
            Load::Throughput { .. } => Group::Throughput,
            Load::RoundTrip { .. } => Group::RoundTrip,
            Load::SetUp | Load::FirstSetUp => Group::SetUp,
            Load::Short { .. } => Group::Short,
            Load::Memcached { .. } => Group::Memcached,
            Load::Nginx { .. } => Group::Nginx,
        }
    }

    pub(super) fn label(self) -> String {
        match self {
            Load::Throughput { bytes } => format!("throughput, one connection, messages of {bytes} B"),
            Load::RoundTrip { bytes } => format!("round trip of {bytes} B"),
            Load::SetUp => "connection set-up, to the first byte answered".to_owned(),
            Load::FirstSetUp => "the same, the first one".to_owned(),
            Load::Short { exchanges } => format!("short connections, 1 B there and back {exchanges} times"),
            Load::Memcached { connections } => {
                format!("memcached, 9 gets to a set, 1 B to 4 KB, {connections} connections")
            }
            Load::Nginx { file: (_, bytes), connections } => {
                format!("nginx, {} KB, {connections} connections", bytes / 1024)
            }
        }
    }

    /// Returns the message size, if the loads differ by it.
    pub(super) fn bytes(self) -> Option<usize> {
        match self {
            Load::Throughput { bytes } | Load::RoundTrip { bytes } => Some(bytes),
            _ => None,
        }
    }

    /// Returns the reason why this machine cannot run it, if there is one.
    pub(super) fn missing(self) -> Option<String> {
        let needs: &[&str] = match self {
            Load::Memcached { .. } => &["memcached"],
            Load::Nginx { .. } => &["nginx", "wrk"],
            _ => &[],
        };
        find::missing(needs)
    }

    /// Runs one turn.
    pub(super) fn run(self, lab: &Lab, side: Side, time: Duration) -> Result<Sample> {
        let brief = if let Load::Short { .. } = self { Brief::Stay } else { Brief::Move };
        let routers = side.is_shunt().then(|| lab.route(side, brief)).transpose()?;
        let mut sample = match self {
            Load::Throughput { bytes } => {
                let server = ours(lab, side, &["sink", "--size", &bytes.to_string()])?;
                // Convert messages to bytes: the rate to MB/s, and microseconds for a message to
                // seconds for a GB.
                let load = ["stream", "--size", &bytes.to_string()];
                let sample = timed(lab, side, server, &load, time, 1e9 / bytes as f64)?;
                Sample { rate: sample.rate * bytes as f64 / 1e6, ..sample }
            }
            Load::RoundTrip { bytes } => echoed(lab, side, bytes, &["round-trip"], time)?,
            Load::SetUp => echoed(lab, side, 1, &["short"], time)?,
            Load::FirstSetUp => first(lab, side)?,
            Load::Short { exchanges } => {
                echoed(lab, side, 1, &["short", "--exchanges", &exchanges.to_string()], time)?
            }
            Load::Memcached { connections } => {
                let connections = connections.to_string();
                let load = ["cache", "--kind", "memcached", "--nodelay", "--connections", &connections];
                timed(lab, side, memcached(lab, side)?, &load, time, 1e6)?
            }
            Load::Nginx { file: (file, _), connections } => fetch(lab, side, file, connections, time)?,
        };
        sample.paths = routers.as_ref().map(Routers::paths).transpose()?;
        Ok(sample)
    }
}

/// A running server and its address.
pub(super) struct Server {
    _process: Process,
    pub(super) address: String,
}

/// Starts a synthetic server.
pub(super) fn ours(lab: &Lab, side: Side, load: &[&str]) -> Result<Server> {
    let mut command = lab.worker(side, Role::Server);
    command.args(load).args(["--at", &format!("{}:0", lab.server(side))]);
    let (_process, address) = Process::serving(&mut command, "the server")?;
    Ok(Server { _process, address })
}

fn memcached(lab: &Lab, side: Side) -> Result<Server> {
    let mut command = lab.command(side, Role::Server, find::installed("memcached")?);
    let address = lab.server(side).to_string();
    command.args(["-t", "1", "-m", "256", "-u", "root", "-U", "0", "-l", &address]);
    let process = Process::spawn(command.args(["-p", &MEMCACHED_PORT.to_string()]), "memcached")?;
    lab.await_server(side, MEMCACHED_PORT)?;
    Ok(Server { _process: process, address: format!("{address}:{MEMCACHED_PORT}") })
}

/// Runs a synthetic load that reports its start. `scale` converts the processor seconds of an
/// operation.
fn timed(lab: &Lab, side: Side, server: Server, load: &[&str], time: Duration, scale: f64) -> Result<Sample> {
    let mut command = lab.worker(side, Role::Client);
    command.args(load).args(["--to", &server.address, "--seconds", &time.as_secs_f64().to_string()]);
    let mut client = Process::begun(&mut command, "the client")?;
    let before = Used::now(lab)?;
    let measured: Measured = client.results(time)?;
    let used = Used::now(lab)?;
    client.finish()?;
    Ok(Sample::of(&measured, used.each(before, measured.operations.max(1) as f64, scale)))
}

/// Runs a synthetic load against an echo server of messages of this size.
fn echoed(lab: &Lab, side: Side, bytes: usize, load: &[&str], time: Duration) -> Result<Sample> {
    let size = bytes.to_string();
    let common = ["--nodelay", "--size", &size];
    let server = ours(lab, side, &[&["echo"], &common[..]].concat())?;
    timed(lab, side, server, &[load, &common[..]].concat(), time, 1e6)
}

/// Measures the first connection.
fn first(lab: &Lab, side: Side) -> Result<Sample> {
    let mut command = lab.worker(side, Role::Server);
    command.args(["serve", "--at", &format!("{}:0", lab.server(side))]);
    let (_server, address) = Process::serving(&mut command, "the server")?;
    let mut command = lab.worker(side, Role::Client);
    let mut client =
        Process::spawn_with_lines(command.args(["fetch", "--from", &address, "--size", "1"]), "the client")?;
    let downloads: Vec<Download> = client.results(Duration::ZERO)?;
    client.finish()?;
    ensure!(downloads.len() == 1, "{} downloads instead of one", downloads.len());
    let seconds = downloads[0].first_byte;
    Ok(Sample { rate: 1.0 / seconds, p50: seconds * 1e6, p99: seconds * 1e6, ..Sample::default() })
}

/// Runs nginx and wrk.
fn fetch(lab: &Lab, side: Side, file: &str, connections: u32, time: Duration) -> Result<Sample> {
    let (root, address) = (lab.path("www"), lab.server(side));
    nginx::write_files(&root)?;
    let site = format!("server {{ listen {address}:{NGINX_PORT}; root {}; }}", root.display());
    let arguments = nginx::configure(&lab.directory("nginx")?, &site)?;
    let mut command = lab.command(side, Role::Server, find::installed("nginx")?);
    let _server = Process::spawn(command.args(arguments), "nginx")?;
    lab.await_server(side, NGINX_PORT)?;
    let url = format!("http://{address}:{NGINX_PORT}/{file}");
    let mut wrk = waiting(lab.command(side, Role::Client, "sh"));
    wrk.arg(find::installed("wrk")?).args(nginx::wrk(connections, time, &url));
    let before = Used::now(lab)?;
    let mut client = Process::spawn_with_lines(&mut wrk, "wrk")?;
    let mut said = String::new();
    loop {
        match client.line(time + LIMIT)? {
            line if line == OVER => break,
            line => said = said + &line + "\n",
        }
    }
    let used = Used::now(lab)?;
    client.finish()?;
    let measured = nginx::measured(&said).with_context(|| format!("wrk printed\n{said}"))?;
    Ok(Sample::of(&measured, used.each(before, measured.operations.max(1) as f64, 1e6)))
}

/// Runs a program in a shell that stays alive afterwards, so that the program's processor time
/// remains readable.
fn waiting(mut shell: Command) -> Command {
    shell.args(["-c", &format!("\"$@\"; echo {OVER}; read _; :"), "sh"]);
    shell
}

const OVER: &str = "over";

impl Sample {
    fn of(measured: &Measured, cpu: Cpu) -> Sample {
        Sample {
            rate: measured.rate(),
            p50: measured.p50_us,
            p99: measured.p99_us,
            cpu: Some(cpu),
            paths: None,
        }
    }
}
