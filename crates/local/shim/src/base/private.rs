//! Descriptors that belong to the shim: high, close-on-exec, and out of the program's reach.
//!
//! A thread may close such a descriptor while another one is about to use it, and the number may be
//! reused immediately. So users borrow the descriptor ([`PrivateFd::lend`]), and a closer waits for
//! the borrows that began before the number was removed from its place:
//!
//! ```text
//! borrower                        closer
//!   LENT[epoch] += 1
//!   read the place: fd 1030
//!                                 store -1 in the place
//!                                 TURN += 1: later borrows count in the next epoch
//!   use fd 1030                   wait until LENT[old epoch] is 0
//!   LENT[epoch] -= 1
//!                                 close(1030)
//! ```

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};

use crate::base::lock::Lock;
use crate::base::rank;
use crate::base::table::{self, Entry};

/// Private descriptors start here, if the limit allows: above FD_SETSIZE, out of the way of
/// select(2) and of programs, which get the lowest free descriptors.
const HIGH: u64 = 1024;
/// Otherwise they start so far below the limit.
const BELOW_LIMIT: u64 = 128;
/// Doorbells of peers may take one part in `SHARE` of the program's descriptor limit. The rest is
/// for the program (L8).
const SHARE: u64 = 8;

/// With a limit below this, the shim's descriptors could be the ones that the program lacks.
const FEW: u64 = 32;

/// Number of open private descriptors.
static HELD: AtomicU64 = AtomicU64::new(0);

/// Borrows in progress of descriptors that other threads may close. Each counts in the epoch
/// (`TURN`, modulo 2) in which it began.
static LENT: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
static TURN: AtomicUsize = AtomicUsize::new(0);
/// Held by the one thread that waits for the borrows of an epoch.
static WAITING: Lock<(), { rank::PRIVATE }> = Lock::new(());

/// An owned private descriptor.
#[derive(Debug)]
pub(crate) struct PrivateFd(RawFd);

impl PrivateFd {
    /// Moves `fd` to a high descriptor. Returns `None` if the process has no descriptor left.
    pub(crate) fn adopt(fd: OwnedFd) -> Option<PrivateFd> {
        let high = PrivateFd::duplicate(fd.as_raw_fd());
        close_owned(fd);
        high
    }

    /// Duplicates the program's descriptor `fd`. Returns `None` if the process has no descriptor
    /// left, or `fd` is not open.
    pub(crate) fn duplicate(fd: RawFd) -> Option<PrivateFd> {
        let raw = fcntl_dupfd_cloexec(borrow(fd), floor()).ok()?.into_raw_fd();
        table::replace(raw, Entry::Private);
        HELD.fetch_add(1, Relaxed);
        Some(PrivateFd(raw))
    }

    /// Duplicates the program's descriptor `fd` to the number `raw`. Returns `None` if that is not
    /// free.
    #[cold]
    pub(crate) fn duplicate_to(fd: RawFd, raw: RawFd) -> Option<PrivateFd> {
        let made = fcntl_dupfd_cloexec(borrow(fd), raw).ok()?;
        if made.as_raw_fd() != raw {
            close_owned(made);
            return None;
        }
        table::replace(raw, Entry::Private);
        HELD.fetch_add(1, Relaxed);
        Some(PrivateFd(made.into_raw_fd()))
    }

    /// Moves a peer's descriptor, of which the peer `has` so many already, to a high one. Returns
    /// `None` also if that would exceed the shim's share of descriptors, or two thirds of what
    /// other peers have left of the share.
    pub(crate) fn adopt_one_of_many(fd: OwnedFd, has: usize) -> Option<PrivateFd> {
        if !may_have_more(has as u64, HELD.load(Relaxed), limit()) {
            close_owned(fd);
            return None;
        }
        PrivateFd::adopt(fd)
    }

    /// Returns the file descriptor.
    pub(crate) fn raw(&self) -> RawFd {
        self.0
    }

    /// Takes ownership of a descriptor that `into_raw` returned.
    pub(crate) fn from_raw(raw: RawFd) -> PrivateFd {
        PrivateFd(raw)
    }

    /// Gives up ownership without closing. Use [`close_raw`](Self::close_raw) to close the
    /// descriptor.
    pub(crate) fn into_raw(self) -> RawFd {
        let raw = self.0;
        std::mem::forget(self);
        raw
    }

    /// Closes a descriptor that `into_raw` returned. A negative number is ignored.
    pub(crate) fn close_raw(raw: RawFd) {
        if raw >= 0 && table::look_up(raw) == Entry::Private {
            table::replace(raw, Entry::None);
            HELD.fetch_sub(1, Relaxed);
            wait_for_borrowers();
            // SAFETY: the table says that the descriptor is the shim's, and no place refers to it
            // any more.
            unsafe { rustix::io::close(raw) };
        }
    }

