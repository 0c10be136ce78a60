//! `shunt explain`: reports why a process, a connection or a program uses shared memory or not, and
//! what to do about it.
//!
//! The answer combines three sources: `obstacle` for files, as in `shunt run`; /proc for processes;
//! the broker for the transport of each connection and the reason.

mod own_calls;
mod process;
mod report;
mod sockets;
pub(crate) mod unregistered;
pub(crate) mod unserved;
mod used;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use shunt_abi::reason::{Reason, Transport};
use shunt_abi::shown::visible;
use shunt_abi::status::{Connection, Snapshot};
use shunt_broker::StatusError;

use crate::args::ExplainArgs;
use crate::intercept;
use crate::obstacle::{self, Obstacle};
use crate::overlay::seen::View;
use crate::screen::Screen;
pub(crate) use process::is_under_shunt;
use process::{Process, Ring};
pub(crate) use report::Cause;
use report::{ConnectionReport, FileReport, Peer, ProcessReport, Report};
use shunt_start::program;
use shunt_sys::Errno;
use shunt_sys::proc::pids;
use sockets::{Socket, Sockets, State};
use used::Use;

pub(crate) fn run(args: &ExplainArgs) -> Result<()> {
    let overlay = View::ask(&args.control.control);
    let mut report = explain(&Target::parse(&args.what), args.broker.as_deref(), overlay.as_ref())?;
    report.keep_ports(&args.port);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report).context("the report cannot be printed")?);
    } else {
        print!("{}", report.text(&Screen::of_output()));
    }
    Ok(())
}

/// A process, and its connection ends by the transports of their two directions.
#[derive(Clone, Debug, serde::Serialize)]
pub(crate) struct Summary {
    pub(crate) pid: u32,
    pub(crate) program: String,
    /// Whether the shim is loaded.
    pub(crate) under_shunt: bool,
    /// Whether the libshunt.so that it has loaded was since replaced.
    pub(crate) is_replaced: bool,
    pub(crate) shared_memory: usize,
    pub(crate) tcp: usize,
    /// One direction is on shared memory, the other on TCP.
    pub(crate) mixed: usize,
    /// Why ends are on TCP.
    pub(crate) reasons: BTreeMap<String, usize>,
    /// Why all ends are on TCP, if they are.
    pub(crate) causes: Vec<Cause>,
}

impl Summary {
    /// Returns whether only root may look into the process.
    pub(crate) fn is_hidden(&self) -> bool {
        let label = Obstacle::Hidden { uid: 0 }.label();
        self.causes.iter().any(|cause| cause.label == label)
    }
}

/// Returns a summary of each process with one of these ids that still exists.
pub(crate) fn processes(pids: &[u32]) -> Vec<Summary> {
    let mut view = Looked { sockets: Sockets::look(), asked: None, brokers: HashMap::new(), overlay: None };
    let all = pids.iter().filter_map(|pid| Process::look(*pid).ok());
    all.map(|process| view.summary(&process)).collect()
}

/// Returns why the connection of a process with these ports, its own and its peer's, is on TCP.
/// Empty if it is not, or is gone.
pub(crate) fn of_connection(pid: u32, ports: [u16; 2], broker: Option<&Path>) -> Vec<Cause> {
    let Ok(report) = explain(&Target::Process(pid), broker, None) else { return Vec::new() };
    let is_it = |end: &&ConnectionReport| [end.local, end.remote].map(|address| address.port()) == ports;
    let causes = |process: ProcessReport| {
        let of_connection = process.connections.iter().find(is_it).map(|end| end.causes.clone());
        [process.causes, of_connection.unwrap_or_default()].concat()
    };
    report.processes.into_iter().flat_map(causes).collect()
}

/// The subject of the question.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    Process(u32),
    /// Either end of a connection, or a listening socket. No IP address means any.
    Address(Option<IpAddr>, u16),
    Program(String),
}

