//! `shunt status`: the snapshot of the broker's state, and the blocking client that requests it.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::getuid;
use shunt_abi::VERSION;
use shunt_abi::control::{
    DecodeError, Latency as AskLatency, Reply, Request, STATUS_PART, Status, StatusReply,
};
use shunt_abi::latency::Latency;
use shunt_abi::option::SocketOption;
use shunt_abi::page::{CONNECTED, Counter, Entry, EntryCopy, Page};
use shunt_abi::reason::{Reason, Transport};
use shunt_abi::status::{Connection, Direction, Moved, Process, Snapshot, Totals};
use shunt_sys::clock::now;
use shunt_sys::mapping::backed_pages;
use shunt_sys::{Errno, identity, seqpacket};
use thiserror::Error;

use crate::ended_processes::{self, Ended};
use crate::latency_wishes;
use crate::outbox::Outbox;
use crate::pairing::ProcessId;
use crate::principal::{Budget, Charge, Principal};
use crate::state::{self, BadMessage, State, Tally};

/// How long the client waits for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Delay between two attempts to connect.
const RETRY: Duration = Duration::from_millis(5);
/// Maximum number of bytes of JSON that the client accepts.
const MAX_JSON: u64 = 1 << 30;

/// Why no status could be obtained.
#[derive(Debug, Error)]
pub enum StatusError {
    /// No broker listens at the path.
    #[error("no broker at {path}: {source}; start one with `shunt daemon`")]
    NoBroker {
        /// The path that was tried.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// The broker accepts connections but does not answer.
    #[error("the broker did not answer within {} seconds; is it stopped?", PATIENCE.as_secs())]
    Silent,
    /// The broker closed the connection instead of answering.
    #[error("the broker hung up; it may be of another version")]
    HungUp,
    /// The broker's answer is not a message of this protocol version.
    #[error("the broker's answer is not understood: {0}")]
    Protocol(#[from] DecodeError),
    /// The snapshot cannot be parsed.
    #[error("the broker's snapshot cannot be read: {0}")]
    Snapshot(String),
    /// Reading from or writing to the socket failed.
    #[error("talking to the broker failed: {0}")]
    Io(#[from] Errno),
}

/// Returns the state of the broker at `path`. Blocks for a few seconds at most.
pub fn status(path: impl AsRef<Path>) -> Result<Snapshot, StatusError> {
    ask(path.as_ref(), &[Status { pad: 0 }.into()])
}

/// Returns the state of the broker at `path`, and has the programs in it measure latencies for some
/// seconds from now on: see [`shunt_abi::latency`].
pub fn status_with_latency(path: impl AsRef<Path>) -> Result<Snapshot, StatusError> {
    ask(path.as_ref(), &[AskLatency { pad: 0 }.into(), Status { pad: 0 }.into()])
}

fn ask(path: &Path, requests: &[Request]) -> Result<Snapshot, StatusError> {
    let socket = connect(path)?;
    for request in requests {
        match seqpacket::send(&socket, request.encode().as_bytes(), &[]) {
            Ok(()) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(StatusError::HungUp),
            Err(error) => return Err(error.into()),
        }
    }
    let mut buffer = vec![0; STATUS_PART];
    let len = receive(&socket, &mut buffer)?;
    let Reply::StatusReply(StatusReply { bytes }) = Reply::decode(&buffer[..len], 0)? else {
        return Err(StatusError::Snapshot("another message came instead".into()));
    };
    if bytes > MAX_JSON {
        return Err(StatusError::Snapshot("it is too large".into()));
    }
    let mut json = Vec::new();
    while (json.len() as u64) < bytes {
        let len = receive(&socket, &mut buffer)?;
        json.extend_from_slice(&buffer[..len]);
    }
    serde_json::from_slice(&json).map_err(|error| StatusError::Snapshot(error.to_string()))
}

/// Connects, and retries while the broker's backlog is full.
fn connect(path: &Path) -> Result<OwnedFd, StatusError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match seqpacket::connect(path.as_os_str().as_encoded_bytes()) {
            Ok(socket) => return Ok(socket),
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(RETRY),
            Err(Errno::AGAIN) => return Err(StatusError::Silent),
            Err(error) => return Err(StatusError::NoBroker { path: path.to_owned(), source: error.into() }),
        }
    }
}

/// Receives the next datagram.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<usize, StatusError> {
    let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    if poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&patience))? == 0 {
        return Err(StatusError::Silent);
    }
    match seqpacket::recv(socket, buffer) {
        Ok((0, _)) | Err(Errno::CONNRESET) => Err(StatusError::HungUp),
        received => Ok(received?.0),
    }
}

