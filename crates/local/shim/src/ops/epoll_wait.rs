//! epoll_wait and its variants: the events of lanes and of the kernel, in one answer.
//!
//! [`wait`] makes rounds until one has a result. `ops/epoll_wait_step.rs` decides what a round does
//! next, and [`Call`] does it:
//!
//! ```text
//! round       the first check: events of lanes. Most waits return them
//! query       the kernel is due too: its events are merged with those of lanes
//! spin        a short while, in case a peer marks a lane
//! announce    the sleep, and check once more, since a peer may have published before it saw that
//! sleep       in the kernel, which has the program's sockets and the doorbell
//! merge       the kernel's events with those of lanes
//! ```
//!
//! An example: a peer publishes while the thread sleeps, and rings the doorbell. The kernel returns
//! an event with the doorbell's marker. The merge drops it, takes the marks, and puts the lane's
//! event in its place.

use std::ffi::c_int;

use libc::epoll_event;
use shunt_abi::page::Counter;

use crate::base::lock::Guard;
use crate::base::names::EpollRef;
use crate::base::signal::{self, Ran, Shield};
use crate::base::undo_log::Held;
use crate::base::{errno, kernel, order, process, rank};
use crate::broker::{control, presence};
use crate::epoll::{self, Checked, Epoll, Inner, Report, SleepBound};
use crate::life::{idle, returning, unread_timeout};
use crate::ops::epoll_wait_step::{self, Found, Queried, Slept, Step};
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
    control::check_if_due(process::now());
    epoll::show_lanes();
    unread_timeout::check_if_due(process::now);
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
    unread_timeout::check_if_due(|| now);
    let deadline: Deadline = timeout.map(|nanos| now.saturating_add(nanos));
    loop {
        idle::check_if_due(|| now);
        control::check_if_due(now);
        let (result, leaves_some) = match round(epoll, events, deadline, now, sleep_in_kernel) {
            Round::Told(count, leaves_some) => (Some(count), leaves_some),
            Round::Kernels(result) => return result,
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
        returning::send_again(endpoint, endpoint.fd());
    }
}

/// The outcome of a round.
enum Round {
    /// Lanes have reported so many events, and the round was ended under the same lock. The flag
    /// says that work is left. Most rounds end so.
    Told(c_int, bool),
    /// The shim's work has ended, and this is the kernel's own answer.
    Kernels(c_int),
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
    if !inner.show() {
        let instance = inner.fd();
        drop(inner);
        return Round::Kernels(by_kernel(instance, events, deadline, now, sleep_in_kernel));
    }
    inner.catch_up(epoll);
    let mut report = inner.begin(events);
    let kernel_first = inner.begin_wait();
    let must_follow_kernel = !kernel_first && inner.collect(epoll, &mut report);
    let (has_events, is_full) = (report.len() > 0, report.is_full());
    let choice = inner.choose(Checked { kernel_first, has_events, is_full, must_follow_kernel }, now);
    let left = deadline.map(|deadline| deadline.saturating_sub(now));
    match epoll_wait_step::next(Found::FirstCheck(choice), left != Some(0)) {
        Step::Return => {
            let count = inner.finish(report);
            Round::Told(count, inner.end_round(epoll, true))
        }
        Step::Query => Round::Over(query(epoll, inner, report, now)),
        step => {
            inner.pause(&mut report);
            drop(inner);
            let (inner, announced) = (None, None);
            let call = Call { epoll, name, deadline, now, left, report, inner, announced, result: 0 };
            Round::Over(call.run(step, sleep_in_kernel))
        }
    }
}

/// Makes the rest of a wait the kernel's alone, which began before the shim's work has ended.
#[cold]
fn by_kernel(
    instance: c_int,
    events: &mut [epoll_event],
    deadline: Deadline,
    now: u64,
    sleep_in_kernel: &mut Sleep<'_>,
) -> c_int {
    let left = deadline.map(|deadline| deadline.saturating_sub(now));
    signal::open(Held::NOTHING, || sleep_in_kernel(instance, events, left))
}

/// Queries the kernel, under no lock, and merges its events with those of lanes. Returns the result
/// of the wait, or `None` if it makes another round.
fn query(
    epoll: &'static Epoll,
    mut inner: Guard<'static, Inner, { rank::EPOLL }>,
    mut report: Report<'_>,
    now: u64,
) -> Option<c_int> {
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
        let queried = Queried { is_all: more < asked, is_spent: unseen == 0, is_full: report.is_full() };
        if !queried.is_repeated() {
            if queried.is_all {
                inner.queries.note_all_reported(asked_all);
            }
            inner.collect(epoll, &mut report);
            inner.pass_ring_on();
            let count = inner.finish(report);
            let step = epoll_wait_step::next(Found::Merged { has_events: count > 0 }, true);
            return (step == Step::Return).then_some(count);
        }
    }
}

/// A round whose first check of the lanes has found nothing to return.
struct Call<'a> {
    epoll: &'static Epoll,
    /// The name of the instance when the round began.
    name: EpollRef,
    deadline: Deadline,
    /// The time at which the round began, and how much was left then.
    now: u64,
    left: Option<u64>,
    report: Report<'a>,
    /// The lock. While it is released, the report is [paused](Inner::pause) or in a sleep.
    inner: Option<Guard<'static, Inner, { rank::EPOLL }>>,
    /// The bound of the sleep that has been announced, until it is over or cancelled.
    announced: Option<SleepBound>,
    /// The result of the wait, unless the step says otherwise.
    result: c_int,
}