    /// Lends the descriptor stored at `place`, if there is one. The descriptor stays open until
    /// `use_it` returns, even if another thread changes `place` meanwhile. So `use_it` must neither
    /// wait nor close a private descriptor.
    #[inline]
    pub(crate) fn lend<R>(place: &AtomicI32, use_it: impl FnOnce(BorrowedFd<'_>) -> R) -> Option<R> {
        let turn = loop {
            let turn = TURN.load(SeqCst) & 1;
            LENT[turn].fetch_add(1, SeqCst);
            if TURN.load(SeqCst) & 1 == turn {
                break turn;
            }
            LENT[turn].fetch_sub(1, SeqCst);
        };
        let raw = place.load(SeqCst);
        // SAFETY: a private descriptor is open while any place stores it, and until all its
        // borrowers are done.
        let result = (raw >= 0).then(|| use_it(unsafe { BorrowedFd::borrow_raw(raw) }));
        LENT[turn].fetch_sub(1, SeqCst);
        result
    }
}

/// Waits until no thread uses a descriptor that has been removed from its place. Threads that
/// borrow meanwhile read the new content of the place, and count in the next epoch.
fn wait_for_borrowers() {
    let _one_at_a_time = WAITING.lock();
    let before = TURN.fetch_add(1, SeqCst) & 1;
    while LENT[before].load(SeqCst) > 0 {
        rustix::thread::sched_yield();
    }
}

/// Forgets the borrows in a forked child, where the borrowing threads do not exist.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn after_fork_in_child() {
    // SAFETY: the caller's promise.
    unsafe { WAITING.reset() };
    LENT.iter().for_each(|lent| lent.store(0, Relaxed));
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

/// Returns whether a peer that `has` so many descriptors may get another, if all peers together
/// have `held`.
fn may_have_more(has: u64, held: u64, limit: u64) -> bool {
    has < 2 * (limit / SHARE).saturating_sub(held)
}

/// Returns the lowest number for private descriptors in this process. The number below it is the
/// handover's, between exec and the start of the next program.
pub(crate) fn floor() -> RawFd {
    HIGH.min(limit().saturating_sub(BELOW_LIMIT)).max(1) as RawFd
}

/// Returns whether any private descriptor is open.
pub(crate) fn are_held() -> bool {
    HELD.load(Relaxed) > 0
}

/// Returns whether the descriptor limit is so low that the program needs all descriptors itself
/// (L8).
pub(crate) fn are_scarce() -> bool {
    limit() < FEW
}

fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Moves a private descriptor, because the program wants the number `raw` for itself. `renumber`
/// stores the new number, or -1, in all places that had the old one.
pub(crate) fn surrender(raw: RawFd, renumber: impl FnOnce(RawFd)) {
    // SAFETY: the table says that it is the shim's descriptor, hence open.
    let moved =
        fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(raw) }, 0).ok().and_then(PrivateFd::adopt);
    let new = moved.map_or(-1, PrivateFd::into_raw);
    table::replace(raw, Entry::None);
    HELD.fetch_sub(1, Relaxed);
    renumber(new);
    wait_for_borrowers();
}

/// Closes without libc, whose `close` is a hook of this library.
pub(crate) fn close_owned(fd: OwnedFd) {
    // SAFETY: the descriptor was owned and is given up here.
    unsafe { rustix::io::close(fd.into_raw_fd()) };
}

/// Borrows a descriptor that the program passed to a call, for the length of that call. The
/// descriptor need not be open: then the kernel refuses it.
#[inline]
pub(crate) fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    /// Stands for all negative numbers, which `BorrowedFd` cannot hold. No descriptor table reaches
    /// this number either.
    const NONE: RawFd = RawFd::MAX;
    let fd = if fd < 0 { NONE } else { fd };
    // SAFETY: the number is not negative. If it is not open, the kernel returns EBADF, as it would
    // have without the shim.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::signal::Shield;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    fn is_open(raw: RawFd) -> bool {
        // SAFETY: fails with EBADF if it is not open.
        rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(raw) }).is_ok()
    }

    /// A doorbell is rung by reading eight bytes from its descriptor. A reused number would be read
    /// instead.
    #[test]
    fn a_number_is_nobody_elses_while_it_is_lent() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let _shield = Shield::raise();
        let raw = PrivateFd::adopt(reader.into()).unwrap().into_raw();
        let place = AtomicI32::new(raw);
        let (place, (begun, begins), (end, ends)) = (&place, channel(), channel::<()>());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                PrivateFd::lend(place, |_| {
                    begun.send(()).unwrap();
                    ends.recv().unwrap();
                    assert!(is_open(raw));
                })
            });
            begins.recv().unwrap();
            let closer = scope.spawn(|| {
                let _shield = Shield::raise();
                PrivateFd::close_raw(place.swap(-1, SeqCst));
            });
            // The closer has begun to wait. A thread that borrows now finds no descriptor.
            let deadline = Instant::now() + Duration::from_secs(30);
            while TURN.load(SeqCst) == 0 {
                assert!(Instant::now() < deadline, "closed although it is lent");
                std::thread::yield_now();
            }
            assert!(is_open(raw) && !closer.is_finished());
            assert_eq!(PrivateFd::lend(place, |_| ()), None);
            end.send(()).unwrap();
            closer.join().unwrap();
        });
        assert!(!is_open(raw));
    }

    /// Checks that two peers cannot take everything from a third.
    #[test]
    fn each_peer_leaves_something_to_others() {
        let mut held = 3;
        let mut taken = Vec::new();
        for _ in 0..5 {
            let mut has = 0;
            while has < 64 && may_have_more(has, held, 1024) {
                (has, held) = (has + 1, held + 1);
            }
            taken.push(has);
        }
        assert_eq!(taken, [64, 41, 14, 4, 2]);
        assert!(!may_have_more(0, 128, 1024));
    }

    #[test]
    fn any_number_can_be_asked_about() {
        for fd in [-1, RawFd::MIN, -100, RawFd::MAX, 1 << 28, 1 << 20] {
            let outcome = rustix::io::fcntl_getfd(borrow(fd));
            assert_eq!(outcome.err(), Some(rustix::io::Errno::BADF), "{fd}");
        }
    }
}
