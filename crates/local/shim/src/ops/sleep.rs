//! Sleeping in the kernel for one endpoint, on its TCP socket and on a doorbell.

use std::os::fd::AsRawFd;

use libc::{c_short, pollfd, timespec};
use shunt_abi::page::Counter;
use shunt_abi::reason::Reason;

use crate::base::private::borrow;
use crate::base::signal::{self, Ran};
use crate::base::undo_log::Held;
use crate::base::waiter::{self, Slot};
use crate::base::{errno, process, real, spin, thread};
use crate::broker::{control, presence};
use crate::epoll;
use crate::life::{attach, idle, unread_timeout};
use crate::ops::socket_reference::SocketReference;
use crate::socket::endpoint::Endpoint;
use crate::socket::links::Attachment;

/// When a call with a timeout must give up. `None`: never.
pub(crate) type Deadline = Option<u64>;

/// Returns the deadline of a call that begins now. A timeout of 0 means none.
#[inline]
pub(crate) fn deadline(timeout_nanos: u64) -> Deadline {
    (timeout_nanos != 0).then(|| process::now().saturating_add(timeout_nanos))
}

/// The longest sleep of a thread that has no doorbell.
const UNHEARD_NANOS: u64 = 50_000_000;

/// How a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    /// By the doorbell, by TCP, or because a step was over. The caller checks again.
    LookAgain {
        /// The kernel has an event of TCP.
        tcp: bool,
    },
    /// The deadline has passed.
    TimedOut,
    /// The limit of descriptors is so low that the kernel does not poll two.
    Refused,
    /// A signal handler ran. Only a call that has done nothing yet can restart.
    Signal { restarts: bool },
}

impl Woken {
    /// Returns the result of a call that has moved `done` bytes, or `None` if it goes on.
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

/// Sleeps until the doorbell of `slot` is rung, the held socket has one of `events`, the deadline
/// is over, or `step` nanoseconds are.
///
/// The caller has announced the sleep, which `held` describes, and checked once more. A call that
/// waits for TCP alone sleeps with the doorbell of its thread. It is rung when the fd that the
/// kernel polls is closed, since the kernel looks that fd up again each time it is woken.
pub(crate) fn sleep(
    hold: &SocketReference,
    events: c_short,
    slot: Option<Slot>,
    deadline: Deadline,
    step: Option<u64>,
    held: Held,
) -> Woken {
    waiter::waiting(|| sleep_as(slot.or_else(waiter::of_this_thread), hold, events, deadline, step, held))
}

/// Sleeps with the doorbell of `slot`, if there is one.
fn sleep_as(
    slot: Option<Slot>,
    hold: &SocketReference,
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
    let bounds =
        [left, step, unheard, unread_timeout::patience(), idle::patience(now), presence::patience(now)];
    let nanos = bounds.into_iter().flatten().min();
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
        unread_timeout::check_if_due(process::now);
    }
    // The broker rings for some of its messages, and a sleep is cut into steps for others.
    if result == 0 || fds[1].revents != 0 {
        control::poll_inbox();
    }
    control::check_if_due(if result == 0 { process::now() } else { now });
    if refused {
        return Woken::Refused;
    }
    if fds[1].revents != 0
        && let Some(slot) = slot
    {
        slot.hear();
        unread_timeout::note_waited();
    }
    // A ready descriptor counts more than a handler, as in the kernel. The next sleep notices the
    // handler.
    match result {
        // When the kernel polls again, it finds the file that has the fd by then.
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

/// Returns as a sleep that ends immediately, after pending handlers have run.
pub(crate) fn interrupted(deadline: Deadline) -> Woken {
    signal::open(Held::NOTHING, || ());
    by_signal(deadline).unwrap_or(Woken::LookAgain { tcp: true })
}

/// Returns how a handler ends the call that has run since it began, or restarted. A call with a
/// timeout never restarts.
fn by_signal(deadline: Deadline) -> Option<Woken> {
    match signal::take_ran() {
        Ran::Nothing => None,
        Ran::Restarting => Some(Woken::Signal { restarts: deadline.is_none() }),
        Ran::Interrupting => Some(Woken::Signal { restarts: false }),
    }
}

/// Returns how long a step of a sleep may last, or `None` if the peer can ring the waiter. `owns`:
/// the endpoint's bytes wake it.
pub(crate) fn step_for(at: &Attachment, slot: Option<Slot>, owns: bool) -> Option<u64> {
    let slot = slot.filter(|_| owns);
    if slot.is_some_and(|slot| at.link.view().is_known(at.link.side.other(), slot.0)) {
        return None;
    }
    process::count(Counter::DegradedSleeps, 1);
    let in_a_row = thread::this().slept_unrung.get();
    Some(slot.map_or(epoll::DEGRADED_NANOS, |_| epoll::until_known(in_a_row)))
}

/// Returns the waiter of this thread, which is about to sleep. The broker gets to know it if
/// possible.
pub(crate) fn thread_slot() -> Option<Slot> {
    idle::check_if_due(process::now);
    let slot = waiter::of_this_thread()?;
    slot.register();
    Some(slot)
}

/// Has a connection fall back whose receiver has no waiter, or none that the peer will ever know.
/// With hundreds of threads, all the short sleeps would cost more than TCP does. Returns `false` if
/// the connection is still on its link.
pub(crate) fn leave_to_tcp(endpoint: &Endpoint) -> bool {
    attach::go_back(endpoint, Reason::NoWaiter);
    !endpoint.is_attached()
}

/// Keeps a connection on TCP for which the kernel refused a sleep: see [`Woken::Refused`].
pub(crate) fn leave_if_refused(endpoint: &Endpoint, woken: Woken) {
    if woken == Woken::Refused {
        attach::bar(endpoint, Reason::DescriptorLimit);
    }
}

pub(crate) fn as_timespec(nanos: u64) -> timespec {
    timespec { tv_sec: (nanos / 1_000_000_000) as i64, tv_nsec: (nanos % 1_000_000_000) as i64 }
}

/// Does what precedes every sleep: checks for overdue lanes, and spins until `ready` returns
/// `true`. Returns whether it did.
pub(crate) fn spin(ready: impl FnMut() -> bool) -> bool {
    unread_timeout::check_if_due(process::now);
    spin::spin(ready)
}

/// Spins in a call that waits for lanes, and notes that they ended the wait if they did.
pub(crate) fn spin_for_lanes(ready: impl FnMut() -> bool) -> bool {
    let found = spin(ready);
    if found {
        unread_timeout::note_waited();
    }
    found
}
