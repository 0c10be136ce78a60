//! Third-party programs. The servers of all sides are always running, and idle except in their
//! turns.

mod bulk;
mod caches;
mod files;
mod go;
mod musl;
mod nginx;
mod postgres;
mod runtimes;

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Group;
use super::one_sided::{OneSided, Ready};
use super::point::{Load, Sample};
use super::tables::{Table, Unit};
use crate::find;
use crate::interrupt::{pause, wait_until};
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Stage};
use crate::worker::Measured;

pub(super) use caches::Cached;

pub(super) fn tables() -> Vec<Table> {
    let table =
        |group, title: &str, unit, points| Table { group, title: title.to_owned(), unit, axis: None, points };
    let mut tables = vec![
        table(Group::Memcached, "memcached, 9 gets to a set", Unit::PerSecond, caches::memcached()),
        table(Group::Redis, "Redis", Unit::PerSecond, caches::redis()),
        table(Group::BulkPrograms, "Bulk data of whole programs", Unit::Megabytes, bulk::points()),
        table(Group::Nginx, "nginx", Unit::PerSecond, nginx::points()),
        table(Group::Postgres, "PostgreSQL, pgbench with 8 clients", Unit::PerSecond, postgres::points()),
        table(
            Group::Runtimes,
            "Round trip of 64 B in a language's own runtime",
            Unit::Microseconds,
            runtimes::points(),
        ),
        runtimes::java_by_size(),
        table(Group::Go, "Round trip between programs of Go's", Unit::Microseconds, go::round_trips()),
        table(Group::Go, "Go", Unit::PerSecond, go::points()),
        table(Group::Musl, "An epoll server in C, 64 B, 50 connections", Unit::PerSecond, musl::points()),
    ];
    tables.extend(postgres::by_scale());
    tables
}

/// A server with its load.
pub(super) trait Program {
    /// Returns the programs that must be installed.
    fn needs(&self) -> &[&str];

    /// Returns the Unix socket of a server that uses this port otherwise.
    fn socket(&self, stage: &Stage, port: u16) -> PathBuf {
        stage.path(&format!("{port}.sock"))
    }

    /// Starts the server for a side, which listens at `address`. The address is free.
    fn start(&self, stage: &Stage, side: Side, address: &Address) -> Result<Vec<Process>>;

    /// Waits until the server takes the load.
    fn wait(&self, address: &Address) -> Result<()> {
        address.wait()
    }

    /// Returns the command of the load for a turn.
    fn load(&self, stage: &Stage, side: Side, address: &Address, seconds: Duration) -> Result<Command>;

    /// Parses the output of the load, which ran for `seconds`.
    fn parse(&self, output: &str, seconds: Duration) -> Option<Measured>;
}

/// The address of a server on a side.
#[derive(Clone, Debug)]
pub(super) struct Address {
    placement: Placement,
    host: &'static str,
    port: u16,
    /// The path, on the side with Unix sockets.
    socket: Option<String>,
}

pub(super) struct Served<P> {
    program: P,
    placement: Placement,
    running: RefCell<HashMap<Side, Running>>,
}

struct Running {
    address: Address,
    /// The processes. The first one's processor time counts as the server's.
    processes: Vec<Process>,
}

impl<P: Program> Served<P> {
    pub(super) fn new(program: P, placement: Placement) -> Served<P> {
        Served { program, placement, running: RefCell::default() }
    }

    fn start(&self, stage: &Stage, side: Side) -> Result<Running> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let socket = side.is_unix().then(|| self.program.socket(stage, port).display().to_string());
        let (placement, host) = (self.placement, stage.host(self.placement)?);
        let address = Address { placement, host, port, socket };
        let processes = self.program.start(stage, side, &address)?;
        self.program.wait(&address)?;
        Ok(Running { address, processes })
    }
}

/// Starts a new server for each turn, because two processes of one program differ for as long as
/// they run.
impl<P: Program> OneSided for Served<P> {
    fn start(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Ready> {
        let Running { address, processes } = self.start(stage, side)?;
        let client = self.program.load(stage, side, &address, seconds)?;
        let server = processes.into_iter().next().context("a server")?;
        Ok(Ready { server, address: format!("{}:{}", address.host, address.port), client })
    }
}

impl<P: Program> Load for Served<P> {
    fn missing(&self) -> Option<String> {
        find::missing(self.program.needs()).or_else(|| self.placement.missing())
    }

    fn close(&self) {
        self.running.borrow_mut().clear();
    }

    fn run(&self, stage: &Stage, side: Side, seconds: Duration) -> Result<Sample> {
        let mut all = self.running.borrow_mut();
        let running = match all.entry(side) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(self.start(stage, side)?),
        };
        let server = running.processes.first().context("a server")?;
        let mut command = self.program.load(stage, side, &running.address, seconds)?;
        let pairs_before = pairs_made(stage, side)?;
        let before = server.tree_cpu();
        let client = Process::spawn_with_lines(&mut command, "the load")?;
        let mut sample = Sample::default();
        if side.is_under_shunt() {
            pause(seconds / 2)?;
            sample.look(&stage.status()?, &format!("{}:{}", running.address.host, running.address.port));
            sample.link_bytes = server.link_bytes() + client.link_bytes();
        }
        let (output, client_cpu) = client.output(LIMIT)?;
        let server_cpu = server.tree_cpu().saturating_sub(before);
        if side.is_under_shunt() {
            sample.count(pairs_made(stage, side)? - pairs_before);
        }
        let measured =
            self.program.parse(&output, seconds).with_context(|| format!("the load printed\n{output}"))?;
        let figures = Sample::of(&measured, server_cpu, client_cpu);
        let Sample { on_shm, connections, is_unseen, reasons, link_bytes, .. } = sample;
        Ok(Sample { on_shm, connections, is_unseen, reasons, link_bytes, ..figures })
    }
}

/// Parses the output of a synthetic load.
fn said_by_ours(output: &str) -> Option<Measured> {
    output.lines().find_map(|line| serde_json::from_str(line).ok())
}

/// Returns the pairs that the broker has made so far.
fn pairs_made(stage: &Stage, side: Side) -> Result<u64> {
    if side.is_under_shunt() { Ok(stage.status()?.pairs_made) } else { Ok(0) }
}

const LIMIT: Duration = Duration::from_secs(60);
const START_LIMIT: Duration = Duration::from_secs(20);

impl Address {
    /// Waits until a server listens there.
    fn wait(&self) -> Result<()> {
        let answers = || match &self.socket {
            Some(path) => UnixStream::connect(path).is_ok(),
            None => TcpStream::connect((self.host, self.port)).is_ok(),
        };
        let complaint = || format!("the server does not answer within {START_LIMIT:?}");
        wait_until(START_LIMIT, || Ok(answers()), complaint)
    }
}
