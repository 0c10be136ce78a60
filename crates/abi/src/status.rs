//! What `shunt status --json` prints: the broker's snapshot of every process and connection.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::reason::{Reason, Road};

/// Everything the broker knows at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Version of the protocol.
    pub version: u16,
    /// Process id of the broker.
    pub broker_pid: u32,
    /// Seconds since the broker started.
    pub uptime_seconds: u64,
    /// The counts that follow are of everything; else only of what the asker's own programs have done, as far as they are
    /// connected.
    pub of_all: bool,
    /// Links in use.
    pub links: usize,
    /// Pairs made since the start.
    pub pairs_made: u64,
    /// Offers refused since the start, by reason.
    pub offers_refused: BTreeMap<String, u64>,
    /// Since the start, also of connections and processes that have ended.
    #[serde(flatten)]
    pub totals: Totals,
    /// Messages refused since the start, by what was wrong with them.
    pub bad_messages: BTreeMap<String, u64>,
    /// Processes that said hello and are alive.
    pub processes: Vec<Process>,
}

/// What programs have counted since they began. They may have counted anything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Totals {
    /// Connection ends, also those that are closed.
    pub share: Share,
    /// Bytes that they have moved.
    pub bytes: Moved,
    /// The counters, by name: see [`crate::page::Counter`].
    pub counters: BTreeMap<String, u64>,
    /// How often each bypass reason was met.
    pub bypasses: BTreeMap<String, u64>,
}

impl std::ops::AddAssign<&Totals> for Totals {
    fn add_assign(&mut self, other: &Totals) {
        self.share += other.share;
        self.bytes += &other.bytes;
        add(&mut self.counters, &other.counters);
        add(&mut self.bypasses, &other.bypasses);
    }
}

fn add(sums: &mut BTreeMap<String, u64>, counts: &BTreeMap<String, u64>) {
    for (name, count) in counts {
        let sum = sums.entry(name.clone()).or_default();
        *sum = sum.saturating_add(*count);
    }
}

/// How many of the connection ends that have been used took shared memory. An end whose process is not under shunt is in
/// none of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Used, be it once.
    pub seen: u64,
    /// Offered to the broker.
    pub offered: u64,
    /// On shared memory, be it for a while.
    pub on_shm: u64,
}

impl std::ops::AddAssign for Share {
    /// What processes have counted may be anything.
    fn add_assign(&mut self, other: Share) {
        self.seen = self.seen.saturating_add(other.seen);
        self.offered = self.offered.saturating_add(other.offered);
        self.on_shm = self.on_shm.saturating_add(other.on_shm);
    }
}

/// Bytes that connection ends have moved, sent and received: what goes between two programs under shunt is counted by both.
/// A connection that a process goes on with after its parent has used it is counted from its beginning by each of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Through shared memory.
    pub shm: u64,
    /// By TCP, by the reason that stood while they went: `none` until it was first looked at, or about to switch.
    pub tcp: BTreeMap<String, u64>,
}

impl std::ops::AddAssign<&Moved> for Moved {
    /// What processes have counted may be anything.
    fn add_assign(&mut self, other: &Moved) {
        self.shm = self.shm.saturating_add(other.shm);
        add(&mut self.tcp, &other.tcp);
    }
}

/// One process under shunt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Process id, as the kernel told the broker.
    pub pid: u32,
    /// User id, as the kernel told the broker.
    pub uid: u32,
    /// The program's name.
    pub program: String,
    /// Since it began.
    #[serde(flatten)]
    pub totals: Totals,
    /// Its connections.
    pub connections: Vec<Connection>,
    /// Connections that there was no room for.
    pub left_out: usize,
}

/// One end of one connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    /// SO_COOKIE of the socket.
    pub cookie: u64,
    /// The descriptor it was first seen under.
    pub fd: i32,
    /// Its own address.
    pub local: SocketAddr,
    /// Its peer's address.
    pub remote: SocketAddr,
    /// What it sends.
    pub send: Direction,
    /// What it receives.
    pub receive: Direction,
    /// The socket option that keeps it on TCP, if one does.
    pub option: Option<String>,
}

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Direction {
    /// The road it takes now.
    pub road: Road,
    /// Why it is on TCP; `none` on shared memory.
    pub reason: Reason,
    /// Bytes that went by TCP.
    pub tcp_bytes: u64,
    /// Bytes that went through shared memory.
    pub shm_bytes: u64,
}
