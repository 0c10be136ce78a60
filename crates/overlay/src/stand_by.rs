//! A supervisor on the host, for a container that is about to be started: it is there before the container, and stays outside.
//!
//! Whoever becomes the container's runtime puts itself under the filter and leaves the listener here. So everything that the runtime
//! starts in the container is under the filter from its first instruction, and nothing in the container has a part in that: no file that
//! could be another, no process that could be traced before it is under it. The same holds of each further process that a runtime starts.
//! Who else is in the container descends from these. That is the proof for a router that does not trust containers; nobody has to be
//! looked at.
//!
//! Until the container makes its first call, what is shown are calls of the runtime's and its hooks'. They are made as they are.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space, set_no_new_privs};
use shunt_sys::seccomp::{self, Listener};
use shunt_sys::{apart, guarded, seqpacket};

use crate::supervise::{self, SuperviseError};
use crate::supervisor::{self, Call, NO_ROUTER, Supervisor};

/// Has a supervisor stand by for what this process becomes and starts, which is under the filter from now on; `guards`: under that for
/// programs that are not trusted. The supervisor asks the router at that place, or none. Must be called while the process has one thread.
pub fn stand_by(router: Option<&Path>, guards: bool) -> Result<(), SuperviseError> {
    let kernel = |what| move |source| SuperviseError::Kernel { what, source };
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (near, far) = pair.map_err(kernel("a pair of sockets"))?;
    let place = router.unwrap_or(Path::new(NO_ROUTER)).to_owned();
    apart::beside(far, move |far| live(far, &place, guards))
        .map_err(kernel("a process for the supervisor"))?;
    // It is there before anything leans on it.
    if !is_there(&near) {
        return Err(SuperviseError::Gone);
    }
    let listener = supervise::install(if guards { guarded::watch } else { seccomp::watch })?;
    let passed = seqpacket::send(&near, HERE, &[listener.as_fd()]);
    drop(listener);
    if passed.is_ok() && is_there(&near) { Ok(()) } else { Err(SuperviseError::Abandoned) }
}

/// Either side's word: it is there, and has what it needs.
const HERE: &[u8] = b"h";

/// Waits for the other side's word; whether it came.
fn is_there(other: &OwnedFd) -> bool {
    let _ = poll(&mut [PollFd::new(other, PollFlags::IN)], None);
    let mut word = [0; 1];
    matches!(seqpacket::recv(other, &mut word), Ok((1, _)))
}

/// The life of the supervisor's process.
fn live(other: OwnedFd, router: &Path, guards: bool) {
    supervisor::begin_life();
    if seqpacket::send(&other, HERE, &[]).is_err() {
        return;
    }
    let Some(listener) = supervise::receive(&other) else { return };
    // Should that fail, nobody goes on under the filter.
    let _ = seqpacket::send(&other, HERE, &[]);
    drop(other);
    // From here on calls are shown, and have to be answered, whatever else fails: without a router they are made as always.
    let Some((first, network)) = await_container(&Arc::new(listener)) else { return };
    // What the host counts by group is to be the container's.
    let _ = join_group(first.thread());
    let _ = fs::write("/proc/self/oom_score_adj", "-999");
    let joined = move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network));
    drop(network);
    let _ = set_no_new_privs(true).and_then(|()| supervisor::drop_privileges());
    let router = if joined.is_ok() { router } else { Path::new(NO_ROUTER) };
    Supervisor::new(router, guards).serve_from(first);
}

/// The first call that the container makes, and its network namespace: another than this process's, which is the host's. None: there
/// is nobody left who could make one.
fn await_container(listener: &Arc<Listener>) -> Option<(Call, File)> {
    let known = |network: &File| network.metadata().map(|it| (it.dev(), it.ino()));
    let own = File::open("/proc/self/ns/net").and_then(|network| known(&network));
    loop {
        let call = Call::next(listener)?;
        let network = File::open(format!("/proc/{}/ns/net", call.thread()));
        match (network, &own) {
            // The thread is still that one if its call waits.
            (Ok(network), Ok(own)) if known(&network).is_ok_and(|it| it != *own) && call.waits() => {
                return Some((call, network));
            }
            _ => call.let_be(),
        }
    }
}

/// Moves this process to the control group (version 2) of another.
fn join_group(process: u32) -> io::Result<()> {
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup"))?;
    let Some(group) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else { return Ok(()) };
    let unified = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let procs = unified.iter().map(|root| root.join(group).join("cgroup.procs"));
    // In a tree of version 1 there is a file of that name as well, but no list of controllers at its root.
    let is_unified = |root: &&Path| root.join("cgroup.controllers").is_file();
    match unified.iter().copied().zip(procs).find(|(root, _)| is_unified(root)) {
        Some((_, procs)) => fs::write(procs, std::process::id().to_string()),
        None => Ok(()),
    }
}
