//! poll and ppoll, and what select needs of them.

use std::ffi::c_short;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use libc::{pollfd, sigset_t};
use shunt_abi::page::Counter;

use crate::endpoint::Endpoint;
use crate::links::Pin;
use crate::ops::sleep::{self, Deadline, as_timespec};
use crate::ops::{receive, send};
use crate::table::{self, Entry};
use crate::waiter::{self, Slot};
use crate::{attach, control, epoll, errno, process, real};

const IN: c_short = libc::POLLIN | libc::POLLRDNORM;
const OUT: c_short = libc::POLLOUT | libc::POLLWRNORM;
/// Calls answered by lanes alone before the kernel is asked about the rest of the set again.
const ASK_KERNEL_EVERY: u32 = 8;

/// A descriptor of the set whose endpoint is on a link.
struct Watched {
    index: usize,
    endpoint: &'static Endpoint,
    fd: RawFd,
    at: Pin,
    owns: bool,
}

/// What the set is made of.
enum Set {
    /// Nothing for us: the kernel's own poll does it. The endpoints are marked as being inside the kernel.
    Kernel(Vec<&'static Endpoint>),
    /// Some are on links.
    Mixed(Vec<Watched>),
}

/// Polls. `timeout` in nanoseconds, `None` for ever; `kernel` makes the program's own call.
pub(crate) fn poll(
    fds: &mut [pollfd],
    timeout: Option<u64>,
    mask: *const sigset_t,
    kernel: impl FnOnce() -> i32,
) -> i32 {
    control::poll_inbox();
    match examine(fds, timeout != Some(0)) {
        Set::Kernel(entered) => {
            let result = kernel();
            entered.iter().for_each(|endpoint| endpoint.leave_receive());
            result
        }
        Set::Mixed(mut watched) => {
            let deadline = timeout.map(|nanos| process::now().saturating_add(nanos));
            poll_mixed(fds, &mut watched, deadline, mask)
        }
    }
}

fn examine(fds: &[pollfd], may_sleep: bool) -> Set {
    let mut entered: Vec<&'static Endpoint> = Vec::new();
    let mut watched = Vec::new();
    for (index, entry) in fds.iter().enumerate() {
        match table::look_up(entry.fd) {
            Entry::Endpoint(name) => {
                let Some(endpoint) = name.resolve() else { continue };
                if endpoint.is_attached() {
                    attach::try_watch(endpoint);
                } else if !may_sleep || endpoint.enter_receive() {
                    if may_sleep {
                        entered.push(endpoint);
                    }
                    continue;
                }
                if let Some(at) = endpoint.rx.lock().at {
                    watched.push(Watched { index, endpoint, fd: entry.fd, at: at.pin(), owns: false });
                }
            }
            Entry::Epoll(name) => {
                if let Some(epoll) = name.resolve() {
                    epoll.set_nested();
                }
            }
            _ => {}
        }
    }
    if watched.is_empty() {
        return Set::Kernel(entered);
    }
    // The others are polled in short sleeps of ours, each of which begins by looking again.
    entered.iter().for_each(|endpoint| endpoint.leave_receive());
    Set::Mixed(watched)
}

fn poll_mixed(fds: &mut [pollfd], watched: &mut [Watched], deadline: Deadline, mask: *const sigset_t) -> i32 {
    static UNASKED: AtomicU32 = AtomicU32::new(0);
    let mut shadow: Vec<pollfd> = Vec::with_capacity(fds.len() + 1);
    loop {
        watched.iter().for_each(|one| attach::send_again_if_returned(one.endpoint, one.fd));
        let lanes = answer(fds, watched);
        let only_lanes =
            watched.len() == fds.len() && !watched.iter().any(|one| receive::tcp_has_news(one.endpoint));
        if lanes > 0 && only_lanes && !UNASKED.fetch_add(1, Relaxed).is_multiple_of(ASK_KERNEL_EVERY) {
            return lanes;
        }
        let may_sleep = lanes == 0 && deadline.is_none_or(|deadline| deadline > process::now());
        if may_sleep && waiter::spin(|| watched.iter().any(|one| is_ready(one, fds[one.index].events))) {
            continue;
        }
        let slot = if may_sleep { sleep::thread_slot() } else { None };
        let step = if may_sleep { announce(fds, watched, slot) } else { None };
        let sleeps = may_sleep && !watched.iter().any(|one| is_ready(one, fds[one.index].events));
        let result = ask_kernel(fds, &mut shadow, watched, slot, sleeps, deadline, step, mask);
        if may_sleep {
            retract(watched, slot);
        }
        if result < 0 {
            return result;
        }
        if merge(fds, &shadow, watched) {
            continue;
        }
        let ready = fds.iter().filter(|entry| entry.revents != 0).count() as i32;
        if ready > 0 || deadline.is_some_and(|deadline| deadline <= process::now()) {
            return ready;
        }
        for one in watched.iter().filter(|one| fds[one.index].events & OUT != 0) {
            if send::has_stalled(one.endpoint) {
                send::give_up(one.endpoint);
            }
        }
    }
}

/// Fills in what the lanes say; everything else is cleared. Returns how many are ready.
fn answer(fds: &mut [pollfd], watched: &[Watched]) -> i32 {
    fds.iter_mut().for_each(|entry| entry.revents = 0);
    let mut ready = 0;
    for one in watched {
        let entry = &mut fds[one.index];
        if entry.events & IN != 0 && receive::is_readable(one.endpoint, one.fd) {
            entry.revents |= entry.events & IN;
        }
        if entry.events & OUT != 0 && send::writability(one.endpoint, None) == Some(true) {
            entry.revents |= entry.events & OUT;
        }
        ready += i32::from(entry.revents != 0);
    }
    ready
}

fn is_ready(one: &Watched, events: c_short) -> bool {
    attach::is_returned(one.endpoint)
        || events & IN != 0 && receive::is_readable(one.endpoint, one.fd)
        || events & OUT != 0 && send::writability(one.endpoint, None) == Some(true)
}

/// Makes this thread the one to be woken, where it can be; returns how long a step of the sleep may be.
fn announce(fds: &[pollfd], watched: &mut [Watched], slot: Option<Slot>) -> Option<u64> {
    let mut step: Option<u64> = None;
    let mut at_most = |nanos: Option<u64>| {
        step = match (step, nanos) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    };
    for one in watched.iter_mut() {
        let events = fds[one.index].events;
        one.owns = slot.is_some_and(|slot| one.endpoint.claim(slot));
        if events & IN != 0 {
            at_most(sleep::step_for(&one.at, slot, one.owns));
        }
        if let Some(slot) = slot {
            if one.owns {
                one.at.incoming().0.set_rx_waiter(Some(slot.0));
            }
            one.at.link.view().waiter(one.at.link.side, slot.0).announce_sleep();
        }
        if events & OUT != 0 && send::writability(one.endpoint, slot) == Some(false) {
            at_most(Some(send::STALL_NANOS));
        }
    }
    step
}

fn retract(watched: &mut [Watched], slot: Option<Slot>) {
    let Some(slot) = slot else { return };
    for one in watched {
        one.at.link.view().waiter(one.at.link.side, slot.0).awake();
        if std::mem::take(&mut one.owns) {
            one.endpoint.unclaim(slot);
        }
    }
}

/// The kernel's answer, in `shadow`; the last entry is the doorbell.
#[allow(clippy::too_many_arguments)]
fn ask_kernel(
    fds: &[pollfd],
    shadow: &mut Vec<pollfd>,
    watched: &[Watched],
    slot: Option<Slot>,
    sleeps: bool,
    deadline: Deadline,
    step: Option<u64>,
    mask: *const sigset_t,
) -> i32 {
    shadow.clear();
    shadow.extend_from_slice(fds);
    for entry in shadow.iter_mut() {
        entry.revents = 0;
    }
    for one in watched {
        let entry = &mut shadow[one.index];
        if one.endpoint.tx.lock().tx.on_lane() {
            entry.events &= !OUT;
        }
    }
    shadow.push(pollfd { fd: slot.map_or(-1, Slot::listener), events: libc::POLLIN, revents: 0 });
    let left = deadline.map(|deadline| deadline.saturating_sub(process::now()));
    let nanos = match (left, step) {
        _ if !sleeps => Some(0),
        (Some(left), Some(step)) => Some(left.min(step)),
        (left, step) => left.or(step),
    };
    let timeout = nanos.map(as_timespec);
    let pointer = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    if sleeps {
        process::count(Counter::Sleeps, 1);
    }
    // SAFETY: `shadow` is ours, `mask` is the program's.
    let result = unsafe { real::ppoll(shadow.as_mut_ptr(), shadow.len() as u64, pointer, mask) };
    if result >= 0
        && shadow.last().is_some_and(|doorbell| doorbell.revents != 0)
        && let Some(slot) = slot
    {
        slot.hear();
    }
    result
}

/// Adds the kernel's answer to the lanes', asked once more. `true` if a socket has changed under it: ask again.
fn merge(fds: &mut [pollfd], shadow: &[pollfd], watched: &[Watched]) -> bool {
    let before = errno::get();
    answer(fds, watched);
    for (entry, kernel) in fds.iter_mut().zip(shadow) {
        entry.revents |= kernel.revents;
    }
    for one in watched.iter().filter(|one| shadow[one.index].revents != 0) {
        one.endpoint.rx.lock().rx.note_tcp_news();
        if attach::reset_if_lost(one.endpoint, one.fd) {
            return true;
        }
    }
    errno::set(before);
    false
}

/// Whether any of these descriptors needs more than the kernel's own select.
pub(crate) fn concerns(fds: impl Iterator<Item = RawFd>) -> bool {
    let mut found = false;
    for fd in fds {
        match table::look_up(fd) {
            Entry::Endpoint(_) => found = true,
            Entry::Epoll(name) => {
                if let Some(epoll) = name.resolve() {
                    epoll::Epoll::set_nested(epoll);
                }
            }
            _ => {}
        }
    }
    found
}
