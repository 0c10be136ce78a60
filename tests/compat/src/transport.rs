//! Records which transport connections use, from `shunt status --json` while the programs run. The
//! status has connections and programs of the last minute that have ended, but only some of each
//! program. The host's totals keep all bytes. They are sufficient where no other connections existed.

use shunt_abi::reason::{Reason, Transport as Taken};
use shunt_abi::status::{Connection, Direction, Process, Snapshot, Totals};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The interval between two queries of the status.
const PERIOD: Duration = Duration::from_millis(50);
/// The maximum time until the broker has the totals of a process that has ended.
const COUNTED: Duration = Duration::from_secs(5);

/// A record of transports. On a native host it is empty, and every expectation is met.
#[derive(Debug)]
pub struct TransportWatch {
    watch: Option<Watch>,
}

#[derive(Debug)]
struct Watch {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<()>>,
}

/// The expected transport of the connections to one port.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// The server's port.
    pub port: u16,
    /// The number of connections that must have been attached in both directions, as seen at either
    /// end.
    pub connections: usize,
    /// The part of the bytes that must have passed through shared memory.
    ///
    /// Bytes before a connection was first seen there do not count, because that time depends on
    /// the machine. In addition, a third of this part must hold for all bytes. Alternatively, it
    /// must hold for all bytes by the totals.
    pub share: f64,
}

/// One end of a connection, by process and cookie.
type End = (u32, u64);

#[derive(Debug, Default)]
struct Seen {
    snapshots: usize,
    ends: HashMap<End, EndSeen>,
    last: Snapshot,
    /// The totals before the recording began.
    before: Totals,
    /// Ends that had ended before.
    earlier: HashSet<End>,
    bypasses: BTreeMap<String, BTreeMap<String, u64>>,
}

#[derive(Debug)]
struct EndSeen {
    program: String,
    last: Connection,
    /// Bytes sent over TCP before both directions were first seen on shared memory.
    tcp_before: Option<u64>,
}

/// Returns the current status, if the broker answers.
pub(crate) fn snapshot(command: &mut Command) -> Option<Snapshot> {
    let output = command.output().ok()?;
    serde_json::from_slice(&output.stdout).ok()
}

impl TransportWatch {
    pub(crate) fn watch(status: Option<Command>) -> TransportWatch {
        let watch = status.map(|mut command| {
            let stop = Arc::new(AtomicBool::new(false));
            let before = snapshot(&mut command).unwrap_or_default();
            let seen = Arc::new(Mutex::new(Seen::since(before)));
            let (stop_too, seen_too) = (stop.clone(), seen.clone());
            let thread = std::thread::spawn(move || {
                while !stop_too.load(Relaxed) {
                    if let Some(snapshot) = snapshot(&mut command) {
                        seen_too.lock().expect("no holder panics").add(snapshot);
                    }
                    std::thread::sleep(PERIOD);
                }
            });
            Watch { stop, seen, thread: Some(thread) }
        });
        TransportWatch { watch }
    }

    /// Returns `true` if transports are recorded.
    pub fn is_watched(&self) -> bool {
        self.watch.is_some()
    }

    /// Returns the number of connections to `port` that were seen with both directions on shared
    /// memory.
    pub fn on_shm(&self, port: u16) -> usize {
        let Some(watch) = &self.watch else { return 0 };
        watch.seen.lock().expect("no holder panics").tally(port).on_shm()
    }

