//! The output of `shunt status --json`: the broker's snapshot of every process and connection.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::latency::Latency;
use crate::reason::{Reason, Transport};

/// The broker's state at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Version of the protocol.
    pub version: u16,
    /// Process id of the broker.
    pub broker_pid: u32,
    /// Seconds since the broker started.
    pub uptime_seconds: u64,
    /// The time at which the broker started, in seconds since 1970. Its counts begin then.
    #[serde(default)]
    pub started_at: u64,
    /// Whether the following counts cover all programs. Otherwise they cover only connected
    /// programs of the user of the request.
    pub of_all: bool,
    /// Links in use that this broker has made.
    pub links: usize,
    /// Connection ends on shared memory, among those of `processes`, that an earlier broker has
    /// paired. Their links are not counted: this broker does not know how many they are.
    #[serde(default)]
    pub earlier_ends: usize,
    /// Pairs made since the start.
    pub pairs_made: u64,
    /// Offers refused since the start, by reason.
    pub offers_refused: BTreeMap<String, u64>,
    /// Pairs that the broker has ended since the start, because a changed policy forbids them, by
    /// reason.
    #[serde(default)]
    pub pairs_ended: BTreeMap<String, u64>,
    /// Counts since the start, including connections and processes that have ended.
    #[serde(flatten)]
    pub totals: Totals,
    /// Messages refused since the start, by the error.
    pub bad_messages: BTreeMap<String, u64>,
    /// Processes that are registered and alive.
    pub processes: Vec<Process>,
    /// Processes that have ended in the last minute, the last one first, as far as there was room.
    #[serde(default)]
    pub ended_processes: Vec<Process>,
}

/// Counts of programs since they began. A hostile program may report any values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Connection ends, including closed ones.
    pub share: Share,
    /// Bytes that the programs have moved.
    pub bytes: Moved,
    /// The counters, by name: see [`crate::page::Counter`].
    pub counters: BTreeMap<String, u64>,
    /// Number of occurrences of each bypass reason.
    pub bypasses: BTreeMap<String, u64>,
    /// Latencies that were measured while someone asked: see [`crate::latency`].
    #[serde(skip_serializing_if = "Latency::is_unknown")]
    pub latency: Latency,
}

impl std::ops::AddAssign<&Totals> for Totals {
    fn add_assign(&mut self, other: &Totals) {
        self.share += other.share;
        self.bytes += &other.bytes;
        add(&mut self.counters, &other.counters);
        add(&mut self.bypasses, &other.bypasses);
        self.latency += &other.latency;
    }
}

fn add(sums: &mut BTreeMap<String, u64>, counts: &BTreeMap<String, u64>) {
    for (name, count) in counts {
        let sum = sums.entry(name.clone()).or_default();
        *sum = sum.saturating_add(*count);
    }
}

/// How many of the used connection ends took shared memory. An end whose process is not under shunt
/// is not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Ends that were used at least once.
    pub seen: u64,
    /// Offered to the broker.
    pub offered: u64,
    /// Ends that were on shared memory for any time.
    pub on_shm: u64,
}

impl std::ops::AddAssign for Share {
    /// Saturates: the counts of processes may be any values.
    fn add_assign(&mut self, other: Share) {
        self.seen = self.seen.saturating_add(other.seen);
        self.offered = self.offered.saturating_add(other.offered);
        self.on_shm = self.on_shm.saturating_add(other.on_shm);
    }
}

/// Bytes that connection ends have moved, sent and received. A byte between two programs under
/// shunt is counted by both. If a process continues a connection that its parent has used, each of
/// them counts it from its beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Bytes through shared memory.
    pub shm: u64,
    /// Bytes by TCP, by the reason at that time: `none` before the first check of the connection,
    /// and while it is about to switch.
    pub tcp: BTreeMap<String, u64>,
}

impl std::ops::AddAssign<&Moved> for Moved {
    /// Saturates: the counts of processes may be any values.
    fn add_assign(&mut self, other: &Moved) {
        self.shm = self.shm.saturating_add(other.shm);
        add(&mut self.tcp, &other.tcp);
    }
}

/// One process under shunt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Process id, as the kernel reported it to the broker.
    pub pid: u32,
    /// User id, as the kernel reported it to the broker.
    pub uid: u32,
    /// The program's name.
    pub program: String,
    /// Counts since the process began.
    #[serde(flatten)]
    pub totals: Totals,
    /// Its connections.
    pub connections: Vec<Connection>,
    /// Connections that have ended in the last minute, as far as there was room.
    #[serde(default)]
    pub ended_connections: Vec<Connection>,
    /// Number of connections that there was no room for.
    pub left_out: usize,
    /// How many seconds ago it ended, if it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_seconds_ago: Option<u64>,
}

/// One end of one connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    /// SO_COOKIE of the socket.
    pub cookie: u64,
    /// The descriptor under which the shim first saw it.
    pub fd: i32,
    /// Its own address.
    pub local: SocketAddr,
    /// Its peer's address.
    pub remote: SocketAddr,
    /// The direction in which it sends.
    pub send: Direction,
    /// The direction in which it receives.
    pub receive: Direction,
    /// The socket option that keeps it on TCP, if one does.
    pub option: Option<String>,
    /// Whether this end called connect. Only such an end measures latencies.
    #[serde(default)]
    pub connected: bool,
    /// The latencies that this end has measured while someone asked. None are counted if it is not
    /// known, because no one has asked or no answer has come.
    #[serde(default, skip_serializing_if = "Latency::is_unknown")]
    pub latency: Latency,
    /// How many seconds ago it ended, if it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_seconds_ago: Option<u64>,
}

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Direction {
    /// The current transport.
    #[serde(alias = "road")]
    pub transport: Transport,
    /// The reason why it is on TCP; `none` on shared memory.
    pub reason: Reason,
    /// Bytes that went by TCP.
    pub tcp_bytes: u64,
    /// Bytes that went through shared memory.
    pub shm_bytes: u64,
}
