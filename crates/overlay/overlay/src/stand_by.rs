//! Starts a supervisor on the host for a container that is about to start. The supervisor exists
//! before the container, and stays outside of it.
//!
//! ```text
//! runtime's process                        supervisor, on the host
//! stand_by() ── fork ────────────────────► runs
//!            ◄───────────────────── HERE ──
//! installs the filter
//!            ── HERE, with the listener ──►
//!            ◄───────────────────── HERE ──
//! becomes the container's runtime          lets the runtime's own calls proceed
//! starts the container ── first call ────► joins its network and control group, and serves it
//! ```
//!
//! The process that becomes the container's runtime installs the filter and passes the listener on.
//! So everything that the runtime starts in the container is under the filter from its first
//! instruction. Nothing in the container takes part in that: no file that could be replaced, and no
//! process that could be traced before the filter is in place. Each further process that a runtime
//! starts there comes into being in this way. All other processes of the container descend from
//! these. That is the proof for a router that does not trust containers, and no process has to be
//! inspected.
//!
//! Until the container makes its first call, the listener reports calls of the runtime and its
//! hooks. They are made unchanged.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use shunt_sys::seccomp::{self, Listener};
use shunt_sys::{daemonize, guarded, seqpacket};

use crate::supervise::{self, SuperviseError};
use crate::supervisor::{self, Call, NO_ROUTER, Record, Supervisor};

/// Starts a supervisor for this process and its descendants, which are under the filter from now
/// on. With `guards` it is the filter for programs that are not trusted. The supervisor asks the
/// router at that path, or none. Must be called while the process has one thread.
pub fn stand_by(router: Option<&Path>, guards: bool) -> Result<(), SuperviseError> {
    let kernel = |what| move |source| SuperviseError::Kernel { what, source };
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (near, far) = pair.map_err(kernel("a pair of sockets"))?;
    let place = router.unwrap_or(Path::new(NO_ROUTER)).to_owned();
    daemonize::beside(far, move |far| live(far, &place, guards))
        .map_err(kernel("a process for the supervisor"))?;
    // Wait for the supervisor before anything depends on it.
    if !is_there(&near) {
        return Err(SuperviseError::Gone);
    }
    let listener = supervise::install(if guards { guarded::watch } else { seccomp::watch })?;
    let passed = seqpacket::send(&near, HERE, &[listener.as_fd()]);
    drop(listener);
    if passed.is_ok() && is_there(&near) { Ok(()) } else { Err(SuperviseError::Abandoned) }
}

/// The message with which either side reports that it has what it needs.
const HERE: &[u8] = b"h";

/// Waits for the other side's message. Returns `false` if it has ended instead.
fn is_there(other: &OwnedFd) -> bool {
    let _ = poll(&mut [PollFd::new(other, PollFlags::IN)], None);
    let mut word = [0; 1];
    matches!(seqpacket::recv(other, &mut word), Ok((1, _)))
}

/// Runs the supervisor's process.
fn live(other: OwnedFd, router: &Path, guards: bool) {
    supervisor::begin_life();
    let Ok(record) = Record::new() else { return };
    if seqpacket::send(&other, HERE, &[]).is_err() {
        return;
    }
    let Some(listener) = supervise::receive(&other) else { return };
    // If this fails, the other side has ended, so no process continues under the filter.
    let _ = seqpacket::send(&other, HERE, &[]);
    drop(other);
    // From here on calls are reported and must be answered, whatever else fails. Without a router
    // they are made as always.
    let Some((first, network)) = await_container(&Arc::new(listener)) else { return };
    // The host's limits and counts by control group are to include this process in the container's.
    let _ = join_group(first.thread());
    let _ = fs::write("/proc/self/oom_score_adj", "-999");
    let joined = move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network));
    drop(network);
    let _ = supervisor::drop_privileges();
    let router = if joined.is_ok() { router } else { Path::new(NO_ROUTER) };
    Supervisor::new(record, router, guards).serve_from(first);
}

/// Waits for the first call of the container, and returns it with the container's network
/// namespace. That namespace differs from this process's, which is the host's. `None`: no process
/// is left under the filter.
fn await_container(listener: &Arc<Listener>) -> Option<(Call, File)> {
    let known = |network: &File| network.metadata().map(|it| (it.dev(), it.ino()));
    let own = File::open("/proc/self/ns/net").and_then(|network| known(&network));
    loop {
        let call = Call::next(listener, None)?;
        let network = File::open(format!("/proc/{}/ns/net", call.thread()));
        match (network, &own) {
            // While its call waits, the thread id cannot belong to another thread.
            (Ok(network), Ok(own)) if known(&network).is_ok_and(|it| it != *own) && call.waits() => {
                return Some((call, network));
            }
            _ => call.let_be(),
        }
    }
}

/// Moves this process to the control group (version 2) of another process.
fn join_group(process: u32) -> io::Result<()> {
    let Some(group) = shunt_sys::proc::control_group(process)? else { return Ok(()) };
    let unified = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let procs = unified.iter().map(|root| root.join(&group).join("cgroup.procs"));
    // A version 1 hierarchy also has cgroup.procs files, but no cgroup.controllers at its root.
    let is_unified = |root: &&Path| root.join("cgroup.controllers").is_file();
    match unified.iter().copied().zip(procs).find(|(root, _)| is_unified(root)) {
        Some((_, procs)) => fs::write(procs, std::process::id().to_string()),
        None => Ok(()),
    }
}
