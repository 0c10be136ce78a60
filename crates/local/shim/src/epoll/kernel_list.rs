//! The kernel's interest list of an epoll instance, as the shim changes it.

use std::os::fd::RawFd;

use libc::epoll_event;

use crate::base::{errno, real};

/// The kernel's part of an instance.
#[derive(Default)]
pub(super) struct KernelList {
    /// The fd of the instance; -1 once it is closed.
    pub(super) fd: RawFd,
    /// The user data of the shim's descriptor in the list.
    pub(super) marker: u64,
}

impl KernelList {
    /// Returns whether this is the list of an instance that is tracked and not closed.
    pub(super) fn is_open(&self) -> bool {
        self.marker != 0 && self.fd >= 0
    }

    /// Changes the list: see [`change`].
    pub(super) fn change(&self, operation: i32, fd: RawFd, events: u32, data: u64) -> bool {
        change(self.fd, operation, fd, events, data)
    }
}

/// Changes the kernel's list of `instance` for the shim. Returns `false` if the kernel refused
/// that, which changes nothing: the registration has vanished, or its fd is closed while another
/// names the socket.
pub(super) fn change(instance: RawFd, operation: i32, fd: RawFd, events: u32, data: u64) -> bool {
    let before = errno::get();
    let mut event = epoll_event { events, u64: data };
    // SAFETY: an event of our own.
    let changed = unsafe { real::epoll_ctl(instance, operation, fd, &mut event) } == 0;
    errno::set(before);
    changed
}
