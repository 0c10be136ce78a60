//! poll and ppoll, and the part of select that uses them.
//!
//! The shim and the kernel answer together:
//!
//! - For a connection on a link (`Watch::watched`), the shim answers POLLIN and POLLOUT of its
//!   lanes, and the kernel answers for its TCP socket.
//! - A connection on TCP (`Watch::entered`) is the kernel's. It is marked as inside the kernel
//!   (L4), so that it does not come onto a lane while the call sleeps.
//! - Everything else is the kernel's.
//!
//! A call with connections on lanes makes rounds until one finds something. `ops/poll_step.rs`
//! decides what a round does next, and [`Call`] does it:
//!
//! ```text
//! answer        fills in the events of lanes
//! announce      if there were none, makes this thread the waiter of the lanes
//! prepare       copies the array for the kernel: without POLLOUT of lanes, and with the doorbell
//! ask_kernel    sleeps until a descriptor or the doorbell is ready
//! merge         adds the kernel's events to those of lanes
//! ```
//!
//! `watch` has what a call watches, and `lanes` the events of lanes.

use std::ffi::c_short;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use libc::{pollfd, sigset_t};
use shunt_abi::page::Counter;
use shunt_abi::reason::Reason;

use crate::base::private::borrow;
use crate::base::signal::{self, Ran, Shield};
use crate::base::table::{self, Entry};
use crate::base::undo_log::Held;
use crate::base::waiter::{self, Slot};
use crate::base::{errno, kernel, process, real, thread};
use crate::broker::{control, presence};
use crate::epoll;
use crate::life::{attach, idle, resets, unread_timeout};
use crate::ops::poll_step::{self, Asked, Facts, Found, Step};
use crate::ops::sleep::{Deadline, as_timespec};
use crate::ops::{sleep, undo};
use crate::socket::endpoint::{self, Endpoint};
use lanes::{announce, answer, merge, prepare};
pub(crate) use watch::Watch;
use watch::examine;

mod lanes;
mod watch;

const IN: c_short = libc::POLLIN | libc::POLLRDNORM;
const OUT: c_short = libc::POLLOUT | libc::POLLWRNORM;
/// Of so many calls that lanes alone can answer, one queries the kernel about the other events too.
const ASK_KERNEL_EVERY: u32 = 8;

/// Polls. `timeout` is in nanoseconds, `None` for ever. `kernel` makes the program's own call.
pub(crate) fn poll(
    fds: &mut [pollfd],
    timeout: Option<u64>,
    mask: *const sigset_t,
    kernel: impl FnOnce() -> i32,
) -> i32 {
    control::poll_inbox();
    let attempts = &thread::this().attempts;
    let tries = timeout == Some(0) || mask.is_null() && attempts.begin();
    if tries && kernel_knows_all(fds) {
        if timeout == Some(0) {
            return signal::open(Held::NOTHING, kernel);
        }
        let found = kernel::poll_now(fds);
        attempts.note(found > 0);
        if found > 0 && !has_attached(fds) {
            settle(fds);
            return found as i32;
        }
    }
    waiter::waiting(|| poll_all(fds, timeout, mask, kernel))
}

/// Polls as [`poll`] does, without an attempt before the wait is prepared.
pub(super) fn prepare_and_poll(
    fds: &mut [pollfd],
    timeout: Option<u64>,
    mask: *const sigset_t,
    kernel: impl FnOnce() -> i32,
) -> i32 {
    control::poll_inbox();
    waiter::waiting(|| poll_all(fds, timeout, mask, kernel))
}

/// Returns whether none of the fds is an epoll instance or a connection that is attached. A call that
/// does not sleep is then the kernel's: see [`crate::ops::select_now`].
fn kernel_knows_all(fds: &[pollfd]) -> bool {
    !has_attached(fds) && !table::may_have_epolls(fds.iter().map(|entry| entry.fd))
}

/// Returns whether one of the fds is a connection that is attached.
fn has_attached(fds: &[pollfd]) -> bool {
    endpoint::any_is_attached()
        && fds.iter().any(|entry| endpoint::behind(entry.fd).is_some_and(Endpoint::is_attached))
}

