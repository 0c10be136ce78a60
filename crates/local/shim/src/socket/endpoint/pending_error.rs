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
