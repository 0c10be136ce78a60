//! The capabilities that a broker keeps once it listens. It parses messages of strangers, so it
//! keeps only those that it needs. The widest of them, CAP_SYS_ADMIN, is effective only in the
//! thread that enters a network namespace ([`netns::inside`](shunt_sys::netns::inside)).

use std::path::Path;

use rustix::fs::stat;
use rustix::process::geteuid;
use rustix::thread::CapabilitySet;
use shunt_sys::{Result, capabilities};

/// Needed to find the network namespace of a socket, to read sequence numbers with a BPF program,
/// and to find the namespaces of a process.
const EFFECTIVE: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::SYS_PTRACE);

/// Needed to enter a network namespace when the first program of a container connects.
const PERMITTED: CapabilitySet = CapabilitySet::SYS_ADMIN;

/// Needed to make and remove the socket in a directory of another user.
const OF_FILES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::FOWNER);

/// Drops the capabilities that the broker listening at `socket` does not need. Threads that it
/// starts inherit the rest.
pub(crate) fn give_up(socket: &Path) -> Result<()> {
    let mut effective = EFFECTIVE;
    let directory = socket.parent().unwrap_or(Path::new("/"));
    if stat(directory).is_ok_and(|found| found.st_uid != geteuid().as_raw()) {
        effective |= OF_FILES;
    }
    capabilities::keep_only(effective, PERMITTED)
}
