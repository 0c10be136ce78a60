//! A server and a client that speak the protocol of our loads, one turn of them.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use shunt_abi::reason::{Reason, Road};
use shunt_abi::status::Snapshot;

use super::point::Sample;
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Stage};
use crate::worker::{BEGIN, Measured, READY};

/// How long a program may take to be ready, or to say what it measured after its time is over.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// Any line would do.
const GO: &str = "go";

/// Where a server of the side is told to listen.
pub(super) fn listen_at(stage: &Stage, side: Side, placement: Placement) -> Result<String> {
    if side != Side::Unix {
        return Ok(format!("{}:0", stage.host(placement)?));
    }
    let socket = stage.path("bench.sock");
    remove(&socket);
    Ok(socket.display().to_string())
}

fn remove(socket: &Path) {
    let _ = std::fs::remove_file(socket);
}

/// Starts the server, then the client that `client` makes for the server's address, and waits for what it measured.
pub(super) fn run(
    stage: &Stage,
    side: Side,
    server: &mut Command,
    client: impl FnOnce(&str) -> Result<Command>,
    seconds: Duration,
) -> Result<Sample> {
    let (server, address) = serve(server)?;
    let turn = Turn { stage, side, seconds, is_counted: false, beside: None };
    let sample = turn.run(&server, &address, &mut client(&address)?)?;
    server.finish()?;
    Ok(sample)
}

/// A server that runs, and where it listens.
pub(super) fn serve(server: &mut Command) -> Result<(Process, String)> {
    let mut server = Process::spawn_with_lines(server, "the server")?;
    let address = server.expect(READY, LIMIT)?;
    Ok((server, address))
}

/// See the module.
pub(super) struct Turn<'a> {
    pub(super) stage: &'a Stage,
    pub(super) side: Side,
    /// About how long it takes.
    pub(super) seconds: Duration,
    /// Whether the client makes a number of operations, and waits for a word before them.
    pub(super) is_counted: bool,
    /// Whose processor time is of interest as well.
    pub(super) beside: Option<&'a Process>,
}

impl Turn<'_> {
    /// Starts the client, and waits for what it measured and for its end.
    pub(super) fn run(&self, server: &Process, address: &str, client: &mut Command) -> Result<Sample> {
        let mut client = Process::spawn_with_lines(client, "the client")?;
        client.expect(BEGIN, LIMIT)?;
        let cpu = |client: &Process| {
            [Some(server), Some(client), self.beside]
                .map(|process| process.map_or(Duration::ZERO, Process::cpu))
        };
        let before = cpu(&client);
        if self.is_counted {
            client.tell(GO)?;
        }
        let line = client.line(self.seconds + LIMIT)?;
        let after = cpu(&client);
        let [server_cpu, client_cpu, beside] =
            [0, 1, 2].map(|which| after[which].saturating_sub(before[which]));
        let measured: Measured =
            serde_json::from_str(&line).with_context(|| format!("the client said {line:?}"))?;
        let mut sample = Sample::of(&measured, server_cpu, client_cpu);
        sample.beside = self.beside.map(|_| beside.as_secs_f64() / measured.seconds);
        if self.side.is_short_road() {
            sample.look(&self.stage.status()?, address);
            sample.link_bytes = server.link_bytes() + client.link_bytes();
        }
        client.finish()?;
        Ok(sample)
    }
}

impl Sample {
    pub(super) fn of(measured: &Measured, server_cpu: Duration, client_cpu: Duration) -> Sample {
        let each = |cpu: Duration| cpu.as_secs_f64() * 1e6 / measured.operations.max(1) as f64;
        Sample {
            rate: measured.operations as f64 / measured.seconds,
            p50_us: measured.p50_us,
            p99_us: measured.p99_us,
            server_us: each(server_cpu),
            client_us: each(client_cpu),
            ..Sample::default()
        }
    }

    /// Half-way, when its connections are looked at, a load may be over, or its connections still be on their way: then so many
    /// are on shared memory as were paired in the whole turn.
    pub(super) fn count(&mut self, pairs: u64) {
        let on_their_way =
            [Reason::None, Reason::TooFewOperations, Reason::PeerNotOffered].map(Reason::label);
        if self.connections == 0 {
            self.link_bytes = 0;
        }
        if self.reasons.keys().all(|reason| on_their_way.contains(reason)) {
            self.on_shm = self.on_shm.max(pairs as usize);
            self.connections = self.connections.max(self.on_shm);
            if self.on_shm == self.connections {
                self.reasons.clear();
            }
        }
        self.is_unseen = self.connections == 0;
    }

    /// Which roads the connections of the server at `address` take.
    pub(super) fn look(&mut self, snapshot: &Snapshot, address: &str) {
        (self.connections, self.on_shm) = (0, 0);
        self.reasons.clear();
        let all = snapshot.processes.iter().flat_map(|process| &process.connections);
        for connection in all.filter(|connection| connection.local.to_string() == address) {
            let directions = [connection.send, connection.receive];
            self.connections += 1;
            self.on_shm += usize::from(directions.iter().all(|direction| direction.road == Road::Shm));
            for direction in directions.iter().filter(|direction| direction.road == Road::Tcp) {
                *self.reasons.entry(direction.reason.label()).or_default() += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(
        on_shm: usize,
        connections: usize,
        reason: Option<Reason>,
        pairs: u64,
    ) -> (usize, usize, bool) {
        let reasons = reason.into_iter().map(|reason| (reason.label(), connections - on_shm)).collect();
        let mut sample = Sample { on_shm, connections, reasons, ..Sample::default() };
        sample.count(pairs);
        (sample.on_shm, sample.connections, sample.is_unseen)
    }

    #[test]
    fn what_was_not_seen_is_counted() {
        assert_eq!(counted(0, 0, None, 50), (50, 50, false), "it was over");
        assert_eq!(counted(0, 0, None, 0), (0, 0, true));
        assert_eq!(counted(3, 50, Some(Reason::PeerNotOffered), 50), (50, 50, false), "on their way");
        assert_eq!(counted(0, 50, Some(Reason::PeerNotOffered), 0), (0, 50, false), "and never there");
        assert_eq!(counted(40, 50, Some(Reason::Fork), 50), (40, 50, false), "they have been there");
    }
}
