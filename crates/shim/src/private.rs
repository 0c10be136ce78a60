//! Descriptors that belong to the shim: high, close-on-exec, and out of the program's reach.

use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};

use crate::table::{self, Entry};

/// Private descriptors start here, where the limit allows: above what select(2) can name is best, and programs
/// take the lowest free number.
const HIGH: u64 = 1024;
/// ... or so far below the limit.
const BELOW_LIMIT: u64 = 128;
/// Peers' doorbells may take this part of what the program may open: the rest is its own (L8).
const SHARE: u64 = 8;

/// With fewer that it may open, a program could lack the very ones that are ours.
const FEW: u64 = 32;

/// Private descriptors now open.
static HELD: AtomicU64 = AtomicU64::new(0);

/// An owned private descriptor.
#[derive(Debug)]
pub(crate) struct PrivateFd(RawFd);

impl PrivateFd {
    /// Moves `fd` out of the program's way. `None` if the process has no descriptor left.
    pub(crate) fn adopt(fd: OwnedFd) -> Option<PrivateFd> {
        let high = fcntl_dupfd_cloexec(&fd, floor()).ok();
        close_owned(fd);
        let raw = high?.into_raw_fd();
        table::replace(raw, Entry::Private);
        HELD.fetch_add(1, Relaxed);
        Some(PrivateFd(raw))
    }

    /// The same for what a process may have thousands of: within the share of them that is ours.
    pub(crate) fn adopt_one_of_many(fd: OwnedFd) -> Option<PrivateFd> {
        if HELD.load(Relaxed) >= limit() / SHARE {
            close_owned(fd);
            return None;
        }
        PrivateFd::adopt(fd)
    }

    /// Its number.
    pub(crate) fn raw(&self) -> RawFd {
        self.0
    }

    /// Takes back what `into_raw` gave out.
    pub(crate) fn from_raw(raw: RawFd) -> PrivateFd {
        PrivateFd(raw)
    }

    /// Gives up ownership without closing; [`close_raw`](Self::close_raw) ends it.
    pub(crate) fn into_raw(self) -> RawFd {
        let raw = self.0;
        std::mem::forget(self);
        raw
    }

    /// Closes a descriptor that `into_raw` gave out; a negative one is nothing.
    pub(crate) fn close_raw(raw: RawFd) {
        if raw >= 0 && table::look_up(raw) == Entry::Private {
            table::replace(raw, Entry::None);
            HELD.fetch_sub(1, Relaxed);
            // SAFETY: it is ours (the table says so) and forgotten here.
            unsafe { rustix::io::close(raw) };
        }
    }

    /// Lends a descriptor that `into_raw` gave out.
    #[inline]
    pub(crate) fn with_raw<R>(raw: RawFd, use_it: impl FnOnce(BorrowedFd<'_>) -> R) -> R {
        // SAFETY: private descriptors stay open while their number is published; at worst, in a race with the
        // end of a peer, the call below meets a closed number and fails.
        use_it(unsafe { BorrowedFd::borrow_raw(raw) })
    }
}

impl Drop for PrivateFd {
    fn drop(&mut self) {
        PrivateFd::close_raw(self.0);
    }
}

impl AsFd for PrivateFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: owned by self, hence open.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

/// Where private descriptors start in this process; the number below is that of a handover, between exec and the start of
/// the next program.
pub(crate) fn floor() -> RawFd {
    HIGH.min(limit().saturating_sub(BELOW_LIMIT)).max(1) as RawFd
}

/// Whether the program may open so few descriptors that all of them are its own (L8).
pub(crate) fn are_scarce() -> bool {
    limit() < FEW
}

fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The program wants this number for itself: what is ours moves.
pub(crate) fn surrender(raw: RawFd) {
    // SAFETY: the table says that it is ours, hence open.
    let moved =
        fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(raw) }, 0).ok().and_then(PrivateFd::adopt);
    let new = moved.map_or(-1, PrivateFd::into_raw);
    table::replace(raw, Entry::None);
    HELD.fetch_sub(1, Relaxed);
    crate::waiter::renumber(raw, new);
    crate::control::renumber(raw, new);
    crate::family::renumber(raw, new);
}

/// Closes without libc, whose `close` is our own hook.
pub(crate) fn close_owned(fd: OwnedFd) {
    // SAFETY: the descriptor was owned and is given up here.
    unsafe { rustix::io::close(fd.into_raw_fd()) };
}

/// A descriptor of the program's, for the length of one call.
#[inline]
pub(crate) fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    debug_assert!(fd >= 0);
    // SAFETY: the program names it in a call; if it is not open the kernel answers EBADF, as it would have.
    unsafe { BorrowedFd::borrow_raw(fd) }
}
