//! Descriptors that belong to the shim: high, close-on-exec, and out of the program's reach.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};

use crate::base::lock::Lock;
use crate::base::table::{self, Entry};

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

/// Calls under way on descriptors that others may close: each counts in the turn in which it began.
static LENT: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];
static TURN: AtomicUsize = AtomicUsize::new(0);
/// One thread at a time waits for those of a turn.
static WAITING: Lock<()> = Lock::new(());

/// An owned private descriptor.
#[derive(Debug)]
pub(crate) struct PrivateFd(RawFd);

impl PrivateFd {
    /// Moves `fd` out of the program's way. `None` if the process has no descriptor left.
    pub(crate) fn adopt(fd: OwnedFd) -> Option<PrivateFd> {
        let high = PrivateFd::duplicate(fd.as_raw_fd());
        close_owned(fd);
        high
    }

    /// One more descriptor of the file that `fd` of the program's names. `None` as above, or if it names none.
    pub(crate) fn duplicate(fd: RawFd) -> Option<PrivateFd> {
        let raw = fcntl_dupfd_cloexec(borrow(fd), floor()).ok()?.into_raw_fd();
        table::replace(raw, Entry::Private);
        HELD.fetch_add(1, Relaxed);
        Some(PrivateFd(raw))
    }

    /// The same for a peer's, which may have thousands of them, and `has` so many: within the share of descriptors that is ours, and
    /// of that what leaves half as much to other peers.
    pub(crate) fn adopt_one_of_many(fd: OwnedFd, has: usize) -> Option<PrivateFd> {
        if !may_have_more(has as u64, HELD.load(Relaxed), limit()) {
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
            wait_for_borrowers();
            // SAFETY: it is ours (the table says so) and forgotten here.
            unsafe { rustix::io::close(raw) };
        }
    }

    /// Lends the descriptor whose number stands at `place`, if one does. Until `use_it` is over the number is not another's, whatever
    /// happens to `place`; so it must neither wait nor close a private descriptor.
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
        // SAFETY: private descriptors are open as long as their number stands anywhere, and until all borrowers are done.
        let result = (raw >= 0).then(|| use_it(unsafe { BorrowedFd::borrow_raw(raw) }));
        LENT[turn].fetch_sub(1, SeqCst);
        result
    }
}

/// Waits until nobody uses a number any more that stands nowhere now. Those who borrow meanwhile find what stands there instead, and
/// count in the next turn.
fn wait_for_borrowers() {
    let _one_at_a_time = WAITING.lock();
    let before = TURN.fetch_add(1, SeqCst) & 1;
    while LENT[before].load(SeqCst) > 0 {
        rustix::thread::sched_yield();
    }
}

/// Those who borrowed are not in a forked child.
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

/// Whether one that `has` so many of our descriptors may have another, with `held` in all.
fn may_have_more(has: u64, held: u64, limit: u64) -> bool {
    has < 2 * (limit / SHARE).saturating_sub(held)
}

/// Where private descriptors start in this process; the number below is that of a handover, between exec and the start of
/// the next program.
pub(crate) fn floor() -> RawFd {
    HIGH.min(limit().saturating_sub(BELOW_LIMIT)).max(1) as RawFd
}

/// Whether there is any.
pub(crate) fn are_held() -> bool {
    HELD.load(Relaxed) > 0
}

/// Whether the program may open so few descriptors that all of them are its own (L8).
pub(crate) fn are_scarce() -> bool {
    limit() < FEW
}

fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The program wants this number for itself: what is ours moves, and `renumber` has whoever knows it by that use the new one.
pub(crate) fn surrender(raw: RawFd, renumber: impl FnOnce(RawFd)) {
    // SAFETY: the table says that it is ours, hence open.
    let moved =
        fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(raw) }, 0).ok().and_then(PrivateFd::adopt);
    let new = moved.map_or(-1, PrivateFd::into_raw);
    table::replace(raw, Entry::None);
    HELD.fetch_sub(1, Relaxed);
    renumber(new);
    wait_for_borrowers();
}

/// Closes without libc, whose `close` is our own hook.
pub(crate) fn close_owned(fd: OwnedFd) {
    // SAFETY: the descriptor was owned and is given up here.
    unsafe { rustix::io::close(fd.into_raw_fd()) };
}

/// A number that the program names in a call, for the length of it. Any number: one that is not open is the kernel's to refuse.
#[inline]
pub(crate) fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    /// The types have no room for a negative number. This one is as little a descriptor: no table reaches as far.
    const NONE: RawFd = RawFd::MAX;
    let fd = if fd < 0 { NONE } else { fd };
    // SAFETY: it is not negative. If it is not open the kernel answers EBADF, as it would have.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::signal::Shield;
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    fn is_open(raw: RawFd) -> bool {
        // SAFETY: the kernel says whether it is open.
        rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(raw) }).is_ok()
    }

    /// What rings a doorbell reads eight bytes of it: of whatever has its number by then.
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
            // It has begun to wait; and whoever comes now finds that there is nothing.
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

    /// What two clients cannot take from a third.
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
