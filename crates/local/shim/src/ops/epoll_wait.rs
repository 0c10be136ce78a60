//! epoll_wait and its variants: the events of lanes and of the kernel, in one answer.
//!
//! [`wait`] makes rounds until one has a result:
//!
//! ```text
//! collect    events of lanes. If there are some: query the kernel too if that is due, and return
//! spin       a short while, in case a peer marks a lane
//! announce   the sleep, and collect once more, since a peer may have published before it saw that
//! sleep      in the kernel, which has the program's sockets and the doorbell
//! merge      the kernel's events with those of lanes
//! ```
//!
//! An example: a peer publishes while the thread sleeps, and rings the doorbell. The kernel returns
//! an event with the doorbell's marker. The merge drops it, takes the marks, and puts the lane's
//! event in its place.

use std::ffi::c_int;

use libc::epoll_event;
use shunt_abi::page::Counter;

use crate::base::signal::{self, Ran, Shield};
use crate::base::undo_log::Held;
use crate::base::{errno, kernel, order, process};
use crate::broker::control;
use crate::epoll::{self, Checked, Epoll, SleepBound, Step};
use crate::life::{attach, idle, unread_timeout};
use crate::ops::sleep::Deadline;
use crate::ops::{send, sleep, undo};

/// The real call on the instance of this fd, into the given part of the array, for at most so many
/// nanoseconds.
pub(crate) type Sleep<'a> = dyn FnMut(c_int, &mut [epoll_event], Option<u64>) -> c_int + 'a;

/// Returns whether the kernel answers for an instance, after the work that must precede a call
/// which may sleep. Such a call needs no [sleep](Sleep) by way of this file: nothing is announced,
/// and nothing is held.
#[inline(always)]
pub(crate) fn is_by_kernel(epoll: &Epoll) -> bool {
    if epoll.is_active() {
        return false;
    }
    let is_due = !process::is_gate_open()
        || unread_timeout::patience().is_some()
        || epoll::has_level_proxies()
        || idle::awaits_unlink(process::now)
        || signal::has_announced();
    !is_due || see_to(epoll)
}

#[inline(never)]
fn see_to(epoll: &Epoll) -> bool {
    let _shield = Shield::raise();
    control::poll_inbox();
    epoll::show_lanes();
    unread_timeout::look_if_due(process::now);
    signal::undo_left();
    !epoll.is_active() && !idle::awaits_unlink(process::now)
}

/// Translates the kernel's own answer, if a connection was attached during the wait or events have
/// tokens. Returns how many events are left; 0 if only the doorbell has been rung.
#[inline(never)]
pub(crate) fn translate(epoll: &'static Epoll, events: &mut [epoll_event], told: usize) -> c_int {
    let _shield = Shield::raise();
    let mut inner = epoll.lock();
    inner.show();
    let mut report = inner.begin(events);
    inner.take_over_with_lanes(epoll, &mut report, told, None);
    let kept = inner.finish(report);
    if kept > 0 {
        inner.pass_ring_on();
    }
    kept
}

/// Waits where lanes may answer. The instance has the program's fd when the call begins, and may
/// lose it to another file before the call ends.
pub(crate) fn wait(
    epoll: &'static Epoll,
    events: &mut [epoll_event],
    timeout: Option<u64>,
    sleep_in_kernel: &mut Sleep<'_>,
) -> c_int {
    control::poll_inbox();
    epoll::show_lanes();
    // The clock is read once for everything before a sleep.
    let mut now = process::now();
    unread_timeout::look_if_due(|| now);
    let deadline: Deadline = timeout.map(|nanos| now.saturating_add(nanos));
    loop {
        idle::look_if_due(|| now);
        let (result, leaves_some) = match round(epoll, events, deadline, now, sleep_in_kernel) {
            Round::Told(count, leaves_some) => (Some(count), leaves_some),
            Round::Over(result) => {
                (result, epoll.lock().end_round(epoll, result.is_some_and(|count| count > 0)))
            }
        };
        if leaves_some {
            do_what_is_left(epoll);
        }
        if let Some(result) = result {
            return result;
        }
        control::poll_inbox();
        now = process::now();
    }
}

/// Does the work that checks have found and that must be done outside the lock.
#[cold]
fn do_what_is_left(epoll: &Epoll) {
    let (returned, _read) = epoll.lock().take_left();
    for endpoint in returned {
        attach::send_again(endpoint, endpoint.fd());
    }
}

/// The outcome of a round.
enum Round {
    /// Lanes have reported so many events, and the round was ended under the same lock. The flag
    /// says that work is left. Most rounds end so.
    Told(c_int, bool),
    /// Any other outcome. `None`: neither a check nor a sleep found anything, and there is time
    /// left.
    Over(Option<c_int>),
}

