//! Sleeping in the kernel for one endpoint, on its TCP socket and a doorbell at once.

use std::os::fd::AsRawFd;

use libc::{c_short, pollfd, timespec};
use shunt_abi::page::Counter;
use shunt_abi::reason::Reason;

use crate::base::journal::Held;
use crate::base::private::borrow;
use crate::base::signal::{self, Ran};
use crate::base::waiter::{self, Slot};
use crate::base::{errno, process, real, spin, thread};
use crate::epoll;
use crate::life::{attach, idle, overdue};
use crate::ops::hold::Hold;
use crate::socket::endpoint::Endpoint;
use crate::socket::links::Attachment;

/// When a call with a time-out must give up. `None`: never.
pub(crate) type Deadline = Option<u64>;

/// The deadline of a call that begins now.
#[inline]
pub(crate) fn deadline(timeout_nanos: u64) -> Deadline {
    (timeout_nanos != 0).then(|| process::now().saturating_add(timeout_nanos))
}

/// The longest sleep of a thread for which there is no doorbell.
const UNHEARD_NANOS: u64 = 50_000_000;

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
    /// The limit of descriptors is so low that the kernel polls no two at a time.
    Refused,
    /// A signal handler ran. Only a call that has done nothing yet can begin anew.
    Signal { restarts: bool },
}

impl Woken {
    /// What a call returns now that has moved `done` bytes; `None`: it goes on.
    pub(crate) fn ends(self, done: usize) -> Option<Result<usize, i32>> {
        match self {
            Woken::LookAgain { .. } | Woken::Refused => None,
            _ if done > 0 => Some(Ok(done)),
            Woken::TimedOut => Some(Err(libc::EAGAIN)),
            Woken::Signal { restarts: true } => None,
            Woken::Signal { restarts: false } => Some(Err(libc::EINTR)),
        }
    }
}

/// Sleeps until the doorbell of `slot`, `events` on the socket that is held, the deadline, or `step` nanoseconds.
///
/// The caller has announced the sleep, as `held` says, and looked once more. Also one that waits for TCP alone hears the doorbell of
/// its thread: it is rung when the number is closed by which the kernel polls, and that looks the number up again each time it is
/// woken.
pub(crate) fn sleep(
    hold: &Hold,
    events: c_short,
    slot: Option<Slot>,
    deadline: Deadline,
    step: Option<u64>,
    held: Held,
) -> Woken {
    waiter::waiting(|| sleep_as(slot.or_else(waiter::of_this_thread), hold, events, deadline, step, held))
}

/// The same by the doorbell of `slot`, if that is to be had.
fn sleep_as(
    slot: Option<Slot>,
    hold: &Hold,
    events: c_short,
    deadline: Deadline,
    step: Option<u64>,
    held: Held,
) -> Woken {
    if let Some(ended) = by_signal(deadline) {
        return ended;
    }
    let unheard = slot.is_none().then_some(UNHEARD_NANOS);
    let now = process::now();
    let left = deadline.map(|deadline| deadline.saturating_sub(now));
    let nanos = [left, step, unheard, overdue::patience(), idle::patience(now)].into_iter().flatten().min();
    let fd = hold.fd();
    let mut fds = [
        pollfd { fd: borrow(fd).as_raw_fd(), events, revents: 0 },
        pollfd { fd: slot.map_or(-1, Slot::listener), events: libc::POLLIN, revents: 0 },
    ];
    process::count(Counter::Sleeps, 1);
    signal::ring_bell_on_signal(slot);
    let before = errno::get();
    let timeout = nanos.map(as_timespec);
    let pointer = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let result = signal::open(held, || {
        // SAFETY: two descriptors of our own; the real function, so that cancellation works.
        unsafe { real::ppoll(fds.as_mut_ptr(), 2, pointer, std::ptr::null()) }
    });
    let refused = result < 0 && errno::get() == libc::EINVAL;
    errno::set(before);
    thread::this().note_sleep(step.is_some(), result != 0);
    if result == 0 {
        overdue::look_if_due(process::now);
    }
    if refused {
        return Woken::Refused;
    }
    if fds[1].revents != 0
        && let Some(slot) = slot
    {
        slot.hear();
        overdue::note_waited();
    }
    // What is ready counts more than a handler, as in the kernel; the next sleep hears of that.
    match result {
        // And when the kernel looks again it finds what has the number by then.
        1.. => Woken::LookAgain { tcp: fds[0].revents != 0 && hold.fd() == fd },
        _ => match by_signal(deadline) {
            Some(ended) => ended,
            None if result < 0 => {
                Woken::Signal { restarts: deadline.is_none() && signal::unseen_handlers_restart() }
            }
            None if left == nanos && left.is_some() => Woken::TimedOut,
            None => Woken::LookAgain { tcp: false },
        },
    }
}

/// As a sleep that ends at once, once a handler that waits has run.
pub(crate) fn interrupted(deadline: Deadline) -> Woken {
    signal::open(Held::NOTHING, || ());
    by_signal(deadline).unwrap_or(Woken::LookAgain { tcp: true })
}

/// Whether a handler has run since the call began, or began anew. A call with a time-out never begins anew.
fn by_signal(deadline: Deadline) -> Option<Woken> {
    match signal::take_ran() {
        Ran::Nothing => None,
        Ran::Restarting => Some(Woken::Signal { restarts: deadline.is_none() }),
        Ran::Interrupting => Some(Woken::Signal { restarts: false }),
    }
}

/// The slot of this thread and how long a step may be, given who else waits and what the peer knows.
pub(crate) fn step_for(at: &Attachment, slot: Option<Slot>, owns: bool) -> Option<u64> {
    let slot = slot.filter(|_| owns);
    if slot.is_some_and(|slot| at.link.view().is_known(at.link.side.other(), slot.0)) {
        return None;
    }
    process::count(Counter::DegradedSleeps, 1);
    let in_a_row = thread::this().slept_unrung.get();
    Some(slot.map_or(epoll::DEGRADED_NANOS, |_| epoll::until_known(in_a_row)))
}

/// The waiter of this thread, known to the broker if that can be. For one who is about to sleep.
pub(crate) fn thread_slot() -> Option<Slot> {
    idle::look_if_due(process::now);
    let slot = waiter::of_this_thread()?;
    slot.register();
    Some(slot)
}

/// For who has no waiter, or none that the peer will ever know: with hundreds of threads, all those short sleeps would cost more
/// than TCP does. `false` if the connection is not off its link at once.
pub(crate) fn leave_to_tcp(endpoint: &Endpoint) -> bool {
    attach::go_back(endpoint, Reason::NoWaiter);
    !endpoint.is_attached()
}

/// For one who cannot sleep on a lane: see [`Woken::Refused`].
pub(crate) fn leave_if_refused(endpoint: &Endpoint, woken: Woken) {
    if woken == Woken::Refused {
        attach::bar(endpoint, Reason::DescriptorLimit);
    }
}

pub(crate) fn as_timespec(nanos: u64) -> timespec {
    timespec { tv_sec: (nanos / 1_000_000_000) as i64, tv_nsec: (nanos % 1_000_000_000) as i64 }
}

/// What comes before every sleep: looks at what is overdue, and spins until `ready` says so. `true` if it did.
pub(crate) fn spin(ready: impl FnMut() -> bool) -> bool {
    overdue::look_if_due(process::now);
    spin::spin(ready)
}

/// The same by whoever waits for what comes by lanes.
pub(crate) fn spin_for_lanes(ready: impl FnMut() -> bool) -> bool {
    let found = spin(ready);
    if found {
        overdue::note_waited();
    }
    found
}
