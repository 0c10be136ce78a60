//! `shunt status`: the broker's snapshot, and the blocking client that asks for it.

use std::collections::BTreeMap;
use std::io;
use std::mem::offset_of;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::getuid;
use shunt_abi::VERSION;
use shunt_abi::control::{DecodeError, MAX_MESSAGE, Reply, Request, Status, StatusReply};
use shunt_abi::page::{Counter, Entry, EntryCopy, Page};
use shunt_abi::reason::{Reason, Road};
use shunt_abi::status::{Connection, Direction, Process, Snapshot};
use shunt_sys::mapping::backed_pages;
use shunt_sys::{Errno, identity, memfd, seqpacket};
use thiserror::Error;

use crate::outbox::Outbox;
use crate::state::{self, State};

/// How long the broker has for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// More JSON than this is not believed.
const MAX_JSON: u64 = 1 << 30;

/// Why there is no status.
#[derive(Debug, Error)]
pub enum StatusError {
    /// Nobody listens.
    #[error("no broker at {path}: {source}; start one with `shunt daemon`")]
    NoBroker {
        /// Where one was looked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It listens and says nothing.
    #[error("the broker did not answer within {} seconds; is it stopped?", PATIENCE.as_secs())]
    Silent,
    /// It hung up instead of answering.
    #[error("the broker hung up; it may be of another version")]
    HungUp,
    /// It speaks another protocol.
    #[error("the broker's answer is not understood: {0}")]
    Protocol(#[from] DecodeError),
    /// The snapshot is not one.
    #[error("the broker's snapshot cannot be read: {0}")]
    Snapshot(String),
    /// The connection failed.
    #[error("talking to the broker failed: {0}")]
    Io(#[from] Errno),
}

/// Asks the broker at `path` for its state. Blocks for a few seconds at most.
pub fn status(path: impl AsRef<Path>) -> Result<Snapshot, StatusError> {
    let path = path.as_ref();
    let socket = seqpacket::connect(path.as_os_str().as_encoded_bytes())
        .map_err(|error| StatusError::NoBroker { path: path.to_owned(), source: error.into() })?;
    match seqpacket::send(&socket, Request::from(Status { pad: 0 }).encode().as_bytes(), &[]) {
        Ok(()) => {}
        Err(Errno::PIPE | Errno::CONNRESET) => return Err(StatusError::HungUp),
        Err(error) => return Err(error.into()),
    }
    let patience = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    if poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&patience))? == 0 {
        return Err(StatusError::Silent);
    }
    let mut buffer = [0; MAX_MESSAGE];
    let (len, mut fds) = match seqpacket::recv(&socket, &mut buffer) {
        Ok((0, _)) | Err(Errno::CONNRESET) => return Err(StatusError::HungUp),
        received => received?,
    };
    match (Reply::decode(&buffer[..len], fds.len())?, fds.take_first()) {
        (Reply::StatusReply(reply), Some(memfd)) => read_snapshot(memfd, reply.bytes),
        _ => Err(StatusError::Snapshot("another message came instead".into())),
    }
}

fn read_snapshot(memfd: OwnedFd, bytes: u64) -> Result<Snapshot, StatusError> {
    let unreadable = |error: &dyn std::fmt::Display| StatusError::Snapshot(error.to_string());
    if bytes > MAX_JSON {
        return Err(unreadable(&"it is too large"));
    }
    memfd::verify_sealed(&memfd, bytes as usize).map_err(|error| unreadable(&error))?;
    let mut json = vec![0; bytes as usize];
    let file = std::fs::File::from(memfd);
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut json, 0).map_err(|error| unreadable(&error))?;
    serde_json::from_slice(&json).map_err(|error| unreadable(&error))
}

/// Answers a status request: everything for root and the broker's own user, for others what is theirs; and for whoever
/// is in another network namespace, what is in the same. Root in a container is not root of the host.
pub(crate) fn answer(state: &State, uid: u32, outbox: &Outbox) {
    let netns = identity::namespace(outbox.socket().as_fd()).ok();
    let everywhere = netns == Some(state.namespaces.own());
    let everybody = uid == 0 || uid == getuid().as_raw();
    let snapshot = snapshot(state, |process| {
        (everywhere || netns == Some(process.netns)) && (everybody || process.credentials.uid == uid)
    });
    let json = match serde_json::to_vec(&snapshot) {
        Ok(json) => json,
        Err(error) => return tracing::error!(%error, "the status cannot be written as JSON"),
    };
    match memfd::create_with("shunt-status", &json) {
        Ok(memfd) => {
            outbox.push(StatusReply { bytes: json.len() as u64 }.into(), Some(Rc::new(memfd)));
        }
        Err(error) => tracing::warn!(%error, "no memory for a status"),
    }
}