impl Target {
    fn parse(text: &str) -> Target {
        if let Ok(pid) = text.parse() {
            return Target::Process(pid);
        }
        if let Ok(address) = text.parse::<SocketAddr>() {
            let address = shunt_sys::identity::normalise(address);
            return Target::Address(Some(address.ip()), address.port());
        }
        match text.strip_prefix(':').and_then(|port| port.parse().ok()) {
            Some(port) => Target::Address(None, port),
            None => Target::Program(text.to_owned()),
        }
    }

    /// Returns whether the question covers `socket`.
    fn covers(&self, socket: &Socket) -> bool {
        let Target::Address(ip, port) = self else { return true };
        let is = |address: SocketAddr| {
            let any = socket.state == State::LISTEN && address.ip().is_unspecified();
            address.port() == *port && (any || ip.is_none_or(|ip| ip == address.ip()))
        };
        is(socket.local) || is(socket.remote)
    }
}

fn explain(target: &Target, broker: Option<&Path>, overlay: Option<&View>) -> Result<Report> {
    let mut view = Looked { sockets: Sockets::look(), asked: broker, brokers: HashMap::new(), overlay };
    let (file, pids) = match target {
        Target::Process(pid) => (None, vec![*pid]),
        Target::Address(..) => (None, holders(target, &view.sockets, overlay)?),
        Target::Program(name) => named(name)?,
    };
    let mut processes = Vec::new();
    for pid in pids {
        match Process::look(pid) {
            Ok(process) => processes.push(view.describe(&process, target)),
            Err(error) if matches!(target, Target::Process(_)) => return Err(error),
            // The process has ended since it was found.
            Err(_) => {}
        }
    }
    Ok(Report { file, processes })
}

/// Returns the processes that hold a socket with this address.
fn holders(target: &Target, sockets: &Sockets, overlay: Option<&View>) -> Result<Vec<u32>> {
    let found: Vec<&Socket> = sockets
        .iter()
        .filter(|socket| target.covers(socket) || target.covers(&named_by(overlay, socket)))
        .collect();
    let mut pids: Vec<u32> = found.iter().flat_map(|socket| sockets.owners(socket)).copied().collect();
    pids.sort_unstable();
    pids.dedup();
    match found.first() {
        None => bail!("no TCP socket of this host has that address"),
        Some(socket) if pids.is_empty() => {
            bail!(
                "no process that you may look into has a socket with that address (one belongs to user {}): \
                 ask as root",
                socket.uid
            )
        }
        Some(_) => Ok(pids),
    }
}

/// Returns the socket with the addresses that its program uses. For a connection on the host
/// network these are addresses of the overlay.
fn named_by(overlay: Option<&View>, socket: &Socket) -> Socket {
    let mut named = socket.clone();
    if let Some(seen) = overlay.and_then(|overlay| overlay.find(socket.local, socket.remote)) {
        (named.local, named.remote) = (seen.local, seen.remote);
    }
    named
}

/// Returns a program, found by name or path, and the processes that run it.
fn named(name: &str) -> Result<(Option<FileReport>, Vec<u32>)> {
    let path = program::find(OsStr::new(name), std::env::var_os("PATH"));
    let base = Path::new(name).file_name().and_then(OsStr::to_str).unwrap_or(name);
    let mut pids: Vec<u32> = pids().filter(|pid| Process::runs(*pid, path.as_deref().ok(), base)).collect();
    pids.sort_unstable();
    let file = match path {
        Ok(path) => {
            let obstacle = obstacle::of_file(&path)
                .filter(|obstacle| !obstacle.may_be_intercepted() || !intercept::can_be_opened(&path));
            let causes = obstacle.iter().map(|obstacle| Cause::of_obstacle(obstacle, base)).collect();
            Some(FileReport { path, can_be_entered: obstacle.is_none(), causes })
        }
        Err(_) if !pids.is_empty() => None,
        Err(error) => {
            return Err(anyhow!(
                "{name}: {error}, and no process goes by that name; for a unit: `shunt service status {name}`"
            ));
        }
    };
    Ok((file, pids))
}