/// Makes one check and one sleep, which begin at `now`.
fn round(
    epoll: &'static Epoll,
    events: &mut [epoll_event],
    deadline: Deadline,
    now: u64,
    sleep_in_kernel: &mut Sleep<'_>,
) -> Round {
    let name = epoll.name();
    let mut inner = epoll.lock();
    inner.show();
    inner.catch_up(epoll);
    let mut report = inner.begin(events);
    let kernel_first = inner.begin_wait();
    let must_follow_kernel = !kernel_first && inner.collect(epoll, &mut report);
    let (has_events, is_full) = (report.len() > 0, report.is_full());
    let step = inner.choose_step(Checked { kernel_first, has_events, is_full, must_follow_kernel }, now);
    if step == Step::Return {
        let count = inner.finish(report);
        return Round::Told(count, inner.end_round(epoll, true));
    }
    if step == Step::Query {
        inner.begin_asking();
        let asked_all = order::now();
        let instance = inner.fd();
        let stalled = inner.stalled_if_due(now);
        drop(inner);
        stalled.into_iter().for_each(send::give_up);
        // Events that lanes have reported already, and the doorbell's, may take the places of
        // others there.
        let mut unseen = report.room().len() + report.len() + 1;
        loop {
            report.begin_asking();
            let room = report.room();
            let asked = room.len();
            // Not with the program's signal mask: nothing is waited for, so no handler may run.
            let more = kernel::epoll_now(instance, room);
            unseen = unseen.saturating_sub(more);
            let mut inner = epoll.lock();
            inner.take_over(&mut report, more);
            if more < asked || unseen == 0 || report.is_full() {
                if more < asked {
                    inner.queries.note_all_reported(asked_all);
                }
                inner.collect(epoll, &mut report);
                inner.pass_ring_on();
                // Another thread may have read meanwhile what a lane had marked.
                return Round::Over(Some(inner.finish(report)).filter(|found| *found > 0));
            }
        }
    }
    let left = deadline.map(|deadline| deadline.saturating_sub(now));
    inner.finish(report);
    drop(inner);
    // A handler ends the call, whatever its flags are.
    if signal::take_ran() != Ran::Nothing {
        errno::set(libc::EINTR);
        return Round::Over(Some(-1));
    }
    let sleeps = left != Some(0);
    if sleeps && sleep::spin_for_lanes(|| epoll.lock().has_marks()) {
        return Round::Over(None);
    }
    let mut inner = epoll.lock();
    let mut report = inner.begin(events);
    let patience = if sleeps { inner.patience(epoll) } else { SleepBound::Endless };
    if sleeps {
        inner.announce_sleep(patience);
        let must_follow_kernel = inner.collect(epoll, &mut report);
        if report.len() > 0 || must_follow_kernel {
            inner.stay_awake(epoll);
            return Round::Over(Some(inner.finish(report)).filter(|found| *found > 0));
        }
        inner.rest();
    }
    let patience = if sleeps { inner.last_patience(patience) } else { patience };
    inner.queries.note_query(now);
    signal::ring_bell_on_signal(inner.slot());
    let instance = inner.fd();
    drop(inner);
    let asked_all = order::now();

    let nanos = [left, patience.nanos(), unread_timeout::patience(), idle::patience(now).filter(|_| sleeps)]
        .into_iter()
        .flatten()
        .min();
    if nanos != Some(0) {
        process::count(Counter::Sleeps, 1);
    }
    let held = if sleeps { undo::epoll(epoll) } else { Held::NOTHING };
    let result = signal::open(held, || sleep_in_kernel(instance, report.room(), nanos));
    let failed = errno::get();

    if epoll.name() != name {
        // Another thread has closed it, and nothing of the shim's was left in the kernel's list.
        return Round::Over(Some(result));
    }
    let mut inner = epoll.lock();
    if sleeps {
        inner.awake(epoll);
    }
    inner.catch_up(epoll);
    if result < 0 {
        inner.finish(report);
        errno::set(failed);
        return Round::Over(Some(result));
    }
    if patience.is_unrung() {
        process::count(Counter::DegradedSleeps, 1);
        inner.look_unrung();
    }
    let is_all = (result as usize) < report.room().len();
    let all = is_all.then_some(asked_all);
    let has_rung = inner.take_over_with_lanes(epoll, &mut report, result as usize, all);
    if has_rung {
        unread_timeout::note_waited();
    }
    let found = inner.finish(report);
    if found > 0 {
        let stalled = inner.stalled_if_due(now);
        drop(inner);
        stalled.into_iter().for_each(send::give_up);
        return Round::Over(Some(found));
    }
    let (stalled, deaf) = (inner.stalled(), inner.deaf());
    drop(inner);
    stalled.into_iter().for_each(send::give_up);
    for endpoint in deaf {
        sleep::leave_to_tcp(endpoint);
    }
    // The doorbell, which is reported once, may have taken the place of an event of the program's.
    let is_over = !has_rung && deadline.is_some_and(|deadline| process::now() >= deadline);
    Round::Over(is_over.then_some(0))
}
