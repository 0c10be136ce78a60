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

use std::cell::Cell;
use std::ffi::c_short;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use libc::{pollfd, sigset_t};
use shunt_abi::page::Counter;
use shunt_abi::reason::Reason;

use crate::base::names::EndpointRef;
use crate::base::private::borrow;
use crate::base::signal::{self, Ran, Shield};
use crate::base::table::{self, Entry};
use crate::base::undo_log::Held;
use crate::base::waiter::{self, Slot};
use crate::base::{errno, kernel, process, real, thread};
use crate::broker::{control, presence};
use crate::epoll::{self, Epoll};
use crate::life::{attach, idle, resets, returning, unread_timeout};
use crate::ops::poll_step::{self, Asked, Facts, Found, Step};
use crate::ops::sleep::{Deadline, as_timespec};
use crate::ops::socket_reference::number_of;
use crate::ops::{send, sleep, undo};
use crate::socket::endpoint::{self, Endpoint, RxSide};
use crate::socket::links::Attachment;
use crate::socket::outgoing::{self, Room};
use crate::socket::{incoming, lost};

const IN: c_short = libc::POLLIN | libc::POLLRDNORM;
const OUT: c_short = libc::POLLOUT | libc::POLLWRNORM;
/// Of so many calls that lanes alone can answer, one queries the kernel about the other events too.
const ASK_KERNEL_EVERY: u32 = 8;

/// A descriptor whose endpoint is on a link.
struct Watched {
    index: usize,
    endpoint: &'static Endpoint,
    name: EndpointRef,
    fd: RawFd,
    at: Attachment,
    owns: bool,
    /// The call may wait, so it is counted at the endpoint.
    holds: bool,
    /// TCP has ended, and reports nothing more.
    ended: Cell<bool>,
}

/// A connection that is not on a link.
struct Entered {
    index: usize,
    endpoint: &'static Endpoint,
    name: EndpointRef,
}

/// The announcements of one call, until it is dropped.
#[derive(Default)]
pub(crate) struct Watch {
    /// Connections that are not on links, marked as inside the kernel (L4): none of them comes onto
    /// a lane while this call sleeps.
    entered: Vec<Entered>,
    /// Connections that are on links, which stay mapped.
    watched: Vec<Watched>,
    /// By index, epoll instances whose lanes hold events that the kernel cannot show. These lanes
    /// get no more bytes.
    sets: Vec<(usize, &'static Epoll)>,
    /// The waiter that sleeps for the lanes.
    slot: Option<Slot>,
    /// By index, sockets whose fds have been closed since the call began: see [`Watch::follow`].
    closed: Vec<Closed>,
}

/// An fd of the array that has been closed, and may name another file. The kernel's poll, too, is
/// woken by the file that it began to wait for, and looks the fd up only then.
struct Closed {
    index: usize,
    /// The fd by which the socket is watched now.
    fd: RawFd,
    /// The state by which it last woke the call without a result. Only a later one wakes the call
    /// again.
    told: Option<News>,
}

/// A socket's state: how many bytes have come by TCP or lie in the lane, and its other events.
type News = (usize, c_short);

impl Closed {
    fn new(index: usize, fd: RawFd, lane: Option<&Watched>, events: c_short) -> Closed {
        let mut closed = Closed { index, fd, told: None };
        // Events that the call has not asked for may have been there before.
        if closed.news(lane, events).is_none() {
            closed.told = closed.news(lane, woken_by(events));
        }
        closed
    }

