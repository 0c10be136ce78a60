//! Runs turns of a server and a client that speak the protocol of the synthetic loads.

use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use shunt_abi::reason::{Reason, Transport};
use shunt_abi::status::Snapshot;

use super::point::Sample;
use crate::process::Process;
use crate::side::Side;
use crate::stage::{Placement, Stage};
use crate::worker::Measured;

/// The line that starts a counted measurement. Its text has no meaning.
const GO: &str = "go";

/// Returns the address that a server of this side gets.
pub(super) fn listen_at(stage: &Stage, side: Side, placement: Placement) -> Result<String> {
    if !side.is_unix() {
        return Ok(format!("{}:0", stage.host(placement)?));
    }
    let socket = stage.path("bench.sock");
    let _ = std::fs::remove_file(&socket);
    Ok(socket.display().to_string())
}

/// Starts the server, and then the client that `client` creates for its address. Returns the
/// results.
pub(super) fn run(
    stage: &Stage,
    side: Side,
    server: &mut Command,
    client: impl FnOnce(&str) -> Result<Command>,
    seconds: Duration,
) -> Result<Sample> {
    let (server, address) = Process::serving(server, "the server")?;
    let turn = Turn { stage, side, seconds, is_counted: false, beside: None };
    let sample = turn.run(&server, &address, &mut client(&address)?)?;
    server.finish()?;
    Ok(sample)
}

/// A turn with a running server.
pub(super) struct Turn<'a> {
    pub(super) stage: &'a Stage,
    pub(super) side: Side,
    /// Its approximate length.
    pub(super) seconds: Duration,
    /// True if the client makes a fixed number of operations, and waits for a line before them.
    pub(super) is_counted: bool,
    /// Competing threads, whose processor time is measured too.
    pub(super) beside: Option<&'a Process>,
}

impl Turn<'_> {
    /// Runs the client and returns the results.
    pub(super) fn run(&self, server: &Process, address: &str, client: &mut Command) -> Result<Sample> {
        let mut client = Process::begun(client, "the client")?;
        let cpu = |client: &Process| {
            [Some(server), Some(client), self.beside]
                .map(|process| process.map_or(Duration::ZERO, Process::cpu))
        };
        let before = cpu(&client);
        if self.is_counted {
            client.tell(GO)?;
        }
        let measured: Measured = client.results(self.seconds)?;
        let after = cpu(&client);
        let [server_cpu, client_cpu, beside] =
            [0, 1, 2].map(|which| after[which].saturating_sub(before[which]));
        let mut sample = Sample::of(&measured, server_cpu, client_cpu);
        sample.beside = self.beside.map(|_| beside.as_secs_f64() / measured.seconds);
        if self.side.is_under_shunt() {
            sample.look(&self.stage.status()?, address);
            sample.link_bytes = server.link_bytes() + client.link_bytes();
        }
        client.finish()?;
        Ok(sample)
    }
}

impl Sample {
    pub(super) fn of(measured: &Measured, server_cpu: Duration, client_cpu: Duration) -> Sample {
        Sample {
            rate: measured.rate(),
            p50_us: measured.p50_us,
            p99_us: measured.p99_us,
            server_us: measured.each(server_cpu),
            client_us: measured.each(client_cpu),
            ..Sample::default()
        }
    }

    /// Corrects the count of connections on shared memory. Half-way through, when they are counted,
    /// a load may be over, or its connections may not be attached yet. The pairs that the broker
    /// made in the whole turn are counted then.
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

    /// Counts the transports of the connections of the server at `address`.
    pub(super) fn look(&mut self, snapshot: &Snapshot, address: &str) {
        (self.connections, self.on_shm) = (0, 0);
        self.reasons.clear();
        let all = snapshot.processes.iter().flat_map(|process| &process.connections);
        for connection in all.filter(|connection| connection.local.to_string() == address) {
            let directions = [connection.send, connection.receive];
            self.connections += 1;
            self.on_shm +=
                usize::from(directions.iter().all(|direction| direction.transport == Transport::Shm));
            for direction in directions.iter().filter(|direction| direction.transport == Transport::Tcp) {
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