    /// Waits until `connections` connections to `port` have been on shared memory. Returns
    /// immediately on a native host.
    pub fn wait_for_shm(&self, port: u16, connections: usize, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.is_watched() && self.on_shm(port) < connections {
            assert!(
                Instant::now() < deadline,
                "{} of {connections} connections to port {port} came onto shared memory within {limit:?}\n{}",
                self.on_shm(port),
                self.report(port)
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Panics with a report unless the connections used the expected transport. Does nothing on a
    /// native host.
    pub fn expect(&self, expected: Expected) {
        self.wait_for(expected, COUNTED);
    }

    /// Waits until connections of running programs have used the expected transport, for at most
    /// `limit`. How many bytes use TCP before depends on the load of the machine.
    pub fn wait_for(&self, expected: Expected, limit: Duration) {
        let Some(watch) = &self.watch else { return };
        let deadline = Instant::now() + limit;
        let took = || watch.seen.lock().expect("no holder panics").took(expected);
        while !took() {
            assert!(
                Instant::now() < deadline,
                "the connections did not take the transport within {limit:?}: {expected:?}\n{}",
                self.report(expected.port)
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the number of invalid messages that the broker has counted.
    pub fn bad_messages(&self) -> u64 {
        let Some(watch) = &self.watch else { return 0 };
        watch.seen.lock().expect("no holder panics").last.bad_messages.values().sum()
    }

    /// Returns a report of the connections to `port`, with the reasons of those on TCP.
    pub fn report(&self, port: u16) -> String {
        match &self.watch {
            Some(watch) => watch.seen.lock().expect("no holder panics").report(port),
            None => String::from("native: no transport was watched"),
        }
    }
}

impl Drop for TransportWatch {
    fn drop(&mut self) {
        if let Some(watch) = &mut self.watch {
            watch.stop.store(true, Relaxed);
            if let Some(thread) = watch.thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// Sums over the ends of the connections to one port.
#[derive(Debug, Default)]
struct Tally {
    client_ends: usize,
    server_ends: usize,
    client_on_shm: usize,
    server_on_shm: usize,
    shm_bytes: u64,
    tcp_bytes: u64,
    tcp_before: u64,
    reasons: BTreeMap<(String, &'static str, &'static str), usize>,
}

impl Tally {
    /// Returns the number of connections on shared memory. Both ends report a connection; one is
    /// enough, because only one may have been seen.
    fn on_shm(&self) -> usize {
        self.client_on_shm.max(self.server_on_shm)
    }

    /// Returns `true` if the sums match the expectation; see [`Expected`].
    fn is_as(&self, expected: Expected) -> bool {
        self.on_shm() >= expected.connections
            && self.share(self.tcp_before) >= expected.share
            && self.share(0) >= expected.share / 3.0
    }

    /// Returns the part of shared memory among all bytes but the first `without` bytes of TCP.
    fn share(&self, without: u64) -> f64 {
        let (shm, tcp) = (self.shm_bytes as f64, self.tcp_bytes.saturating_sub(without) as f64);
        shm / (shm + tcp).max(1.0)
    }
}

/// Returns the ends of a process that are over, with their last state.
fn over(process: &Process) -> impl Iterator<Item = &Connection> {
    let with_it = process.ended_seconds_ago.map_or(&[][..], |_| &process.connections);
    with_it.iter().chain(&process.ended_connections)
}

impl Seen {
    fn since(before: Snapshot) -> Seen {
        let processes = before.processes.iter().chain(&before.ended_processes);
        let ends = |process| over(process).map(|connection| (process.pid, connection.cookie));
        Seen { earlier: processes.flat_map(ends).collect(), before: before.totals, ..Seen::default() }
    }

    fn add(&mut self, snapshot: Snapshot) {
        self.snapshots += 1;
        for process in snapshot.processes.iter().chain(&snapshot.ended_processes) {
            let of_it = |connection: &Connection| (process.pid, connection.cookie);
            let ended = over(process).filter(|connection| !self.earlier.contains(&of_it(connection)));
            let connections: Vec<_> = match process.ended_seconds_ago {
                None => process.connections.iter().chain(ended).collect(),
                Some(_) => ended.collect(),
            };
            for connection in connections {
                // A direction without a byte since the pairing is idle: its next byte is on the
                // lane.
                let directions = [connection.send, connection.receive];
                let ready = |one: &Direction| one.transport == Taken::Shm || one.reason == Reason::Idle;
                let on_shm =
                    directions.iter().all(ready) && directions.iter().any(|one| one.transport == Taken::Shm);
                let end = self.ends.entry(of_it(connection)).or_insert_with(|| EndSeen {
                    program: process.program.clone(),
                    last: connection.clone(),
                    tcp_before: None,
                });
                end.last = connection.clone();
                if on_shm && end.tcp_before.is_none() {
                    end.tcp_before =
                        Some(directions.iter().fold(0, |sum, one| sum.saturating_add(one.tcp_bytes)));
                }
            }
            let name = format!("{} {}", process.program, process.pid);
            self.bypasses.insert(name, process.totals.bypasses.clone());
        }
        self.last = snapshot;
    }

    /// Returns `true` if either the observations or the totals match.
    fn took(&self, expected: Expected) -> bool {
        self.tally(expected.port).is_as(expected) || self.counted_as(expected)
    }

    /// Returns `true` if the host's totals match, and no connection went to another port.
    fn counted_as(&self, expected: Expected) -> bool {
        let is_to =
            |end: &EndSeen| [end.last.local, end.last.remote].iter().any(|at| at.port() == expected.port);
        let (ends, shm, tcp) = self.counted();
        self.ends.values().all(is_to)
            && ends >= 2 * expected.connections as u64
            && shm as f64 >= expected.share * (shm + tcp) as f64
    }

    /// Returns totals since the recording began: attached ends, bytes on shared memory, and bytes
    /// on TCP.
    fn counted(&self) -> (u64, u64, u64) {
        let of =
            |totals: &Totals| (totals.share.on_shm, totals.bytes.shm, totals.bytes.tcp.values().sum::<u64>());
        let ((ends, shm, tcp), before) = (of(&self.last.totals), of(&self.before));
        (ends.saturating_sub(before.0), shm.saturating_sub(before.1), tcp.saturating_sub(before.2))
    }

    fn tally(&self, port: u16) -> Tally {
        let mut tally = Tally::default();
        for end in self.ends.values() {
            let client = end.last.remote.port() == port;
            if !client && end.last.local.port() != port {
                continue;
            }
            // A short connection may have been attached between two snapshots.
            let moved_both_ways = end.last.send.shm_bytes > 0 && end.last.receive.shm_bytes > 0;
            let on_shm = usize::from(end.tcp_before.is_some() || moved_both_ways);
            tally.tcp_before = tally.tcp_before.saturating_add(end.tcp_before.unwrap_or(0));
            if client {
                tally.client_ends += 1;
                tally.client_on_shm += on_shm;
            } else {
                tally.server_ends += 1;
                tally.server_on_shm += on_shm;
            }
            for (name, direction) in [("send", end.last.send), ("receive", end.last.receive)] {
                tally.shm_bytes = tally.shm_bytes.saturating_add(direction.shm_bytes);
                tally.tcp_bytes = tally.tcp_bytes.saturating_add(direction.tcp_bytes);
                if direction.reason != Reason::None {
                    let key = (end.program.clone(), name, direction.reason.label());
                    *tally.reasons.entry(key).or_default() += 1;
                }
            }
        }
        tally
    }

    fn report(&self, port: u16) -> String {
        let tally = self.tally(port);
        let mut text = format!(
            "port {port}, {} snapshots: {} of {} client ends and {} of {} server ends were on shared memory; \
             {} bytes by shared memory, {} by TCP\n",
            self.snapshots,
            tally.client_on_shm,
            tally.client_ends,
            tally.server_on_shm,
            tally.server_ends,
            tally.shm_bytes,
            tally.tcp_bytes
        );
        let (ends, shm, tcp) = self.counted();
        text.push_str(&format!(
            "  {:.3} of the bytes, {:.3} since the pairing; counted on this host, to all ports: {ends} ends on shared memory, \
             {shm} bytes by it and {tcp} by TCP\n",
            tally.share(0),
            tally.share(tally.tcp_before)
        ));
        for ((program, direction, reason), count) in &tally.reasons {
            text.push_str(&format!("  {program}: {direction} on TCP because {reason}: {count} ends\n"));
        }
        text.push_str(&format!(
            "  broker: {} links, {} pairs made, refused {:?}, bad messages {:?}\n",
            self.last.links, self.last.pairs_made, self.last.offers_refused, self.last.bad_messages
        ));
        for (process, bypasses) in self.bypasses.iter().filter(|(_, bypasses)| !bypasses.is_empty()).take(12)
        {
            text.push_str(&format!("  {process} bypassed: {bypasses:?}\n"));
        }
        text
    }
}