    /// Returns the socket's state, if it has one of `events`.
    fn news(&self, lane: Option<&Watched>, events: c_short) -> Option<News> {
        let mut polled = [pollfd { fd: self.fd, events, revents: 0 }];
        kernel::poll_now(&mut polled);
        let found = polled[0].revents != 0 || lane.is_some_and(|lane| finds(lane, events));
        let in_lane = lane.map_or(0, |lane| incoming::unread(lane.endpoint));
        // Bytes behind urgent data are not counted among the unread.
        let on_tcp = || shunt_sys::tcp::received(borrow(self.fd)).unwrap_or(0) as usize;
        found.then(|| (in_lane + on_tcp(), polled[0].revents & !IN))
    }
}

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

/// A list of connections gets room for so many together.
const AT_ONCE: usize = 128;

/// Sorts the entries by what their fds name; or by what they named `before`. A connection that has
/// got one of the fds since does not concern this call, which must not hold it.
fn examine(fds: &[pollfd], may_sleep: bool, before: Option<&Watch>) -> Watch {
    let mut watch = Watch::default();
    for (index, entry) in fds.iter().enumerate() {
        let known = before.and_then(|before| before.name_at(index));
        match known.map_or_else(|| table::look_up(entry.fd), Entry::Endpoint) {
            Entry::Endpoint(_) if before.is_some() && known.is_none() => {}
            Entry::Endpoint(name) => {
                let Some(endpoint) = name.resolve() else { continue };
                if known.is_none() && endpoint.is_settled() {
                    continue;
                }
                if endpoint.is_attached() {
                    attach::try_watch(endpoint);
                } else if !may_sleep || endpoint.enter_receive() {
                    if may_sleep {
                        if watch.entered.is_empty() {
                            watch.entered.reserve((fds.len() - index).min(AT_ONCE));
                        }
                        watch.entered.push(Entered { index, endpoint, name });
                    }
                    continue;
                }
                if let Some(at) = endpoint.rx.lock().at {
                    if may_sleep {
                        endpoint.begin_call();
                    }
                    watch.watched.push(Watched {
                        index,
                        endpoint,
                        name,
                        fd: number_of(name, entry.fd),
                        at: at.pin().by_hand(),
                        owns: false,
                        holds: may_sleep,
                        ended: Cell::new(false),
                    });
                } else if may_sleep && endpoint.enter_receive() {
                    // It has just left its link.
                    watch.entered.push(Entered { index, endpoint, name });
                }
            }
            Entry::Epoll(name) => {
                if let Some(epoll) = name.resolve() {
                    epoll.set_nested();
                    if epoll.hides_lanes() {
                        watch.sets.push((index, epoll));
                    }
                }
            }
            _ => {}
        }
    }
    watch
}

impl Watched {
    /// Returns whether the endpoint is still where the call found it. It may have left, and come
    /// onto another lane since.
    fn is_at(&self, side: &RxSide) -> bool {
        side.at.is_some_and(|at| std::ptr::eq(at.link, self.at.link) && at.conn == self.at.conn)
    }
}

impl Watch {
    /// Returns whether all endpoints are still where the call found them.
    fn is_current(&self) -> bool {
        self.watched.iter().all(|one| one.is_at(&one.endpoint.rx.lock()))
    }

    /// Returns the connection of the entry at `index`.
    fn name_at(&self, index: usize) -> Option<EndpointRef> {
        // Both lists are in the order of the array.
        let watched = self.watched.binary_search_by_key(&index, |one| one.index);
        let entered = self.entered.binary_search_by_key(&index, |one| one.index);
        watched.map(|at| self.watched[at].name).or_else(|_| entered.map(|at| self.entered[at].name)).ok()
    }

    /// Returns how often `endpoint` counts this call among those in progress.
    pub(crate) fn calls_on(&self, endpoint: usize) -> u32 {
        let is_it = |one: &Endpoint| std::ptr::from_ref(one).addr() == endpoint;
        let watched = self.watched.iter().filter(|one| one.holds && is_it(one.endpoint));
        let entered = self.entered.iter().filter(|one| is_it(one.endpoint));
        (watched.count() + entered.count()) as u32
    }

    /// Counts the call again, in a forked child.
    pub(crate) fn count_again(&self) {
        self.watched.iter().filter(|one| one.holds).for_each(|one| one.endpoint.begin_call());
        self.entered.iter().for_each(|one| one.endpoint.enter_receive_locked());
    }

    /// Goes on with the sockets whose fds have been closed, by the fds that they have now.
    fn follow(&mut self, fds: &[pollfd]) {
        let Watch { watched, entered, closed, .. } = self;
        let mut find = |index: usize, name: EndpointRef, lane: Option<&Watched>| {
            let fd = number_of(name, fds[index].fd);
            if fd != fds[index].fd {
                match closed.iter_mut().find(|one| one.index == index) {
                    Some(one) => one.fd = fd,
                    None => closed.push(Closed::new(index, fd, lane, fds[index].events)),
                }
            }
            fd
        };
        for one in watched {
            one.fd = find(one.index, one.name, Some(one));
        }
        for one in entered {
            find(one.index, one.name, None);
        }
    }

    fn is_closed(&self, index: usize) -> bool {
        self.closed.iter().any(|one| one.index == index)
    }

    /// Returns whether there is something to do or to report before the call sleeps.
    fn is_ready(&self, fds: &[pollfd]) -> bool {
        let finds = |one: &Watched| !self.is_closed(one.index) && finds(one, fds[one.index].events);
        self.watched.iter().any(|one| has_chores(one, fds[one.index].events) || finds(one))
            || self.closed.iter().any(|one| self.news(one, fds).is_some_and(|news| one.told != Some(news)))
    }

    fn news(&self, closed: &Closed, fds: &[pollfd]) -> Option<News> {
        let lane = self.watched.iter().find(|one| one.index == closed.index);
        closed.news(lane, woken_by(fds[closed.index].events))
    }