/// Data that is collected once for the whole answer.
struct Looked<'a> {
    sockets: Sockets,
    /// The broker that the user named.
    asked: Option<&'a Path>,
    brokers: HashMap<PathBuf, Result<Snapshot, StatusError>>,
    /// The connections of the overlay's router, if there is one.
    overlay: Option<&'a View>,
}

impl Looked<'_> {
    fn summary(&mut self, process: &Process) -> Summary {
        let report = self.describe(process, &Target::Process(process.pid));
        let on = |transport| {
            let ends = report.connections.iter();
            ends.filter(|end| end.sends == transport && end.receives == transport).count()
        };
        let (shared_memory, tcp) = (on(Some(Transport::Shm)), on(Some(Transport::Tcp)));
        let mut reasons = BTreeMap::new();
        for cause in report.connections.iter().filter_map(|end| end.causes.first()) {
            *reasons.entry(cause.label.to_string()).or_default() += 1;
        }
        Summary {
            pid: report.pid,
            program: report.program,
            under_shunt: report.under_shunt,
            is_replaced: process.shim_replaced,
            shared_memory,
            tcp,
            mixed: report.connections.len() - shared_memory - tcp - on(None),
            reasons,
            causes: report.causes,
        }
    }

    fn describe(&mut self, process: &Process, target: &Target) -> ProcessReport {
        let broker = if process.has_shim { self.broker_of(process) } else { None };
        let mut report = ProcessReport {
            pid: process.pid,
            uid: process.uid,
            program: self.name(process, broker.as_deref()),
            under_shunt: process.has_shim,
            causes: self.causes(process, broker.as_deref()),
            broker,
            connections: Vec::new(),
        };
        let connections: Vec<Socket> = self
            .sockets
            .iter()
            .filter(|socket| process.sockets.contains_key(&socket.inode))
            .filter(|socket| target.covers(socket) || target.covers(&named_by(self.overlay, socket)))
            .filter(|socket| socket.state != State::LISTEN && socket.remote.port() != 0)
            .cloned()
            .collect();
        for socket in connections {
            let connection = self.connection(process, &socket, &report);
            report.connections.push(connection);
        }
        report.connections.sort_by_key(|connection| (connection.local, connection.remote));
        report
    }

    /// Returns the socket of the first of the process's brokers that answers.
    ///
    /// HAProxy runs in another mount namespace and changes its root directory there. Its path leads
    /// nowhere from here. A broker at one of this process's sockets may still know it.
    fn broker_of(&mut self, process: &Process) -> Option<PathBuf> {
        let asked = self.asked.map(Path::to_owned);
        let paths = asked.map_or_else(|| process.broker_paths.clone(), |path| vec![path]);
        if let Some(path) = paths.into_iter().find(|path| self.answers(path)) {
            return Some(path);
        }
        let others = if self.asked.is_none() { shunt_broker::socket_candidates() } else { Vec::new() };
        others.into_iter().find(|path| self.answers(path) && self.known(process, path).is_some())
    }

    /// Returns whether a broker is at `path`, which is asked once.
    fn answers(&mut self, path: &Path) -> bool {
        let answer = self.brokers.entry(path.to_owned()).or_insert_with(|| shunt_broker::status(path));
        !matches!(answer, Err(StatusError::NoBroker { .. }))
    }

    fn snapshot(&self, broker: &Path) -> Option<&Snapshot> {
        self.brokers.get(broker)?.as_ref().ok()
    }

    /// Returns the broker's record of the process.
    fn known(&self, process: &Process, broker: &Path) -> Option<&shunt_abi::status::Process> {
        self.snapshot(broker)?.processes.iter().find(|one| one.pid == process.pid)
    }

    /// Returns the program's name that the shim reported. /proc only has the name of the main
    /// thread.
    fn name(&self, process: &Process, broker: Option<&Path>) -> String {
        let told = broker.and_then(|path| self.known(process, path)).map(|one| &one.program);
        visible(told.filter(|name| !name.is_empty()).unwrap_or(&process.name)).into_owned()
    }

    /// Returns how much a connection is used that its process's shim has not reported to the
    /// broker. `None` if no broker answers, the shim is missing, or the connection is reported or
    /// over.
    fn use_of(&self, process: &Process, socket: &Socket, broker: Option<&Path>) -> Option<Use> {
        let broker = broker.filter(|path| self.snapshot(path).is_some())?;
        let known = self.known(process, broker);
        let is_told = known.is_some_and(|known| row_of(known, socket).is_some());
        if !process.has_shim || socket.state != State::ESTABLISHED || is_told {
            return None;
        }
        let is_first = known.is_none_or(|known| known.totals.share.seen == 0);
        Some(Use::of(process.pid, process.sockets.get(&socket.inode).copied(), is_first))
    }

    /// Returns whether the program uses a connection by io_uring, if its shim has not reported the
    /// connection. That is certain if the shim has reported none at all, or if the connection is
    /// used more than the shim has seen.
    fn is_used_by_ring(&self, process: &Process, socket: &Socket, broker: Option<&Path>) -> bool {
        let known = broker.and_then(|path| self.known(process, path));
        let has_reported = known.is_some_and(|known| known.totals.share.seen > 0);
        process.ring != Ring::None
            && (!has_reported || self.use_of(process, socket, broker) == Some(Use::Unseen))
    }

    /// Returns why a connection is used more than the shim of the process has reported. If other
    /// processes have the socket too, as after a fork, one of them may be the user.
    fn unseen_use(&self, process: &Process, socket: &Socket) -> Cause {
        match self.sockets.owners(socket).iter().any(|pid| *pid != process.pid) {
            true => Reason::Shared.into(),
            false => Cause::of_obstacle(&process.unseen_use(), &process.name),
        }
    }

    /// Returns why the shim of a process has not reported a connection.
    fn why_untold(&self, process: &Process, socket: &Socket, broker: Option<&Path>) -> Vec<Cause> {
        if !is_of_this_host(socket) {
            return vec![Reason::RemotePeer.into()];
        }
        let unknown = || Cause::of_obstacle(&Obstacle::UntoldUse, &process.name);
        match self.use_of(process, socket, broker) {
            Some(Use::Little) => vec![Reason::TooFewOperations.into()],
            Some(Use::Unseen) => vec![self.unseen_use(process, socket)],
            Some(Use::Unknown) => vec![unknown()],
            // Either a cause applies to all connections of the process, or the connection is over.
            None if socket.state == State::ESTABLISHED => vec![unknown()],
            None => vec![Reason::Stale.into()],
        }
    }

    /// Returns the causes that keep all connections of the process on TCP.
    fn causes(&self, process: &Process, broker: Option<&Path>) -> Vec<Cause> {
        if let Some(obstacle) = &process.obstacle {
            return vec![Cause::of_obstacle(obstacle, &process.name)];
        }
        if let Some(reason) = process.off {
            return vec![reason.into()];
        }
        let mut causes = Vec::new();
        if process.ring == Ring::Polled {
            causes.push(Reason::IoUring.into());
        }
        let snapshot = broker.and_then(|path| self.snapshot(path));
        let known = broker.and_then(|path| self.known(process, path));
        let is_known = known.is_some();
        if known.is_some_and(|one| one.totals.bypasses.contains_key(Reason::Sandboxed.label())) {
            causes.push(Reason::Sandboxed.into());
        }
        // A shim that could not ask cannot know whether a broker is there.
        let refused = process.is_refused_by_filter().filter(|_| !is_known);
        match (snapshot, broker) {
            _ if refused.is_some() => causes.extend(refused.map(filtered)),
            (None, Some(_)) => causes.push(Reason::BrokerVersion.into()),
            (None, None) => causes.push(Reason::NoBroker.into()),
            (Some(_), Some(path)) if !is_known && process.is_kept_from(path) => {
                causes.push(kept_from(process, path));
            }
            (Some(_), Some(path)) if !is_known && process.is_rooted_without(path) => {
                causes.push(out_of_reach_of(path));
            }
            (Some(_), _) if !is_known && process.shim_replaced => causes.push(Cause {
                label: "replaced".into(),
                explanation: "The libshunt.so that it has loaded was replaced since.".into(),
                advice: "Restart it, so that it and the broker are of one version.".into(),
            }),
            (Some(snapshot), Some(path)) if self.is_unknown(process, path) => {
                causes.push(unknown_to(snapshot));
            }
            (Some(_), _) => {}
        }
        causes
    }

    /// Returns whether the process was under shunt before the broker started, and has not
    /// registered with it yet. What its connections use is unknown. A program that starts its own
    /// broker is older too, but no other broker has accepted it.
    fn is_unknown(&self, process: &Process, broker: &Path) -> bool {
        // Both are rounded down from different clocks' seconds.
        let is_older = |snapshot: &Snapshot| process.age.is_some_and(|age| age > snapshot.uptime_seconds + 1);
        process.has_shim
            && process.has_registered != Some(false)
            && self.known(process, broker).is_none()
            && self.snapshot(broker).is_some_and(is_older)
    }

    fn connection(&mut self, process: &Process, socket: &Socket, report: &ProcessReport) -> ConnectionReport {
        if let Some(seen) = self.overlay.and_then(|overlay| overlay.find(socket.local, socket.remote)) {
            return ConnectionReport {
                fd: process.sockets.get(&socket.inode).copied(),
                local: seen.local,
                remote: seen.remote,
                state: socket.state.label(),
                peers: Vec::new(),
                sends: Some(Transport::Tcp),
                receives: Some(Transport::Tcp),
                overlay: Some(seen.path),
                causes: Cause::of_seen(seen).into_iter().collect(),
            };
        }
        let row = report.broker.as_deref().and_then(|broker| {
            let own = self.snapshot(broker)?.processes.iter().filter(|one| one.pid == process.pid);
            own.filter_map(|one| row_of(one, socket)).next().cloned()
        });
        let peers = self.peers(socket, process.pid, report.broker.as_deref());
        let mut causes: Vec<Cause> = match &row {
            Some(row) => causes_of(row, false),
            // The causes for the whole process explain this connection too.
            None if !report.causes.is_empty() => Vec::new(),
            None if self.is_used_by_ring(process, socket, report.broker.as_deref()) => {
                vec![Reason::IoUring.into()]
            }
            None => self.why_untold(process, socket, report.broker.as_deref()),
        };
        process.name_own_calls(&mut causes);
        let is_unseen = |cause: &Cause| {
            cause.label == Reason::UnseenWait.label() || cause.label == Obstacle::UnseenUse.label()
        };
        if process.has_shim
            && causes.iter().any(is_unseen)
            && let Some(obstacle) = process.hides_calls()
        {
            // This cause is more specific: it names the calls.
            causes.retain(|cause| cause.label != Obstacle::UnseenUse.label());
            causes.push(Cause::of_obstacle(&obstacle, &process.name));
        }
        let on_shm = |transport: Option<Transport>| transport == Some(Transport::Shm);
        let is_unknown = report.broker.as_deref().is_some_and(|broker| self.is_unknown(process, broker));
        let otherwise = (!is_unknown).then_some(Transport::Tcp);
        let sends = row.as_ref().map(|row| row.send.transport).or(otherwise);
        let receives = row.as_ref().map(|row| row.receive.transport).or(otherwise);
        if !(on_shm(sends) && on_shm(receives)) {
            if !peers.is_empty() && peers.iter().all(|(peer, _)| peer.under_shunt) {
                let there: Vec<Cause> = peers.iter().flat_map(|(_, causes)| causes.clone()).collect();
                causes.iter_mut().for_each(|cause| cause.know_that_the_peer_is_under_shunt(&there));
            }
            for (peer, mut causes_there) in peers.iter().map(|(peer, causes)| (peer, causes.clone())) {
                causes.extend(causes_there.drain(..).map(|cause| cause.at_peer(peer)));
            }
        }
        ConnectionReport {
            fd: process.sockets.get(&socket.inode).copied(),
            local: socket.local,
            remote: socket.remote,
            state: socket.state.label(),
            peers: peers.into_iter().map(|(peer, _)| peer).collect(),
            sends,
            receives,
            overlay: None,
            causes,
        }
    }

    /// Returns the processes at the other end, each with the causes that keep this connection on
    /// TCP there. `own_broker` is the broker of this end.
    fn peers(&mut self, socket: &Socket, own: u32, own_broker: Option<&Path>) -> Vec<(Peer, Vec<Cause>)> {
        let Some(other) = self.sockets.peer(socket) else { return Vec::new() };
        let other = other.clone();
        let mut pids = self.sockets.owners(&other).to_vec();
        // A process may be connected to itself.
        if pids.len() > 1 && other.inode != socket.inode {
            pids.retain(|pid| *pid != own);
        }
        let describe = |pid: u32| {
            let process = Process::look(pid).ok()?;
            let broker = if process.has_shim { self.broker_of(&process) } else { None };
            let mut causes = self.causes(&process, broker.as_deref());
            if let (Some(here), Some(there)) = (own_broker, broker.as_deref())
                && self.are_different(here, there)
            {
                causes.insert(0, two_brokers(here, there));
            }
            if causes.is_empty() && process.has_shim {
                causes = self.of_the_other_end(&process, &other, broker.as_deref());
                process.name_own_calls(&mut causes);
            }
            let program = self.name(&process, broker.as_deref());
            let peer = Peer { pid, program, under_shunt: process.has_shim };
            Some((peer, causes))
        };
        pids.into_iter().filter_map(describe).collect()
    }

    /// Returns whether two brokers answer at these sockets.
    fn are_different(&self, one: &Path, other: &Path) -> bool {
        let pid = |path| self.snapshot(path).map(|snapshot| snapshot.broker_pid);
        pid(one).zip(pid(other)).is_some_and(|(one, other)| one != other)
    }

    /// Returns the causes on the side of the process at the other end, which runs under shunt.
    /// Causes that only describe this end are left out.
    fn of_the_other_end(&self, process: &Process, socket: &Socket, broker: Option<&Path>) -> Vec<Cause> {
        let known = broker.and_then(|path| self.known(process, path));
        match known.and_then(|known| row_of(known, socket)) {
            Some(row) => {
                let says_nothing_new =
                    [Reason::PeerNotOffered, Reason::PeerWentBack, Reason::TooFewOperations];
                let reasons = reasons_of(row).into_iter().filter(|reason| !says_nothing_new.contains(reason));
                reasons.map(|reason| Cause::of_row(reason, row)).collect()
            }
            None if self.is_used_by_ring(process, socket, broker) => vec![Reason::IoUring.into()],
            None => match self.use_of(process, socket, broker) {
                Some(Use::Unseen) => vec![self.unseen_use(process, socket)],
                _ => Vec::new(),
            },
        }
    }
}

