//! Sleeping in the kernel for one endpoint, on its TCP socket and a doorbell at once.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, RawFd};

use libc::{c_short, pollfd, timespec};
use shunt_abi::page::Counter;

use crate::links::Attachment;
use crate::private::borrow;
use crate::waiter::{self, Slot};
use crate::{epoll, errno, process, real};

/// What a thread does to itself, but for a wilful sender. Language runtimes catch these, and without SA_RESTART.
const FAULTS: [c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT];

/// When a call with a time-out must give up. `None`: never.
pub(crate) type Deadline = Option<u64>;

/// The deadline of a call that begins now.
pub(crate) fn deadline(timeout_nanos: u64) -> Deadline {
    (timeout_nanos != 0).then(|| process::now().saturating_add(timeout_nanos))
}

/// How a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    /// By the doorbell, by TCP, or because a short step was over: look again.
    LookAgain {
        /// The kernel says that TCP has something.
        tcp: bool,
    },
    /// The deadline has passed.
    TimedOut,
    /// A signal handler ran, and the call must say so.
    Interrupted,
}

/// Sleeps until the doorbell of `slot`, `events` on the socket, the deadline, or `step` nanoseconds.
///
/// The caller has announced the sleep and looked once more.
pub(crate) fn sleep(
    fd: RawFd,
    events: c_short,
    slot: Option<Slot>,
    deadline: Deadline,
    step: Option<u64>,
) -> Woken {
    let now = process::now();
    let left = deadline.map(|deadline| deadline.saturating_sub(now));
    let nanos = match (left, step) {
        (Some(left), Some(step)) => Some(left.min(step)),
        (left, step) => left.or(step),
    };
    let mut fds = [
        pollfd { fd: borrow(fd).as_raw_fd(), events, revents: 0 },
        pollfd { fd: slot.map_or(-1, Slot::listener), events: libc::POLLIN, revents: 0 },
    ];
    process::count(Counter::Sleeps, 1);
    let before = errno::get();
    let timeout = nanos.map(as_timespec);
    let pointer = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: two descriptors of our own; the real function, so that cancellation works.
    let result = unsafe { real::ppoll(fds.as_mut_ptr(), 2, pointer, std::ptr::null()) };
    let failed = (result < 0).then(errno::get);
    errno::set(before);
    if fds[1].revents != 0
        && let Some(slot) = slot
    {
        slot.hear();
    }
    match failed {
        Some(libc::EINTR) if deadline.is_none() && every_handler_restarts() => {
            Woken::LookAgain { tcp: false }
        }
        Some(_) => Woken::Interrupted,
        None if fds[0].revents != 0 => Woken::LookAgain { tcp: true },
        None if result == 0 && left == nanos && left.is_some() => Woken::TimedOut,
        None => Woken::LookAgain { tcp: false },
    }
}

/// The slot of this thread and how long a step may be, given who else waits and what the peer knows.
pub(crate) fn step_for(at: &Attachment, slot: Option<Slot>, owns: bool) -> Option<u64> {
    let rung = slot.is_some_and(|slot| owns && at.link.view().is_known(at.link.side.other(), slot.0));
    if rung {
        return None;
    }
    process::count(Counter::DegradedSleeps, 1);
    Some(epoll::DEGRADED_NANOS)
}

/// The waiter of this thread, known to the broker if that can be.
pub(crate) fn thread_slot() -> Option<Slot> {
    let slot = waiter::of_this_thread()?;
    slot.register();
    Some(slot)
}

pub(crate) fn as_timespec(nanos: u64) -> timespec {
    timespec { tv_sec: (nanos / 1_000_000_000) as i64, tv_nsec: (nanos % 1_000_000_000) as i64 }
}

/// Whether a blocking receive or send goes on after a signal. ppoll never does by itself, so the handlers are asked:
/// the kernel does not say which one ran. With handlers of both kinds the interrupted call says so.
fn every_handler_restarts() -> bool {
    (1..=64).filter(|signal| !FAULTS.contains(signal)).all(|signal| {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: only asks; the structure is ours.
        let asked = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } == 0;
        // SAFETY: zeroed is a valid value, and the call has filled it in if it succeeded.
        let action = unsafe { action.assume_init() };
        let caught = asked && action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN;
        !caught || action.sa_flags & libc::SA_RESTART != 0
    })
}