    /// Returns whether one of the sockets whose fds have been closed wakes the call now.
    fn take_news(&mut self, fds: &[pollfd]) -> bool {
        let all: Vec<_> = self.closed.iter().map(|one| self.news(one, fds)).collect();
        let mut wakes = false;
        for (one, news) in self.closed.iter_mut().zip(all).filter(|(_, news)| news.is_some()) {
            wakes |= one.told != news;
            one.told = news;
        }
        wakes
    }

    /// Fills in the events of whatever such fds name by now, which may be nothing.
    fn tell_closed(&self, fds: &mut [pollfd]) {
        let before = errno::get();
        for one in &self.closed {
            poll_at_once(std::slice::from_mut(&mut fds[one.index]));
        }
        errno::set(before);
    }

    /// Has connections fall back that can no longer use their lanes: the peer has died, or reads
    /// nothing while this end waits for room.
    fn leave_spoilt_lanes(&self, fds: &[pollfd]) {
        for one in &self.watched {
            returning::send_again_if_returned(one.endpoint, one.fd);
            if lost::is_lost(one.endpoint, one.fd) {
                resets::reset_if_lost(one.endpoint, one.fd);
            }
            if fds[one.index].events & OUT != 0 {
                returning::leave_ended(one.endpoint, one.fd);
                // Even where other descriptors always have events.
                if outgoing::has_stalled(one.endpoint) {
                    send::give_up(one.endpoint);
                }
            }
        }
    }

    /// Returns whether the kernel has nothing to add to what lanes answer.
    fn is_all_on_lanes(&self, fds: &[pollfd]) -> bool {
        self.watched.len() == fds.len()
            && self.closed.is_empty()
            && !self.watched.iter().any(|one| incoming::tcp_has_news(one.endpoint))
    }

    /// Returns how many entries are ready, with those of fds that have been closed. Such fds are
    /// reported only if something ends the call.
    fn count(&mut self, fds: &mut [pollfd], deadline: Deadline) -> i32 {
        if !self.closed.is_empty()
            && (self.take_news(fds)
                || fds.iter().any(|entry| entry.revents != 0)
                || signal::is_due()
                || is_past(deadline))
        {
            self.tell_closed(fds);
        }
        fds.iter().filter(|entry| entry.revents != 0).count() as i32
    }

    /// Brings what is watched up to date, and leaves to TCP what cannot wake this thread.
    fn prepare_next_sleep(&mut self, fds: &mut [pollfd]) {
        for one in &self.watched {
            if !incoming::can_be_rung(one.endpoint, thread::this().slot()) {
                sleep::leave_to_tcp(one.endpoint);
            }
        }
        if !self.is_current() {
            let mut now = examine(fds, true, Some(self));
            now.closed = std::mem::take(&mut self.closed);
            now.follow(fds);
            *self = now;
        }
    }