/// Answers a status request, and charges `unread` with the size of the answer. Root and the
/// broker's own user see everything. Other users see what belongs to them. Clients in another
/// network namespace see only that namespace: root in a container is not root of the host.
pub(crate) fn answer(
    state: &State,
    whose: Principal,
    outbox: &Outbox,
    unread: &mut Charge,
) -> Result<(), BadMessage> {
    let json = match serde_json::to_vec(&snapshot(state, whose)) {
        Ok(json) => json,
        Err(error) => {
            tracing::error!(%error, "the status cannot be written as JSON");
            return Ok(());
        }
    };
    if !unread.set(json.len()) {
        return Err(BadMessage::StatusLimit);
    }
    outbox.push_status(json);
    Ok(())
}

/// Has the programs that a status shows measure latencies from now on.
pub(crate) fn want_latency(state: &State, whose: Principal) {
    let (everywhere, everybody) = sees(state, whose);
    let now = now();
    for process in state.processes.values() {
        let is_visible = (everywhere || whose.netns == process.netns)
            && (everybody || process.credentials.uid == whose.uid);
        if is_visible {
            process.outbox.want_latency(now, now + latency_wishes::OF_STATUS.as_nanos() as u64);
        }
    }
    state.latency_wanted.notify_one();
}

/// Returns whether a principal sees programs of all network namespaces, and of all users.
fn sees(state: &State, whose: Principal) -> (bool, bool) {
    (whose.netns == state.namespaces.own(), whose.uid == 0 || whose.uid == getuid().as_raw())
}

fn snapshot(state: &State, whose: Principal) -> Snapshot {
    let (everywhere, everybody) = sees(state, whose);
    let is_visible = |process: &&state::Process| {
        (everywhere || whose.netns == process.netns) && (everybody || process.credentials.uid == whose.uid)
    };
    // Strangers must not see what happens to others.
    let nothing = Tally::default();
    let (tally, links) = match whose.is_privileged() {
        true => (&state.tally, state.links.len()),
        false => (state.tally_of(whose).unwrap_or(&nothing), state.links.count_of(whose)),
    };
    let refused = tally.offers_refused.iter();
    let ended = tally.pairs_ended.iter();
    let bad = tally.bad_messages.iter();
    let is_earlier = |end: &&Connection| {
        let is_on_shm = [end.send, end.receive].iter().any(|one| one.transport == Transport::Shm);
        is_on_shm && state.links.holder(end.cookie).is_none()
    };
    let mut rows = Budget::new(state.limits.status_rows);
    let shown = |(id, one): (&ProcessId, &state::Process)| {
        let mut shown = process(one, || rows.take(one.principal, 1));
        end_lanes(&mut shown.connections, &state.links.ended_lanes(*id));
        shown
    };
    let processes: Vec<Process> =
        state.processes.iter().filter(|(_, one)| is_visible(one)).map(shown).collect();
    let is_visible = |one: &&Ended| {
        (everywhere || whose.netns == one.principal.netns) && (everybody || one.process.uid == whose.uid)
    };
    let ended_processes = state.recent.iter().filter(is_visible).map(Ended::shown).collect();
    let mut totals = if whose.is_privileged() { state.ended.clone() } else { Totals::default() };
    for process in &processes {
        totals += &process.totals;
    }
    Snapshot {
        version: VERSION,
        broker_pid: std::process::id(),
        uptime_seconds: state.started.elapsed().as_secs(),
        started_at: state.started_at,
        of_all: whose.is_privileged(),
        links,
        earlier_ends: processes.iter().flat_map(|one| &one.connections).filter(is_earlier).count(),
        pairs_made: tally.pairs_made,
        offers_refused: refused.map(|(reason, count)| (reason.label().to_owned(), *count)).collect(),
        pairs_ended: ended.map(|(reason, count)| (reason.label().to_owned(), *count)).collect(),
        bad_messages: bad.map(|(label, count)| ((*label).to_owned(), *count)).collect(),
        totals,
        processes,
        ended_processes,
    }
}

