//! What one call of poll watches: its announcements, and the fds that have been closed meanwhile.
//!
//! Each fd is looked up once, at the start ([`examine`]). From then on the call waits for the sockets
//! that the fds named, as the kernel's poll does, whatever the fds name later:
//!
//! ```text
//!             the fd is closed            the socket's state changes
//!   watched -------------------> closed ----------------------------> does a file have the fd?
//!                                  ^                                    |  event: poll returns it
//!                                  +---------- no event: note the state +
//! ```
//!
//! Example: a thread polls fd 5. Another thread closes it, and fd 7 is another descriptor of the
//! same socket. When bytes come, the call wakes up, because it still waits for the socket (by fd 7).
//! But fd 5 names nothing, so poll reports POLLNVAL. If another file had got the number 5 and had no
//! event, the call would sleep again, until the state of the socket is another one.

use std::cell::Cell;
use std::ffi::c_short;
use std::os::fd::RawFd;

use libc::pollfd;

use super::lanes::{finds, has_chores, woken_by};
use super::{IN, OUT, is_past, poll_at_once};
use crate::base::names::EndpointRef;
use crate::base::private::borrow;
use crate::base::table::{self, Entry};
use crate::base::waiter::Slot;
use crate::base::{errno, kernel, signal, thread};
use crate::epoll::Epoll;
use crate::life::{attach, resets, returning};
use crate::ops::sleep::Deadline;
use crate::ops::socket_reference::number_of;
use crate::ops::{send, sleep};
use crate::socket::endpoint::{Endpoint, RxSide};
use crate::socket::links::Attachment;
use crate::socket::{incoming, lost, outgoing};

/// A descriptor whose endpoint is on a link.
pub(super) struct Watched {
    pub(super) index: usize,
    pub(super) endpoint: &'static Endpoint,
    name: EndpointRef,
    pub(super) fd: RawFd,
    pub(super) at: Attachment,
    pub(super) owns: bool,
    /// The call may wait, so it is counted at the endpoint.
    holds: bool,
    /// TCP has ended, and reports nothing more.
    pub(super) ended: Cell<bool>,
}

/// A connection that is not on a link.
pub(super) struct Entered {
    index: usize,
    endpoint: &'static Endpoint,
    name: EndpointRef,
}

/// The announcements of one call, until it is dropped.
#[derive(Default)]
pub(crate) struct Watch {
    /// Connections that are not on links, marked as inside the kernel (L4): none of them comes onto
    /// a lane while this call sleeps.
    pub(super) entered: Vec<Entered>,
    /// Connections that are on links, which stay mapped.
    pub(super) watched: Vec<Watched>,
    /// By index, epoll instances whose lanes hold events that the kernel cannot show. These lanes
    /// get no more bytes.
    pub(super) sets: Vec<(usize, &'static Epoll)>,
    /// The waiter that sleeps for the lanes.
    pub(super) slot: Option<Slot>,
    /// By index, sockets whose fds have been closed since the call began: see [`Watch::follow`].
    pub(super) closed: Vec<Closed>,
}

/// An fd of the array that has been closed, and may name another file. The kernel's poll, too, is
/// woken by the file that it began to wait for, and looks the fd up only then.
pub(super) struct Closed {
    pub(super) index: usize,
    /// The fd by which the socket is watched now.
    pub(super) fd: RawFd,
    /// The state by which it last woke the call without a result. Only a later one wakes the call
    /// again.
    pub(super) told: Option<News>,
}

/// A socket's state: how many bytes have come by TCP or lie in the lane, and its other events.
pub(super) type News = (usize, c_short);

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

/// A list of connections gets room for so many together.
const AT_ONCE: usize = 128;

/// Sorts the entries by what their fds name; or by what they named `before`. A connection that has
/// got one of the fds since does not concern this call, which must not hold it.
pub(super) fn examine(fds: &[pollfd], may_sleep: bool, before: Option<&Watch>) -> Watch {
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
    pub(super) fn is_at(&self, side: &RxSide) -> bool {
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
    pub(super) fn follow(&mut self, fds: &[pollfd]) {
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

    pub(super) fn is_closed(&self, index: usize) -> bool {
        self.closed.iter().any(|one| one.index == index)
    }

    /// Returns whether there is something to do or to report before the call sleeps.
    pub(super) fn is_ready(&self, fds: &[pollfd]) -> bool {
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
    pub(super) fn leave_spoilt_lanes(&self, fds: &[pollfd]) {
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
    pub(super) fn is_all_on_lanes(&self, fds: &[pollfd]) -> bool {
        self.watched.len() == fds.len()
            && self.closed.is_empty()
            && !self.watched.iter().any(|one| incoming::tcp_has_news(one.endpoint))
    }

    /// Returns how many entries are ready, with those of fds that have been closed. Such fds are
    /// reported only if something ends the call.
    pub(super) fn count(&mut self, fds: &mut [pollfd], deadline: Deadline) -> i32 {
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

    /// Brings the announcements up to date, and leaves sockets to TCP that cannot wake this thread.
    pub(super) fn prepare_next_sleep(&mut self, fds: &mut [pollfd]) {
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
    pub(super) fn retract(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        for one in &mut self.watched {
            one.at.link.view().waiter(one.at.link.side, slot.0).awake();
            if std::mem::take(&mut one.owns) {
                one.endpoint.unclaim(slot);
            }
        }
    }
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