impl Call<'_> {
    /// Runs steps until one ends the round. Returns the result of the wait, or `None` if it makes
    /// another round.
    #[inline(never)]
    fn run(mut self, mut step: Step, sleep_in_kernel: &mut Sleep<'_>) -> Option<c_int> {
        loop {
            let found = match step {
                Step::NoticeHandlers => Found::Handlers { have_run: signal::take_ran() != Ran::Nothing },
                Step::Spin => {
                    Found::Spun { has_marks: sleep::spin_for_lanes(|| self.epoll.lock().has_marks()) }
                }
                Step::Announce => self.announce(),
                Step::Sleep => self.sleep(sleep_in_kernel),
                Step::Return | Step::ReturnKernels => {
                    self.release();
                    return Some(self.result);
                }
                Step::Interrupted => {
                    errno::set(libc::EINTR);
                    return Some(-1);
                }
                Step::TimeOut => return Some(0),
                // Only the first check leads to a query.
                Step::CheckAgain | Step::Query => {
                    self.release();
                    return None;
                }
            };
            step = epoll_wait_step::next(found, self.left != Some(0));
        }
    }

    /// Releases the lock if it is held, and cancels a sleep that has been announced. The events in
    /// the report are the result.
    fn release(&mut self) {
        let Some(mut inner) = self.inner.take() else { return };
        if self.announced.take().is_some() {
            inner.stay_awake(self.epoll);
        }
        self.result = inner.pause(&mut self.report);
    }

    /// Announces a sleep, and checks the lanes once more. The lock is held from here to the sleep.
    fn announce(&mut self) -> Found {
        let mut inner = self.epoll.lock();
        inner.resume(&mut self.report);
        let bound = inner.patience(self.epoll);
        inner.announce_sleep(bound);
        let must_follow_kernel = inner.collect(self.epoll, &mut self.report);
        self.announced = Some(bound);
        self.inner = Some(inner);
        Found::LastCheck { has_events: self.report.len() > 0, must_follow_kernel }
    }

    /// Sleeps in the kernel if that has been announced, and only queries it otherwise. Merges its
    /// events with those of lanes.
    fn sleep(&mut self, sleep_in_kernel: &mut Sleep<'_>) -> Found {
        let Call { epoll, now, .. } = *self;
        let announced = self.announced.take();
        let mut inner = match self.inner.take() {
            Some(inner) => inner,
            None => {
                let mut inner = epoll.lock();
                inner.resume(&mut self.report);
                inner
            }
        };
        let bound = match announced {
            Some(bound) => {
                inner.rest();
                inner.last_patience(bound)
            }
            None => SleepBound::Endless,
        };
        inner.queries.note_query(now);
        signal::ring_bell_on_signal(inner.slot());
        let instance = inner.fd();
        drop(inner);
        let asked_all = order::now();

        let idle = idle::patience(now).filter(|_| announced.is_some());
        let lost = presence::patience(now).filter(|_| announced.is_some());
        let bounds = [self.left, bound.nanos(), unread_timeout::patience(), idle, lost];
        let nanos = bounds.into_iter().flatten().min();
        if nanos != Some(0) {
            process::count(Counter::Sleeps, 1);
        }
        let held = if announced.is_some() { undo::epoll(epoll) } else { Held::NOTHING };
        let result = signal::open(held, || sleep_in_kernel(instance, self.report.room(), nanos));
        self.result = result;
        let failed = errno::get();
        if epoll.name() != self.name {
            return Found::Slept(Slept { is_replaced: true, ..Slept::default() });
        }
        let mut inner = epoll.lock();
        if announced.is_some() {
            inner.awake(epoll);
        }
        inner.catch_up(epoll);
        if result < 0 {
            inner.pause(&mut self.report);
            errno::set(failed);
            return Found::Slept(Slept { has_failed: true, ..Slept::default() });
        }
        if bound.is_unrung() {
            process::count(Counter::DegradedSleeps, 1);
            inner.look_unrung();
        }
        let is_all = (result as usize) < self.report.room().len();
        self.merge(inner, result as usize, is_all.then_some(asked_all))
    }

    /// Merges the `count` events of the kernel with those of lanes. Has connections fall back that
    /// can no longer use their lanes. `all` is the time of which the kernel has reported all events,
    /// if it has.
    fn merge(
        &mut self,
        mut inner: Guard<'static, Inner, { rank::EPOLL }>,
        count: usize,
        all: Option<u64>,
    ) -> Found {
        let has_rung = inner.take_over_with_lanes(self.epoll, &mut self.report, count, all);
        if has_rung {
            unread_timeout::note_waited();
        }
        self.result = inner.pause(&mut self.report);
        let has_events = self.result > 0;
        let (stalled, deaf) = match has_events {
            true => (inner.stalled_if_due(self.now), Vec::new()),
            false => (inner.stalled(), inner.deaf()),
        };
        drop(inner);
        stalled.into_iter().for_each(send::give_up);
        for endpoint in deaf {
            sleep::leave_to_tcp(endpoint);
        }
        let is_past = |deadline| process::now() >= deadline;
        let is_past_deadline = !has_events && !has_rung && self.deadline.is_some_and(is_past);
        Found::Slept(Slept { has_events, has_rung, is_past_deadline, ..Slept::default() })
    }
}