/// Shows directions on TCP whose lanes have `ended`. An idle process still reports shared memory
/// after its peer has gone back to TCP, for example by an exec.
fn end_lanes(connections: &mut [Connection], ended: &HashMap<u64, [bool; 2]>) {
    for end in connections {
        let Some(lanes) = ended.get(&end.cookie) else { continue };
        for (direction, has_ended) in [&mut end.send, &mut end.receive].into_iter().zip(lanes) {
            if *has_ended && direction.transport == Transport::Shm {
                (direction.transport, direction.reason) = (Transport::Tcp, Reason::PeerWentBack);
            }
        }
    }
}

/// Returns a process with as many connections as `has_room` permits.
fn process(process: &state::Process, mut has_room: impl FnMut() -> bool) -> Process {
    let (report, left_out) = process.outbox.with_page(|page| read(page, &mut has_room)).unwrap_or_default();
    Process {
        left_out,
        pid: process.credentials.pid,
        uid: process.credentials.uid,
        program: process.program.clone(),
        totals: report.totals,
        connections: report.connections,
        ended_connections: report.ended_connections,
        ended_seconds_ago: None,
    }
}

/// Returns the last state of a process that has ended.
pub(crate) fn last_state(ended: &state::Process) -> Process {
    let mut room = ended_processes::ROWS;
    process(ended, || {
        let has_room = room > 0;
        room = room.saturating_sub(1);
        has_room
    })
}

/// Returns the bytes of connections that no row lists any more.
fn moved_before(page: &Page) -> Moved {
    let mut moved =
        Moved { shm: page.counters[Counter::LaneBytes as usize].load(Relaxed), tcp: BTreeMap::new() };
    for (reason, bytes) in Reason::ALL.iter().zip(&page.tcp_bytes) {
        add_by_tcp(&mut moved, *reason, bytes.load(Relaxed));
    }
    moved
}

/// Adds the bytes of a row that are not yet part of other counters.
fn add_row(moved: &mut Moved, row: &EntryCopy, connection: &Connection) {
    add_by_tcp(moved, connection.send.reason, row.tcp_sent.saturating_sub(row.sent_counted));
    add_by_tcp(moved, connection.receive.reason, row.tcp_received.saturating_sub(row.received_counted));
    moved.shm = moved.shm.saturating_add(row.shm_sent).saturating_add(row.shm_received);
}

fn add_by_tcp(moved: &mut Moved, reason: Reason, bytes: u64) {
    if bytes > 0 {
        let sum = moved.tcp.entry(reason.label().to_owned()).or_default();
        *sum = sum.saturating_add(bytes);
    }
}

/// A report of a process about itself, read from its page. It may contain anything, and is only
/// displayed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Counters since the process started.
    pub totals: Totals,
    /// Connections of the process.
    pub connections: Vec<Connection>,
    /// Connections that have ended in the last minute, as far as the page still has them.
    pub ended_connections: Vec<Connection>,
}

/// Reads a page completely.
pub fn report(page: &Page) -> Report {
    read(page, || true).0
}

/// Reads a page with as many connections as `has_room` permits. Returns the report and the number
/// of connections left out.
fn read(page: &Page, mut has_room: impl FnMut() -> bool) -> (Report, usize) {
    let (mut report, mut left_out) = (Report { totals: counted(page), ..Report::default() }, 0);
    let now = now();
    for entry in rows(page) {
        let Some(row) = entry.copy() else { continue };
        let mut connection = Connection { latency: entry.latency.copy(), ..connection(row) };
        if row.ended_at != 0 {
            // Its bytes are in the counters already.
            let age = Duration::from_nanos(now.saturating_sub(row.ended_at));
            if age <= ended_processes::SHOWN && has_room() {
                connection.ended_seconds_ago = Some(age.as_secs());
                report.ended_connections.push(connection);
            }
            continue;
        }
        add_row(&mut report.totals.bytes, &row, &connection);
        report.totals.latency += &connection.latency;
        if has_room() {
            report.connections.push(connection);
        } else {
            left_out += 1;
        }
    }
    (report, left_out)
}

