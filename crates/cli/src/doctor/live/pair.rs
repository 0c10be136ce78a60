//! One connection: two ends exchange data until it is clear which transport serves them.

use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use shunt_abi::reason::{Reason, Transport};
use shunt_abi::status::{Connection, Snapshot};

use super::ends::{End, Limit, under_shunt};
use super::{Kind, Outcome, Site, Tried, cause};
use crate::explain::{self, Cause};

/// What an order moves: messages and their answers (`MESSAGES` and `MESSAGE` in end.c).
const BYTES_OF_AN_ORDER: u64 = 2 * 32 * 4096;
/// How long a connection may take to come to shared memory.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a program is looked into that the broker does not know.
const LOOK: Duration = Duration::from_millis(500);

/// Reasons that end by themselves, so that the pair is observed for longer.
const PASSING: [Reason; 11] = [
    Reason::None,
    Reason::TooFewOperations,
    Reason::PeerNotOffered,
    // Until the broker has seen programs of both namespaces.
    Reason::RemotePeer,
    Reason::NoBroker,
    Reason::BrokerSilent,
    Reason::Idle,
    Reason::Stalled,
    Reason::Unread,
    Reason::NewCode,
    Reason::LinkNotMade,
];

/// Tries two programs of this network namespace.
pub(super) fn on_loopback(kind: Kind, program: &Path, site: &Site, limit: &Limit) -> Result<Tried> {
    let start = |arguments: &[&str]| start(program, site, arguments, |command| command.spawn());
    let ip = Ipv4Addr::LOCALHOST.to_string();
    let server = start(&["serve", &ip])?;
    let port = server.expect("port", limit)?;
    let client = start(&["connect", &ip, &port])?;
    let pair = Pair { pids: [server.pid(), client.pid()], server, client };
    pair.exchange(kind, &port, site, limit)
}

/// Starts an end under shunt. `spawn` may do so in another network namespace.
pub(super) fn start(
    program: &Path,
    site: &Site,
    arguments: &[&str],
    spawn: impl FnOnce(&mut Command) -> std::io::Result<Child>,
) -> Result<End> {
    let mut command = under_shunt(program, &site.socket);
    End::pipes(command.args(arguments));
    End::of(spawn(&mut command).context("an end of the connection cannot be started")?)
}

/// Both ends of a connection.
pub(super) struct Pair {
    pub(super) server: End,
    pub(super) client: End,
    /// The process ids of the server and the client, as this process sees them.
    pub(super) pids: [u32; 2],
}

impl Pair {
    /// Moves data until both directions use shared memory, a lasting reason forbids that, or the
    /// patience is over.
    pub(super) fn exchange(mut self, kind: Kind, port: &str, site: &Site, limit: &Limit) -> Result<Tried> {
        let port: u16 = port.parse().context("the server's port")?;
        let own_port: u16 = self.client.expect("from", limit)?.parse().context("the client's port")?;
        let Pair { pids, .. } = self;
        let ends = |snapshot: &Snapshot| {
            Ends([row(snapshot, pids[0], port, own_port), row(snapshot, pids[1], own_port, port)])
        };
        let until = Instant::now() + PATIENCE;
        let mut look_at = Instant::now() + LOOK;
        let mut verified_bytes = 0;
        let mut seen = Ends([None, None]);
        loop {
            self.client.order(limit)?;
            verified_bytes += BYTES_OF_AN_ORDER;
            // Data must have moved after both directions had been seen on shared memory.
            let was_served = seen.outcome() == Outcome::SharedMemory;
            let Some(broker) = &site.broker else { break };
            seen = match shunt_broker::status(broker) {
                Ok(snapshot) => ends(&snapshot),
                Err(error) => {
                    let mut silent = Cause::from(Reason::BrokerSilent);
                    silent.explanation = format!("The transport is unknown: {error}.");
                    let tried = Tried::without(kind, Outcome::Failed, silent);
                    return Ok(Tried { verified_bytes, ..tried });
                }
            };
            let is_served = seen.outcome() == Outcome::SharedMemory;
            if was_served || !is_served && (seen.are_settled() || Instant::now() > until) {
                break;
            }
            if seen.is_incomplete() && Instant::now() > look_at {
                if is_kept_out(&pids) {
                    break;
                }
                look_at = Instant::now() + LOOK;
            }
            limit.pause()?;
        }
        let outcome = seen.outcome();
        let causes = match outcome {
            Outcome::SharedMemory => Vec::new(),
            _ => self.causes([port, own_port], site),
        };
        Ok(Tried { kind, outcome, verified_bytes, shm_bytes: seen.shm_bytes(), causes })
    }

