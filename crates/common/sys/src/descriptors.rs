//! Descriptors that the program before an exec has left to this one.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::{Errno, Result};

/// Takes all descriptors behind the three standard ones, by their fds, and sets them to close on
/// exec. Those that are dropped are closed.
///
/// Must be called at the start of the program, before any of its code has opened a descriptor.
/// Fails with EBUSY the second time.
pub fn inherited() -> Result<BTreeMap<i32, OwnedFd>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Relaxed) {
        return Err(Errno::BUSY);
    }
    let opened =
        openat(rustix::fs::CWD, "/proc/self/fd", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(&opened)? {
        let name = entry?.file_name().to_str().ok().and_then(|name| name.parse::<i32>().ok());
        found.extend(name.filter(|fd| *fd > 2 && *fd != opened.as_raw_fd()));
    }
    drop(opened);
    let mut taken = BTreeMap::new();
    for fd in found {
        // SAFETY: it was open before any code of this program opened one, so no code owns it. It
        // is taken once.
        let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
        match fcntl_setfd(&descriptor, FdFlags::CLOEXEC) {
            Ok(()) => drop(taken.insert(fd, descriptor)),
            // The directory's own iterator had it.
            Err(_) => std::mem::forget(descriptor),
        }
    }
    Ok(taken)
}
