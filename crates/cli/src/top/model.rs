//! Computes rates from two successive snapshots.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use shunt_abi::latency::Latency;
use shunt_abi::page::Counter;
use shunt_abi::reason::Transport;
use shunt_abi::status::{Connection, Process, Snapshot, Totals};

/// One snapshot with its rates, as `--json` prints it.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Look {
    pub(super) broker_pid: u32,
    pub(super) uptime_seconds: u64,
    /// The seconds that the rates cover. 0 if there is no earlier snapshot.
    pub(super) seconds: f64,
    pub(super) links: usize,
    /// Whether there are links of an earlier broker, which are not counted.
    pub(super) has_earlier_links: bool,
    pub(super) rates: Rates,
    pub(super) programs: Vec<Program>,
    pub(super) connections: Vec<End>,
}

/// Rates per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Rates {
    /// Bytes through shared memory, sent and received.
    pub(super) shm: f64,
    /// Bytes through TCP.
    pub(super) tcp: f64,
    pub(super) sleeps: f64,
    pub(super) wake_ups: f64,
    /// Seconds of spinning per second: 1 is one processor.
    pub(super) spin: f64,
}

/// One program, with the number of its connection ends on each transport.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Program {
    pub(super) program: String,
    pub(super) pid: u32,
    pub(super) uid: u32,
    pub(super) on_shm: usize,
    /// Connection ends whose two directions use different transports.
    pub(super) half: usize,
    pub(super) on_tcp: usize,
    pub(super) rates: Rates,
    /// What the snapshot has counted of it.
    #[serde(skip)]
    pub(super) totals: Totals,
}

impl Program {
    /// Returns the number of its connection ends.
    pub(super) fn ends(&self) -> usize {
        self.on_shm + self.half + self.on_tcp
    }
}

/// One end of a connection.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct End {
    pub(super) program: String,
    pub(super) pid: u32,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) send: Transport,
    pub(super) receive: Transport,
    /// Why it is on TCP, if it is.
    pub(super) why: String,
    pub(super) shm: f64,
    pub(super) tcp: f64,
    /// The latencies since the snapshot before, if this end has measured any.
    #[serde(skip_serializing_if = "Latency::is_unknown")]
    pub(super) latency: Latency,
    /// The user that its program runs as.
    #[serde(skip)]
    pub(super) uid: u32,
    /// What the snapshot has of it.
    #[serde(skip)]
    pub(super) row: Connection,
}

impl End {
    /// Returns all bytes a second.
    pub(super) fn rate(&self) -> f64 {
        self.shm + self.tcp
    }
}

/// Returns `now` with the rates since `before`, which is as old as its duration says. Programs that
/// `before` lacks have rates of zero.
pub(super) fn look(before: Option<(&Snapshot, Duration)>, now: &Snapshot) -> Look {
    let seconds = before.map_or(0.0, |(_, ago)| ago.as_secs_f64());
    let old: HashMap<(u32, &str), &Process> = before
        .iter()
        .flat_map(|(snapshot, _)| &snapshot.processes)
        .map(|process| ((process.pid, process.program.as_str()), process))
        .collect();
    let mut look = Look {
        broker_pid: now.broker_pid,
        uptime_seconds: now.uptime_seconds,
        seconds,
        links: now.links,
        has_earlier_links: now.earlier_ends > 0,
        rates: before.map_or_else(Rates::default, |(then, _)| rates(&then.totals, &now.totals, seconds)),
        ..Look::default()
    };
    for process in &now.processes {
        let old = old.get(&(process.pid, process.program.as_str())).copied();
        look.programs.push(program(old, process, seconds));
        let ends: HashMap<(u64, i32), &Connection> =
            old.iter().flat_map(|old| &old.connections).map(|end| ((end.cookie, end.fd), end)).collect();
        let end = |now| end(process, ends.get(&key(now)).copied(), now, seconds);
        look.connections.extend(process.connections.iter().map(end));
    }
    look
}

fn key(end: &Connection) -> (u64, i32) {
    (end.cookie, end.fd)
}

fn program(old: Option<&Process>, now: &Process, seconds: f64) -> Program {
    let on = |transport| {
        now.connections
            .iter()
            .filter(|end| end.send.transport == transport && end.receive.transport == transport)
            .count()
    };
    let (on_shm, on_tcp) = (on(Transport::Shm), on(Transport::Tcp));
    Program {
        program: now.program.clone(),
        pid: now.pid,
        uid: now.uid,
        on_shm,
        half: now.connections.len() - on_shm - on_tcp,
        on_tcp,
        rates: old.map_or_else(Rates::default, |old| rates(&old.totals, &now.totals, seconds)),
        totals: now.totals.clone(),
    }
}

fn end(process: &Process, old: Option<&Connection>, now: &Connection, seconds: f64) -> End {
    let shm = |end: &Connection| end.send.shm_bytes.saturating_add(end.receive.shm_bytes);
    let tcp = |end: &Connection| end.send.tcp_bytes.saturating_add(end.receive.tcp_bytes);
    let since = |of: fn(&Connection) -> u64| old.map_or(0.0, |old| rate(of(old), of(now), seconds));
    End {
        program: process.program.clone(),
        pid: process.pid,
        local: now.local,
        remote: now.remote,
        send: now.send.transport,
        receive: now.receive.transport,
        why: crate::status::why(now),
        shm: since(shm),
        tcp: since(tcp),
        latency: old.map_or_else(Latency::default, |old| now.latency.since(&old.latency)),
        uid: process.uid,
        row: now.clone(),
    }
}

fn rates(old: &Totals, now: &Totals, seconds: f64) -> Rates {
    let tcp =
        |totals: &Totals| totals.bytes.tcp.values().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
    let counted = |counter: Counter| {
        let (_, name) = Counter::NAMES.iter().find(|(one, _)| *one == counter).expect("each has a name");
        let of = |totals: &Totals| totals.counters.get(*name).copied().unwrap_or(0);
        rate(of(old), of(now), seconds)
    };
    Rates {
        shm: rate(old.bytes.shm, now.bytes.shm, seconds),
        tcp: rate(tcp(old), tcp(now), seconds),
        sleeps: counted(Counter::Sleeps),
        wake_ups: counted(Counter::DoorbellsRung),
        spin: counted(Counter::SpinNanos) / 1e9,
    }
}

/// Returns a rate. A counter that has decreased gives zero.
fn rate(old: u64, now: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { now.saturating_sub(old) as f64 / seconds } else { 0.0 }
}
