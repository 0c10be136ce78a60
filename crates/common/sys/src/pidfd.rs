//! Pidfds, which show that another process has ended even if its children still hold its
//! descriptors.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A socket option since Linux 6.5.
const SO_PEERPIDFD: i32 = 77;

/// Returns a pidfd of the process that connected the Unix socket `fd`; it polls readable after the
/// process has ended. `pid` is the process id that the kernel recorded, for kernels without
/// SO_PEERPIDFD.
pub fn of_peer(fd: impl AsFd, pid: u32) -> Option<OwnedFd> {
    if let Ok((raw, _)) = crate::sockopt::read::<u32>(fd.as_fd(), libc::SOL_SOCKET, SO_PEERPIDFD) {
        // SAFETY: the kernel has just made this descriptor for us.
        return Some(unsafe { OwnedFd::from_raw_fd(raw as i32) });
    }
    pidfd_open(Pid::from_raw(pid as i32)?, PidfdFlags::empty()).ok()
}
