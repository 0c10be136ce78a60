//! epoll_wait and its kin: the lanes' events and the kernel's, in one answer.

use std::ffi::c_int;

use libc::epoll_event;
use shunt_abi::page::Counter;

use crate::base::journal::Held;
use crate::base::signal::{self, Ran};
use crate::base::{errno, kernel, order, process};
use crate::broker::control;
use crate::epoll::{self, DEGRADED_NANOS, Epoll};
use crate::life::{attach, idle, overdue};
use crate::ops::sleep::Deadline;
use crate::ops::{held, send, sleep};
use std::sync::atomic::Ordering::*;

/// While lanes stay ready the kernel is asked this often all the same: listening sockets, timers and TCP's own
/// events must not starve.
const ASK_KERNEL_NANOS: u64 = 50_000;
const ASK_KERNEL_EVERY: u32 = 16;

/// The real call on the set of this number, into the given part of the array, for at most so many nanoseconds.
pub(crate) type Sleep<'a> = dyn FnMut(c_int, &mut [epoll_event], Option<u64>) -> c_int + 'a;

/// Waits. The set has the number that the program says when the call begins, and may lose it to another before it ends.
pub(crate) fn wait(
    (epoll, epfd): (&'static Epoll, c_int),
    events: &mut [epoll_event],
    timeout: Option<u64>,
    sleep_in_kernel: &mut Sleep<'_>,
) -> c_int {
    control::poll_inbox();
    epoll::show_lanes();
    overdue::look_if_due();
    let deadline: Deadline = timeout.map(|nanos| process::now().saturating_add(nanos));
    if !epoll.is_active() {
        let name = epoll.name();
        let result = signal::open(Held::NOTHING, || sleep_in_kernel(epfd, events, timeout));
        if result <= 0 || !epoll.must_translate() || epoll.name() != name {
            return result;
        }
        // Somebody may have attached a connection meanwhile, and then the doorbell is among the events.
        let mut inner = epoll.lock();
        inner.show();
        let mut report = inner.begin(events);
        inner.take_over_with_lanes(epoll, &mut report, result as usize);
        let kept = inner.finish(report);
        if kept > 0 {
            inner.pass_ring_on();
            return kept;
        }
    }
    loop {
        idle::look();
        let result = round(epoll, events, deadline, sleep_in_kernel);
        let (returned, _read) = {
            let mut inner = epoll.lock();
            if result.is_some_and(|count| count > 0) {
                inner.note_change(epoll);
            }
            inner.show_lanes(epoll);
            (inner.take_returned(), inner.take_read())
        };
        for endpoint in returned {
            attach::send_again(endpoint, endpoint.fd.load(Relaxed));
        }
        if let Some(result) = result {
            return result;
        }
        control::poll_inbox();
    }
}

/// One look, one sleep. `None`: neither found anything, and there is time left.
fn round(
    epoll: &'static Epoll,
    events: &mut [epoll_event],
    deadline: Deadline,
    sleep_in_kernel: &mut Sleep<'_>,
) -> Option<c_int> {
    let name = epoll.name();
    let mut inner = epoll.lock();
    inner.show();
    inner.catch_up(epoll);
    let now = process::now();
    let mut report = inner.begin(events);
    inner.collect(epoll, &mut report);
    if report.len() > 0 || inner.awaits_kernel() {
        let ask = inner.must_ask()
            || inner.awaits_kernel()
            || inner.unasked >= ASK_KERNEL_EVERY
            || now.saturating_sub(inner.asked_at) >= ASK_KERNEL_NANOS;
        if !ask || report.is_full() {
            inner.unasked += 1;
            return Some(inner.finish(report));
        }
        inner.unasked = 0;
        inner.asked_at = now;
        inner.begin_asking();
        let asked_all = order::now();
        let set = inner.fd();
        drop(inner);
        // What lanes have told of already, and the doorbell, may take the places of others there.
        let mut unseen = report.room().len() + report.len() + 1;
        loop {
            let room = report.room();
            let asked = room.len();
            // Not with the program's mask: nothing is waited for, so it lets no handler in.
            let more = kernel::epoll_now(set, room);
            unseen = unseen.saturating_sub(more);
            let mut inner = epoll.lock();
            inner.take_over(&mut report, more);
            if more < asked || unseen == 0 || report.is_full() {
                if more < asked {
                    inner.note_asked(asked_all);
                }
                inner.collect(epoll, &mut report);
                inner.pass_ring_on();
                // What a lane has marked may have been read by another thread meanwhile.
                return Some(inner.finish(report)).filter(|found| *found > 0);
            }
        }
    }
    let left = deadline.map(|deadline| deadline.saturating_sub(now));
    inner.finish(report);
    drop(inner);
    // A handler ends the call whatever its flags are.
    if signal::take_ran() != Ran::Nothing {
        errno::set(libc::EINTR);
        return Some(-1);
    }
    let sleeps = left != Some(0);
    if sleeps && sleep::spin_for_lanes(|| epoll.lock().has_marks()) {
        return None;
    }
    let mut inner = epoll.lock();
    let mut report = inner.begin(events);
    let patience = if sleeps { inner.patience() } else { None };
    if sleeps {
        inner.announce_sleep(patience);
        inner.collect(epoll, &mut report);
        if report.len() > 0 || inner.awaits_kernel() {
            inner.stay_awake(epoll);
            return Some(inner.finish(report)).filter(|found| *found > 0);
        }
        inner.rest();
    }
    let patience = if sleeps { inner.last_patience(patience) } else { None };
    inner.unasked = 0;
    inner.asked_at = now;
    signal::ring_bell_on_signal(inner.slot());
    let set = inner.fd();
    drop(inner);
    let asked_all = order::now();

    let nanos = [left, patience, overdue::patience(), idle::patience(now).filter(|_| sleeps)]
        .into_iter()
        .flatten()
        .min();
    if nanos != Some(0) {
        process::count(Counter::Sleeps, 1);
    }
    let held = if sleeps { held::epoll(epoll) } else { Held::NOTHING };
    let result = signal::open(held, || sleep_in_kernel(set, report.room(), nanos));
    let failed = errno::get();

    if epoll.name() != name {
        // Closed by another thread: nothing of ours was left in the kernel's set.
        return Some(result);
    }
    let mut inner = epoll.lock();
    if sleeps {
        inner.awake(epoll);
    }
    inner.catch_up(epoll);
    if result < 0 {
        inner.finish(report);
        errno::set(failed);
        return Some(result);
    }
    if patience == Some(DEGRADED_NANOS) {
        process::count(Counter::DegradedSleeps, 1);
        inner.look_unrung();
    }
    let is_all = (result as usize) < report.room().len();
    if is_all {
        inner.note_asked(asked_all);
    }
    let has_rung = inner.take_over_with_lanes(epoll, &mut report, result as usize);
    if has_rung {
        overdue::note_waited();
    }
    let found = inner.finish(report);
    if found > 0 {
        return Some(found);
    }
    let (stalled, deaf) = (inner.stalled(), inner.deaf());
    drop(inner);
    stalled.into_iter().for_each(send::give_up);
    for endpoint in deaf {
        sleep::leave_to_tcp(endpoint);
    }
    // The doorbell, which is told once, may have taken the place of what is the program's.
    let is_over = !has_rung && deadline.is_some_and(|deadline| process::now() >= deadline);
    is_over.then_some(0)
}