/// Returns the shim's report of a connection.
fn row_of<'a>(known: &'a shunt_abi::status::Process, socket: &Socket) -> Option<&'a Connection> {
    known.connections.iter().find(|row| (row.local, row.remote) == (socket.local, socket.remote))
}

/// Returns the cause for a connection whose ends use two brokers.
fn two_brokers(here: &Path, there: &Path) -> Cause {
    Cause {
        label: "two_brokers".into(),
        explanation: format!(
            "It uses the broker at {}, and this end the one at {}. Only ends at one broker share memory.",
            there.display(),
            here.display()
        ),
        advice: format!(
            "Start both programs with one broker, as with `shunt run --broker {}`.",
            there.display()
        ),
    }
}

/// Returns the cause for a process whose broker's socket is accessible to another user only.
fn kept_from(process: &Process, broker: &Path) -> Cause {
    Cause {
        label: "other_user".into(),
        explanation: format!(
            "It runs as user {}, who cannot reach the broker at {}: that one is for another user alone.",
            process.acts_as,
            broker.display()
        ),
        advice: format!(
            "Start a broker for everybody, `shunt daemon --system --detach`, and the program again with `shunt run --broker {}`.",
            shunt_broker::SYSTEM_SOCKET
        ),
    }
}

/// Returns the cause for a process that has not registered with a broker that started after it.
fn unknown_to(snapshot: &Snapshot) -> Cause {
    Cause {
        label: "broker_restarted".into(),
        explanation: format!(
            "Unknown since the broker was restarted {} s ago: the program is older, and has not registered with it yet. \
             Its connections on shared memory go on.",
            snapshot.uptime_seconds
        ),
        advice: "Ask again once it has been used: it registers with its next calls.".into(),
    }
}