fn poll_all(
    fds: &mut [pollfd],
    timeout: Option<u64>,
    mask: *const sigset_t,
    kernel: impl FnOnce() -> i32,
) -> i32 {
    let mut watch = examine(fds, timeout != Some(0), None);
    if timeout != Some(0) && needs_waiter(fds, &watch) && sleep::thread_slot().is_none() {
        for one in &watch.watched {
            sleep::leave_to_tcp(one.endpoint);
        }
        watch = examine(fds, true, Some(&watch));
    }
    let by_kernel = !epoll::show_lanes() && watch.sets.is_empty() && watch.watched.is_empty();
    if by_kernel && watch.entered.is_empty() {
        return signal::open(Held::NOTHING, kernel);
    }
    // Dropped here or, if the sleep is never returned from, by way of the journal; never by
    // unwinding.
    let watch = Box::into_raw(Box::new(watch));
    let held = undo::poll(watch);
    let result = if by_kernel {
        signal::open(held, kernel)
    } else {
        let deadline = timeout.map(|nanos| process::now().saturating_add(nanos));
        // SAFETY: nothing else uses it before this call has been left.
        let borrowed = unsafe { &mut *watch };
        let (shadow, lanes, bound) = (Vec::new(), 0, None);
        let call = Call { fds: &mut *fds, watch: &mut *borrowed, shadow, held, deadline, mask, lanes, bound };
        call.run().unwrap_or_else(|| {
            for one in &borrowed.watched {
                attach::bar(one.endpoint, Reason::DescriptorLimit);
            }
            signal::open(held, kernel)
        })
    };
    let failed = errno::get();
    if result > 0 {
        if by_kernel {
            notice_resets(fds);
        }
        settle(fds);
    }
    // SAFETY: made above, and this call has returned.
    drop(unsafe { Box::from_raw(watch) });
    errno::set(failed);
    result
}

/// Returns whether there are lanes, without an event now, and this thread has no waiter.
fn needs_waiter(fds: &[pollfd], watch: &Watch) -> bool {
    !watch.watched.is_empty() && thread::this().slot().is_none() && !watch.is_ready(fds)
}

/// Notices resets after the kernel has answered alone. Connections may have begun to send on lanes
/// meanwhile. If a peer has died with such bytes unread, the kernel has reported an end of the
/// stream.
fn notice_resets(fds: &mut [pollfd]) {
    for entry in fds.iter_mut().filter(|entry| entry.revents != 0) {
        if let Some(endpoint) = endpoint::behind(entry.fd)
            && resets::notice_reset(endpoint, entry.fd)
        {
            kernel::poll_now(std::slice::from_mut(entry));
            entry.revents |= if endpoint.owes_alone() { libc::POLLERR } else { 0 };
        }
    }
}

/// Polls again where a reset shows in part only. The kernel sets the parts of a reset one after the
/// other, the error first. A thread that they wake never sees that. A thread that a doorbell wakes
/// may, or the FIN that came where TCP alone would have sent none.
fn settle(fds: &mut [pollfd]) {
    let is_in_parts = |entry: &&mut pollfd| entry.revents & (libc::POLLERR | libc::POLLHUP) == libc::POLLERR;
    for entry in fds.iter_mut().filter(is_in_parts) {
        // This waits until the thread that resets the socket has released it. Other descriptors
        // just report the same again.
        let _ = shunt_sys::tcp::state(borrow(entry.fd));
        let mut again = [*entry];
        kernel::poll_now(&mut again);
        entry.revents |= again[0].revents;
    }
}

/// A poll of fds of which some are on shared memory.
struct Call<'a> {
    fds: &'a mut [pollfd],
    watch: &'a mut Watch,
    /// The array for the kernel.
    shadow: Vec<pollfd>,
    held: Held,
    deadline: Deadline,
    mask: *const sigset_t,
    /// How many entries lanes alone have made ready.
    lanes: i32,
    /// The longest step of the sleep that has been announced.
    bound: Option<u64>,
}

