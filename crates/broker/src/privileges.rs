//! The capabilities that a broker keeps once it listens. It reads what strangers send, so it holds no more than it needs, and of
//! that CAP_SYS_ADMIN, the widest, is effective only in the thread that enters a network namespace
//! ([`netns::inside`](shunt_sys::netns::inside)).

use std::path::Path;

use rustix::fs::stat;
use rustix::process::geteuid;
use rustix::thread::CapabilitySet;
use shunt_sys::{Result, capabilities};

/// Which network namespace a socket belongs to; sequence numbers of sockets, by a program in the kernel; in which
/// namespaces a process lives.
const EFFECTIVE: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::SYS_PTRACE);

/// To enter a network namespace whenever the first program of a container comes.
const PERMITTED: CapabilitySet = CapabilitySet::SYS_ADMIN;

/// To make and remove the socket in a directory of another user.
const OF_FILES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::FOWNER);

/// Gives up what the broker that listens at `socket` does not need. Threads that it starts inherit the rest.
pub(crate) fn give_up(socket: &Path) -> Result<()> {
    let mut effective = EFFECTIVE;
    let directory = socket.parent().unwrap_or(Path::new("/"));
    if stat(directory).is_ok_and(|found| found.st_uid != geteuid().as_raw()) {
        effective |= OF_FILES;
    }
    capabilities::keep_only(effective, PERMITTED)
}
