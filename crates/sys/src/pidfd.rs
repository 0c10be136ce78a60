//! Whether another process is alive, whatever its children hold of it.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Linux 6.5.
const SO_PEERPIDFD: i32 = 77;

/// The process that connected the Unix socket `fd`: readable once it has ended. `pid` is what the kernel recorded of it.
pub fn of_peer(fd: impl AsFd, pid: u32) -> Option<OwnedFd> {
    if let Ok((raw, _)) = crate::sockopt::read::<u32>(fd.as_fd(), libc::SOL_SOCKET, SO_PEERPIDFD) {
        // SAFETY: the kernel has just made this descriptor for us.
        return Some(unsafe { OwnedFd::from_raw_fd(raw as i32) });
    }
    pidfd_open(Pid::from_raw(pid as i32)?, PidfdFlags::empty()).ok()
}