fn snapshot(state: &State, visible: impl Fn(&state::Process) -> bool) -> Snapshot {
    let refused = state.offers_refused.iter();
    let bad = state.bad_messages.iter();
    Snapshot {
        version: VERSION,
        broker_pid: std::process::id(),
        uptime_seconds: state.started.elapsed().as_secs(),
        links: state.links.len(),
        pairs_made: state.pairs_made,
        offers_refused: refused.map(|(reason, count)| (reason.label().to_owned(), *count)).collect(),
        bad_messages: bad.map(|(label, count)| ((*label).to_owned(), *count)).collect(),
        processes: state.processes.values().filter(|process| visible(process)).map(process).collect(),
    }
}

fn process(process: &state::Process) -> Process {
    let Report { connections, counters, bypasses } = process.outbox.with_page(report).unwrap_or_default();
    Process {
        pid: process.credentials.pid,
        uid: process.credentials.uid,
        program: process.program.clone(),
        connections,
        counters,
        bypasses,
    }
}

/// What a page says of its process. That may be anything, and is only shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Its connections.
    pub connections: Vec<Connection>,
    /// Its counters, by name.
    pub counters: BTreeMap<String, u64>,
    /// How often each bypass reason was met, by name.
    pub bypasses: BTreeMap<String, u64>,
}

/// Reads a page.
pub fn report(page: &Page) -> Report {
    let counters = Counter::NAMES.iter();
    let bypasses = Reason::ALL.iter().map(|reason| (reason, page.bypasses[*reason as usize].load(Relaxed)));
    Report {
        connections: rows(page).filter_map(Entry::copy).map(connection).collect(),
        counters: counters
            .map(|(counter, name)| ((*name).to_owned(), page.counters[*counter as usize].load(Relaxed)))
            .collect(),
        bypasses: bypasses
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| (reason.label().to_owned(), count))
            .collect(),
    }
}

/// The rows in use, but those only that have ever been written: a process that says it uses all of them does not make us
/// fill its page.
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

/// A row as the process reports it. It may be rubbish; it is only shown.
fn connection(entry: EntryCopy) -> Connection {
    let address = |octets: [u8; 16], port| {
        identity::normalise(SocketAddr::new(IpAddr::V6(Ipv6Addr::from(octets)), port))
    };
    let direction = |road: u64, reason: u64, tcp_bytes, shm_bytes| {
        let road = if road & 0xff == Road::Shm as u64 { Road::Shm } else { Road::Tcp };
        let reason = match road {
            Road::Shm => Reason::None,
            Road::Tcp => Reason::parse(reason as u16).unwrap_or(Reason::None),
        };
        Direction { road, reason, tcp_bytes, shm_bytes }
    };
    let roads = entry.roads;
    Connection {
        cookie: entry.cookie,
        fd: entry.fd,
        local: address(entry.local, entry.local_port),
        remote: address(entry.remote, entry.remote_port),
        send: direction(roads, roads >> 16, entry.tcp_sent, entry.shm_sent),
        receive: direction(roads >> 8, roads >> 32, entry.tcp_received, entry.shm_received),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roads_and_reasons_are_decoded_and_rubbish_is_survived() {
        let roads = 1 | (Reason::Fork as u64) << 16 | (Reason::Stalled as u64) << 32;
        let row = connection(EntryCopy { roads, ..EntryCopy::default() });
        assert_eq!((row.send.road, row.send.reason), (Road::Shm, Reason::None));
        assert_eq!((row.receive.road, row.receive.reason), (Road::Tcp, Reason::Stalled));
        let row = connection(EntryCopy { roads: u64::MAX, local: [0xff; 16], ..EntryCopy::default() });
        assert_eq!((row.send.road, row.send.reason), (Road::Tcp, Reason::None));
    }

    #[test]
    fn no_broker_is_said_plainly() {
        let error = status("/nonexistent/broker.sock").unwrap_err().to_string();
        assert!(error.contains("/nonexistent/broker.sock") && error.contains("shunt daemon"), "{error}");
    }
}
