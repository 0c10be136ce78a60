//! An error that the shim must report because the kernel cannot be made to report it.
//!
//! ```text
//!            set                       take
//!   none ---------> pending(errno) ---------> none
//! ```
//!
//! Example: a peer dies while bytes of this end are unread in its lane. TCP would have reset the
//! connection, but this end's kernel has received only a FIN. So ECONNRESET is pending, and the
//! next call reports it once.
//!
//! The error may *replace* one of the kernel's. Another process that shares the socket can then
//! take the kernel's error, and this one is no longer reported.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::*};

use shunt_ring::LaneHeader;

use super::Endpoint;
use super::phase::HAS_ERROR;
use crate::base::kernel;

/// A pending error of one socket.
#[derive(Debug, Default)]
pub(super) struct PendingError {
    /// The errno, or 0 if no error is pending.
    errno: AtomicI32,
    /// Set when the pending error replaces one of the kernel's. It means nothing without an error.
    replaces_kernels: AtomicBool,
}

impl PendingError {
    /// Sets the error. A later one replaces it.
    pub(super) fn set(&self, errno: i32, replaces_kernels: bool) {
        self.replaces_kernels.store(replaces_kernels, Relaxed);
        self.errno.store(errno, Relaxed);
    }

    /// Returns the errno, or 0 if no error is pending.
    #[inline]
    pub(super) fn errno(&self) -> i32 {
        self.errno.load(Relaxed)
    }

    /// Returns whether an error is pending.
    #[inline]
    pub(super) fn is_set(&self) -> bool {
        self.errno() != 0
    }

    /// Returns whether the error replaces one of the kernel's.
    pub(super) fn replaces_kernels(&self) -> bool {
        self.replaces_kernels.load(Relaxed)
    }

    /// Takes the error. Of several threads, one gets it.
    pub(super) fn take(&self) -> Option<i32> {
        Some(self.errno.swap(0, Relaxed)).filter(|errno| *errno != 0)
    }

    pub(super) fn reset(&self) {
        let PendingError { errno, replaces_kernels } = self;
        errno.store(0, Relaxed);
        replaces_kernels.store(false, Relaxed);
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.set(libc::EPIPE, true);
    }
}

impl Endpoint {
    /// Sets an error that the next call reports. If the kernel has an error now, this one replaces
    /// it.
    pub(crate) fn owe(&self, fd: i32, errno: i32) {
        self.pending_error.set(errno, kernel::has_error(fd));
        // The flag is set after the error, and cleared before the error is taken. So the flag is
        // set whenever there is an error.
        self.identity.word.set(HAS_ERROR);
    }

    /// Returns whether an error is pending.
    #[inline]
    pub(crate) fn owes(&self) -> bool {
        self.pending_error.is_set()
    }

    /// Returns whether an error is pending that the kernel does not show.
    pub(crate) fn owes_alone(&self) -> bool {
        self.owes()
            && !self.pending_error.replaces_kernels()
            && !self.shared_lane().is_some_and(LaneHeader::is_reset_told)
    }

    /// Returns the pending error. Returns 0 if there is none, or if another process that shares the
    /// socket has reported it.
    pub(crate) fn still_owed(&self, fd: i32) -> i32 {
        let is_kernels = self.pending_error.replaces_kernels() && kernel::has_error(fd);
        if is_kernels || self.owes_alone() { self.pending_error.errno() } else { 0 }
    }

    /// Returns the lane in which the processes that share the socket note that they have reported
    /// its reset. Only the shim knows of this reset.
    fn shared_lane(&self) -> Option<&'static LaneHeader> {
        self.tx.lock().at.map(|at| at.outgoing().0)
    }

    /// Takes the pending error, to report it to the program.
    #[inline]
    pub(crate) fn take_owed(&self, fd: i32) -> Option<i32> {
        self.tell_owed(|| kernel::take_error(fd).is_some())
    }

    /// Takes the pending error for a caller that takes the kernel's error by `take_kernels`. That
    /// closure returns whether the kernel still had an error.
    pub(crate) fn tell_owed(&self, take_kernels: impl FnOnce() -> bool) -> Option<i32> {
        if !self.owes() {
            return None;
        }
        let stands_alone = self.owes_alone();
        self.identity.word.clear(HAS_ERROR);
        let errno = self.pending_error.take();
        self.shared_lane().into_iter().for_each(LaneHeader::note_reset_told);
        errno.filter(|_| take_kernels() || stands_alone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_taken_once() {
        let error = PendingError::default();
        assert_eq!(error.take(), None);
        error.set(libc::ECONNRESET, false);
        assert!(error.is_set() && !error.replaces_kernels());
        assert_eq!((error.take(), error.take()), (Some(libc::ECONNRESET), None));
        assert!(!error.is_set());
    }

    #[test]
    fn a_later_error_replaces_an_earlier_one() {
        let error = PendingError::default();
        error.set(libc::ECONNRESET, true);
        error.set(libc::EPIPE, false);
        assert_eq!((error.errno(), error.replaces_kernels()), (libc::EPIPE, false));
    }
}
