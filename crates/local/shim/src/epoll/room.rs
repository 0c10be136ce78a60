//! The registrations of an epoll instance whose lanes have no room.

use std::os::fd::RawFd;

use crate::socket::stall;

/// Registrations whose lanes have no room for the bytes that the program wants to send.
#[derive(Default)]
pub(super) struct RoomWaits {
    pub(super) fds: Vec<RawFd>,
    /// When they were last checked by a wait that did not sleep.
    pub(super) checked_at: u64,
}

impl RoomWaits {
    pub(super) fn add(&mut self, fd: RawFd) {
        self.fds.push(fd);
    }

    /// Changes the fd of a registration.
    pub(super) fn rename(&mut self, from: RawFd, to: RawFd) {
        self.fds.iter_mut().filter(|fd| **fd == from).for_each(|fd| *fd = to);
    }

    /// Returns whether a wait that does not sleep must check them at the time `now`.
    #[inline]
    pub(super) fn is_due(&self, now: u64) -> bool {
        !self.fds.is_empty() && now.saturating_sub(self.checked_at) >= stall::AWAKE_LOOK_NANOS
    }
}