    /// Takes back the announcements when the sleep is over.
    fn retract(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        for one in &mut self.watched {
            one.at.link.view().waiter(one.at.link.side, slot.0).awake();
            if std::mem::take(&mut one.owns) {
                one.endpoint.unclaim(slot);
            }
        }
    }
}

/// Returns the events by which the kernel wakes a call that asks for `events`, whether it then
/// finds them or not. Any bytes may be urgent or not, and an end may be of any kind.
fn woken_by(events: c_short) -> c_short {
    const BYTES: c_short = IN | libc::POLLPRI;
    events | libc::POLLRDHUP | if events & BYTES != 0 { BYTES } else { 0 }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.retract();
        for one in &self.watched {
            one.at.unpin();
            if one.holds {
                one.endpoint.end_call();
            }
        }
        self.entered.drain(..).for_each(|one| one.endpoint.leave_receive());
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

/// Fills in the events of lanes, and clears all others. Returns how many entries are ready.
fn answer(fds: &mut [pollfd], watch: &Watch) -> i32 {
    fds.iter_mut().for_each(|entry| entry.revents = 0);
    let mut ready = 0;
    for one in watch.watched.iter().filter(|one| !watch.is_closed(one.index)) {
        let entry = &mut fds[one.index];
        if entry.events & IN != 0 && incoming::is_readable(one.endpoint, one.fd) {
            entry.revents |= entry.events & IN;
        }
        if entry.events & OUT != 0 && has_room(one) {
            entry.revents |= entry.events & OUT;
        }
        ready += i32::from(entry.revents != 0);
    }
    ready + answer_sets(fds, watch)
}

/// Adds the events of epoll instances that only the shim knows. Returns how many entries are ready
/// by these.
fn answer_sets(fds: &mut [pollfd], watch: &Watch) -> i32 {
    let mut ready = 0;
    for &(index, epoll) in &watch.sets {
        let entry = &mut fds[index];
        if entry.events & IN != 0 && epoll.would_tell_of_hidden() {
            entry.revents |= entry.events & IN;
            ready += 1;
        }
    }
    ready
}

/// Returns whether lanes have one of `events`.
fn finds(one: &Watched, events: c_short) -> bool {
    events & IN != 0 && incoming::is_readable(one.endpoint, one.fd) || events & OUT != 0 && has_room(one)
}

fn has_room(one: &Watched) -> bool {
    outgoing::room(one.endpoint, None).0 == Room::Some
}

/// Returns whether something must be done before the call can wait.
fn has_chores(one: &Watched, events: c_short) -> bool {
    outgoing::has_unseen_return(one.endpoint)
        || lost::is_lost(one.endpoint, one.fd)
        || events & OUT != 0 && outgoing::room(one.endpoint, None).0 == Room::Ended
}

/// Returns whether there are lanes, without an event now, and this thread has no waiter.
fn needs_waiter(fds: &[pollfd], watch: &Watch) -> bool {
    !watch.watched.is_empty() && thread::this().slot().is_none() && !watch.is_ready(fds)
}

/// Makes this thread the one that lanes wake, where that is possible. Returns how long a step of
/// the sleep may be.
fn announce(fds: &[pollfd], watch: &mut Watch, slot: Option<Slot>) -> Option<u64> {
    watch.slot = slot;
    let mut step: Option<u64> = None;
    let mut at_most = |nanos: Option<u64>| {
        step = match (step, nanos) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    };
    for one in &mut watch.watched {
        let events = fds[one.index].events;
        epoll::make_way(one.endpoint, slot);
        {
            let side = one.endpoint.rx.lock();
            if !one.is_at(&side) {
                at_most(Some(0));
                continue;
            }
            one.owns = slot.is_some_and(|slot| one.endpoint.wait_on(&side, slot));
        }
        if events & IN != 0 {
            at_most(sleep::step_for(&one.at, slot, one.owns));
        }
        if let Some(slot) = slot {
            one.at.link.view().waiter(one.at.link.side, slot.0).announce_sleep();
        }
        if events & OUT != 0 && matches!(outgoing::room(one.endpoint, slot).0, Room::None | Room::Returning) {
            at_most(Some(outgoing::longest_sleep(one.endpoint)));
        }
    }
    step
}

/// Fills in the array for the kernel, whose last entry is the doorbell.
fn prepare(fds: &[pollfd], shadow: &mut Vec<pollfd>, watch: &Watch) {
    shadow.clear();
    shadow.reserve_exact(fds.len() + 1);
    shadow.extend_from_slice(fds);
    for entry in shadow.iter_mut() {
        entry.revents = 0;
    }
    for one in &watch.closed {
        let entry = &mut shadow[one.index];
        entry.fd = if one.told.is_some() { -1 } else { one.fd };
        entry.events = woken_by(entry.events);
    }
    for one in &watch.watched {
        let entry = &mut shadow[one.index];
        if one.endpoint.tx.lock().tx.on_lane() {
            entry.events &= !OUT;
        }
        // The death of the peer is an error that need not be requested, and that first shows as
        // POLLRDHUP.
        if !one.ended.get() {
            entry.events |= libc::POLLRDHUP;
        }
    }
    shadow.push(pollfd { fd: watch.slot.map_or(-1, Slot::listener), events: libc::POLLIN, revents: 0 });
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

/// Checks the lanes once more, and adds the kernel's events to theirs. Returns `true` if a socket
/// has changed meanwhile, and the round must be repeated.
fn merge(fds: &mut [pollfd], shadow: &[pollfd], watch: &Watch) -> bool {
    let before = errno::get();
    answer(fds, watch);
    for (index, (entry, kernel)) in fds.iter_mut().zip(shadow).enumerate() {
        if !watch.is_closed(index) {
            entry.revents |= kernel.revents;
        }
    }
    let told_by_kernel = |one: &&Watched| shadow[one.index].revents != 0 && !watch.is_closed(one.index);
    for one in watch.watched.iter().filter(told_by_kernel) {
        let entry = &mut fds[one.index];
        if entry.revents & !entry.events & libc::POLLRDHUP != 0 {
            entry.revents &= !libc::POLLRDHUP;
            one.ended.set(true);
        }
        one.endpoint.rx.lock().rx.note_tcp_news();
        if resets::reset_if_lost(one.endpoint, one.fd) {
            return true;
        }
        if one.endpoint.owes_alone() {
            fds[one.index].revents |= libc::POLLERR;
        }
    }
    if epoll::show_lanes() {
        for entry in fds.iter_mut().filter(|entry| entry.revents != 0 && epoll::behind(entry.fd).is_some()) {
            let mut again = [*entry];
            kernel::poll_now(&mut again);
            entry.revents = again[0].revents;
        }
        answer_sets(fds, watch);
    }
    errno::set(before);
    false
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