/// Returns all counters except those that only the rows contain.
fn counted(page: &Page) -> Totals {
    let counters = Counter::NAMES.iter();
    let bypasses = Reason::ALL.iter().map(|reason| (reason, page.bypasses[*reason as usize].load(Relaxed)));
    Totals {
        share: page.share(),
        bytes: moved_before(page),
        counters: counters
            .map(|(counter, name)| ((*name).to_owned(), page.counters[*counter as usize].load(Relaxed)))
            .collect(),
        latency: page.latency.copy(),
        bypasses: bypasses
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| (reason.label().to_owned(), count))
            .collect(),
    }
}

/// Returns the used rows that have ever been written. So a process that claims to use all rows does
/// not make the broker allocate the memory of its page.
fn rows(page: &Page) -> impl Iterator<Item = &Entry> {
    let used = page.used();
    let start = std::ptr::from_ref(page).cast::<u8>();
    let len = offset_of!(Page, entries) + size_of_val(used);
    let backed = backed_pages(start, len);
    used.iter().enumerate().filter_map(move |(row, entry)| {
        let first = offset_of!(Page, entries) + row * size_of::<Entry>();
        let last = first + size_of::<Entry>() - 1;
        (backed[first / 4096] && backed[last / 4096]).then_some(entry)
    })
}

/// Parses a row. It may contain anything, and is only displayed.
fn connection(entry: EntryCopy) -> Connection {
    let address = |octets: [u8; 16], port| {
        identity::normalise(SocketAddr::new(IpAddr::V6(Ipv6Addr::from(octets)), port))
    };
    let direction = |transport: u64, reason: u64, tcp_bytes, shm_bytes| {
        let transport =
            if transport & 0xff == Transport::Shm as u64 { Transport::Shm } else { Transport::Tcp };
        let reason = match transport {
            Transport::Shm => Reason::None,
            Transport::Tcp => Reason::parse(reason as u16).unwrap_or(Reason::None),
        };
        Direction { transport, reason, tcp_bytes, shm_bytes }
    };
    let transports = entry.transports;
    let send = direction(transports, transports >> 16, entry.tcp_sent, entry.shm_sent);
    let receive = direction(transports >> 8, transports >> 32, entry.tcp_received, entry.shm_received);
    // The row names the option that kept the connection off shared memory at some time. The present
    // reason may be another.
    let is_to_blame = [send, receive].iter().any(|direction| direction.reason == Reason::SocketOption);
    let option = SocketOption::unpack(entry.option).filter(|_| is_to_blame);
    Connection {
        cookie: entry.cookie,
        fd: entry.fd,
        local: address(entry.local, entry.local_port),
        remote: address(entry.remote, entry.remote_port),
        send,
        receive,
        option: option.map(|option| option.to_string()),
        connected: transports & CONNECTED != 0,
        latency: Latency::default(),
        ended_seconds_ago: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_and_reasons_are_decoded_and_rubbish_is_survived() {
        let transports = 1 | (Reason::Fork as u64) << 16 | (Reason::Stalled as u64) << 32;
        let row = connection(EntryCopy { transports, ..EntryCopy::default() });
        assert_eq!((row.send.transport, row.send.reason), (Transport::Shm, Reason::None));
        assert_eq!((row.receive.transport, row.receive.reason), (Transport::Tcp, Reason::Stalled));
        let row = connection(EntryCopy { transports: u64::MAX, local: [0xff; 16], ..EntryCopy::default() });
        assert_eq!((row.send.transport, row.send.reason), (Transport::Tcp, Reason::None));
    }

    #[test]
    fn a_direction_whose_lane_has_ended_is_on_tcp() {
        let on_shm = EntryCopy { transports: 0x0101, cookie: 7, ..EntryCopy::default() };
        let mut ends = [connection(on_shm), connection(EntryCopy { cookie: 8, ..on_shm })];
        end_lanes(&mut ends, &HashMap::from([(7, [true, false])]));
        assert_eq!((ends[0].send.transport, ends[0].send.reason), (Transport::Tcp, Reason::PeerWentBack));
        let others = [ends[0].receive, ends[1].send, ends[1].receive];
        assert!(others.iter().all(|direction| direction.transport == Transport::Shm), "{others:?}");
    }

    #[test]
    fn no_broker_is_said_plainly() {
        let error = status("/nonexistent/broker.sock").unwrap_err().to_string();
        assert!(error.contains("/nonexistent/broker.sock") && error.contains("shunt daemon"), "{error}");
    }
}