/// Returns the cause for a process whose shim could not reach the broker because of this error, and
/// which is under a seccomp filter.
fn filtered(error: Errno) -> Cause {
    Cause {
        label: "seccomp".into(),
        explanation: format!(
            "It could not speak to the broker ({}), and it is under a seccomp filter, which may forbid that.",
            std::io::Error::from(error)
        ),
        advice: "Let the filter allow Unix sockets, sendmsg, recvmsg, memfd_create and mmap. In a systemd unit, add \
                 AF_UNIX to RestrictAddressFamilies=."
            .into(),
    }
}

/// Returns the cause for a process whose root directory does not contain the broker's socket.
fn out_of_reach_of(broker: &Path) -> Cause {
    Cause {
        label: "other_root".into(),
        explanation: format!(
            "It was forked behind another root directory, where the broker at {} cannot be found.",
            broker.display()
        ),
        advice: "Make the broker's socket visible there by the same path, for example by a bind mount of its directory.".into(),
    }
}

/// Returns why a connection, or one of its directions, is on TCP. `peer_is_under_shunt` is set if
/// the other end's program is known to run under shunt.
pub(crate) fn causes_of(row: &Connection, peer_is_under_shunt: bool) -> Vec<Cause> {
    let mut causes: Vec<Cause> =
        reasons_of(row).into_iter().map(|reason| Cause::of_row(reason, row)).collect();
    if peer_is_under_shunt {
        causes.iter_mut().for_each(|cause| cause.know_that_the_peer_is_under_shunt(&[]));
    }
    causes
}