    /// Returns why the connection is on TCP.
    fn causes(&self, [port, own_port]: [u16; 2], site: &Site) -> Vec<Cause> {
        let mut causes: Vec<Cause> = Vec::new();
        if let Some(why) = &site.why_none {
            let mut none = Cause::from(Reason::NoBroker);
            none.explanation = format!("The programs had no broker: {why}.");
            return vec![none];
        }
        for (pid, ports) in [(self.pids[1], [own_port, port]), (self.pids[0], [port, own_port])] {
            for cause in explain::of_connection(pid, ports, site.broker.as_deref()) {
                // The client's explanation names the server's causes, too.
                if !causes.iter().any(|known| known.label == cause.label) {
                    causes.push(cause);
                }
            }
        }
        // `shunt run` knows best why it could not enter a program.
        if let Some(complaint) = self.client.complaint().or_else(|| self.server.complaint()) {
            match causes.first_mut() {
                Some(first) => first.explanation += &format!(" `shunt run` printed: {complaint}"),
                None => causes.push(cause(
                    "not_entered",
                    format!("`shunt run` printed: {complaint}"),
                    "Run `shunt doctor`.",
                )),
            }
        }
        causes
    }
}

/// Returns whether a cause keeps all connections of a process on TCP, such as a setting.
fn is_kept_out(pids: &[u32]) -> bool {
    // A program under a filter is not kept out if it registers later.
    let lasts = |cause: &Cause| cause.label != "seccomp";
    explain::processes(pids).iter().any(|process| process.causes.iter().any(lasts))
}

/// The broker's records of both ends, the server's first.
struct Ends([Option<Connection>; 2]);

impl Ends {
    fn outcome(&self) -> Outcome {
        let is_shm = |end: &Option<Connection>| match end {
            Some(end) => [end.send, end.receive].map(|direction| direction.transport == Transport::Shm),
            None => [false, false],
        };
        let all = self.0.each_ref().map(is_shm).concat();
        match all.iter().filter(|is_shm| **is_shm).count() {
            4 => Outcome::SharedMemory,
            0 => Outcome::Tcp,
            _ => Outcome::Mixed,
        }
    }

    /// Returns whether an end is on TCP for a reason that does not end by itself.
    fn are_settled(&self) -> bool {
        let directions = self.0.iter().flatten().flat_map(|end| [end.send, end.receive]);
        let mut on_tcp = directions.filter(|direction| direction.transport == Transport::Tcp);
        on_tcp.any(|direction| !PASSING.contains(&direction.reason))
    }

    /// Returns whether the broker does not know an end.
    fn is_incomplete(&self) -> bool {
        self.0.iter().any(Option::is_none)
    }

    /// Returns the bytes that both ends have sent through shared memory.
    fn shm_bytes(&self) -> u64 {
        self.0.iter().flatten().map(|end| end.send.shm_bytes).sum()
    }
}

/// Returns the record of a connection of a process with these ports: its own, and its peer's.
fn row(snapshot: &Snapshot, pid: u32, own: u16, peer: u16) -> Option<Connection> {
    let process = snapshot.processes.iter().find(|process| process.pid == pid)?;
    let is_it = |row: &&Connection| (row.local.port(), row.remote.port()) == (own, peer);
    process.connections.iter().find(is_it).cloned()
}

/// Returns whether the broker at a socket runs as root, as far as /proc shows it.
pub(super) fn is_roots(broker_pid: u32) -> bool {
    std::fs::metadata(format!("/proc/{broker_pid}")).is_ok_and(|process| process.uid() == 0)
}