impl Call<'_> {
    /// Runs steps until one ends the call. Returns `None` if the kernel refuses the call, so that
    /// the program's own call must be made.
    fn run(mut self) -> Option<i32> {
        let mut step = Step::Check;
        loop {
            let found = match step {
                Step::Check => self.check(),
                Step::Spin => Found::Spun {
                    has_some: sleep::spin_for_lanes(|| self.watch.is_ready(self.fds)),
                    has_closed: !self.watch.closed.is_empty(),
                },
                Step::Prepare { sleeps } => self.prepare(sleeps),
                Step::Sleep { sleeps } => {
                    let deadline = if sleeps { self.deadline } else { Some(0) };
                    let Call { ref mut shadow, held, bound, mask, .. } = self;
                    let result = ask_kernel(shadow, self.watch.slot, held, deadline, bound, mask);
                    self.end_query(result)
                }
                Step::Query => {
                    let result = kernel::poll_now(&mut self.shadow) as i32;
                    self.end_query(result)
                }
                Step::Merge => {
                    // Before the kernel's answer is used, which is about the files that have these
                    // fds by now.
                    self.watch.follow(self.fds);
                    Found::Merged { has_changed: merge(self.fds, &self.shadow, self.watch) }
                }
                Step::Count => Found::Counted { ready: self.watch.count(self.fds, self.deadline) },
                Step::NoticeHandlers => {
                    // The broker rings for some of its messages, and a sleep is cut into steps for
                    // others.
                    control::poll_inbox();
                    control::check_if_due(process::now());
                    let have_run = signal::take_ran() != Ran::Nothing;
                    Found::Handlers { have_run, is_past: !have_run && is_past(self.deadline) }
                }
                Step::FollowChanges => {
                    self.watch.prepare_next_sleep(self.fds);
                    Found::Followed
                }
                Step::Return(count) => return Some(count),
                Step::Fail => return Some(-1),
                Step::Refused => return None,
                Step::Interrupted => {
                    errno::set(libc::EINTR);
                    return Some(-1);
                }
                Step::TimeOut => return Some(0),
            };
            step = poll_step::next(found, &mut self);
        }
    }

    fn check(&mut self) -> Found {
        self.watch.leave_spoilt_lanes(self.fds);
        self.lanes = answer(self.fds, self.watch);
        Found::Lanes { ready: self.lanes }
    }

    /// Fills in the array for the kernel, after a sleep has been announced if the call `sleeps`.
    fn prepare(&mut self, sleeps: bool) -> Found {
        let Call { ref fds, ref mut watch, ref mut shadow, lanes, mask, .. } = *self;
        let mut bound = if sleeps { announce(fds, watch, sleep::thread_slot()) } else { None };
        // The events that they still have would end the sleep immediately, so they are checked in
        // short steps.
        if watch.closed.iter().any(|one| one.told.is_some()) {
            bound = Some(bound.map_or(epoll::DEGRADED_NANOS, |bound| bound.min(epoll::DEGRADED_NANOS)));
        }
        let is_ready = lanes > 0 || watch.is_ready(fds);
        prepare(fds, shadow, watch);
        self.bound = bound;
        Found::Prepared { sleeps, is_ready, has_mask: !mask.is_null() }
    }

    /// Notices a ring of the doorbell, and takes back the announcements. `result` is the kernel's.
    fn end_query(&mut self, result: i32) -> Found {
        if let Some(slot) = self.watch.slot
            && self.shadow.last().is_some_and(|doorbell| doorbell.revents != 0)
        {
            slot.hear();
            unread_timeout::note_waited();
        }
        self.watch.retract();
        Found::Asked(match result {
            0.. => Asked::Answered,
            _ if errno::get() == libc::EINVAL => Asked::Refused,
            _ => Asked::Failed,
        })
    }
}

impl Facts for Call<'_> {
    fn is_all_on_lanes(&mut self) -> bool {
        self.watch.is_all_on_lanes(self.fds)
    }

    fn is_kernels_turn(&mut self) -> bool {
        static UNASKED: AtomicU32 = AtomicU32::new(0);
        UNASKED.fetch_add(1, Relaxed).is_multiple_of(ASK_KERNEL_EVERY)
    }

    fn has_time(&mut self) -> bool {
        !is_past(self.deadline)
    }
}

fn is_past(deadline: Deadline) -> bool {
    deadline.is_some_and(|deadline| deadline <= process::now())
}

/// Fills in the events of the fds now, whatever they name.
fn poll_at_once(fds: &mut [pollfd]) {
    let (watch, mut shadow) = (examine(fds, false, None), Vec::new());
    prepare(fds, &mut shadow, &watch);
    kernel::poll_now(&mut shadow);
    merge(fds, &shadow, &watch);
}

/// Sleeps in the kernel with the program's mask, until the deadline or for a step.
fn ask_kernel(
    shadow: &mut [pollfd],
    slot: Option<Slot>,
    held: Held,
    deadline: Deadline,
    step: Option<u64>,
    mask: *const sigset_t,
) -> i32 {
    let now = process::now();
    let left = deadline.map(|deadline| deadline.saturating_sub(now));
    let bounds = [left, step, unread_timeout::patience(), idle::patience(now), presence::patience(now)];
    let nanos = bounds.into_iter().flatten().min();
    let timeout = nanos.map(as_timespec);
    let pointer = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    process::count(Counter::Sleeps, 1);
    signal::ring_bell_on_signal(slot);
    let (entries, count) = (shadow.as_mut_ptr(), shadow.len() as u64);
    // SAFETY: `shadow` is ours, `mask` is the program's.
    let result = signal::open(held, || unsafe { real::ppoll(entries, count, pointer, mask) });
    thread::this().note_sleep(step.is_some(), result != 0);
    result
}

/// Returns whether any of these descriptors needs more than the kernel's own select.
pub(crate) fn concerns(fds: impl Iterator<Item = RawFd>) -> bool {
    let mut found = false;
    for fd in fds {
        match table::look_up(fd) {
            Entry::Endpoint(_) => found = true,
            Entry::Epoll(name) => {
                if let Some(epoll) = name.resolve() {
                    let _shield = Shield::raise();
                    epoll.set_nested();
                    found |= epoll::show_lanes() || epoll.hides_lanes();
                }
            }
            _ => {}
        }
    }
    found
}