/// Returns why the directions of a connection are on TCP. Empty if none is.
fn reasons_of(row: &Connection) -> Vec<Reason> {
    let mut reasons = Vec::new();
    for direction in [row.send, row.receive] {
        let settled = direction.transport == Transport::Shm || direction.reason == Reason::None;
        if !settled && !reasons.contains(&direction.reason) {
            reasons.push(direction.reason);
        }
    }
    reasons
}

/// Returns whether both ends of a connection are on this host, judged by the addresses. A
/// connection that is over always counts as local.
fn is_of_this_host(socket: &Socket) -> bool {
    let is_local = socket.remote.ip().is_loopback() || socket.remote.ip() == socket.local.ip();
    is_local || socket.state != State::ESTABLISHED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_addresses_and_names_are_told_apart() {
        assert_eq!(Target::parse("123"), Target::Process(123));
        assert_eq!(Target::parse(":80"), Target::Address(None, 80));
        let loopback = Some("127.0.0.1".parse().unwrap());
        for text in ["127.0.0.1:80", "[::ffff:127.0.0.1]:80"] {
            assert_eq!(Target::parse(text), Target::Address(loopback, 80));
        }
        assert_eq!(Target::parse("[::1]:80"), Target::Address(Some("::1".parse().unwrap()), 80));
        for name in ["memcached", "/bin/sh", ":x", "host:80", "-1"] {
            assert_eq!(Target::parse(name), Target::Program(name.into()));
        }
    }
}
