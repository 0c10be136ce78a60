//! epoll_wait: the events of lanes, and how they are merged with the kernel's.
//!
//! One wait fills a report, in steps that `ops/epoll_wait_step.rs` chooses:
//!
//! ```text
//! begin        an empty report over the program's array
//! collect      marks --> ready queue --> events of lanes, up to one that must follow the kernel
//! take_over    the kernel's events: without the doorbell's, and merged with those of lanes
//! finish       the number of events
//! ```
//!
//! An example: a peer wrote to socket 5 by TCP and then to a lane, and after that another peer
//! wrote to socket 6 by TCP. So the kernel reports socket 5, the doorbell, and socket 6, in this
//! order. `take_over_with_lanes` puts the lane's event in the place of the doorbell, so the program
//! gets the three in the order in which their bytes came.

use std::cmp::Reverse;
use std::os::fd::RawFd;

use libc::{c_int, epoll_event};
use shunt_transport::Kernel;

use super::duplicates::{Duplicates, Numbers};
use super::lane_events::{
    Answer, Lanes, arrived, asked_of_kernel, judge, of_reset, said_by_lanes, translate,
};
use super::names::is_token;
use super::ready_queue::{Entry, ReadyQueue};
use super::records::Records;
use super::registration::is_told_edges;
use super::registrations::Registrations;
use super::report::Report;
use super::watched::Watched;
use super::{ALWAYS, Checked, Choice, EDGE, Epoll, FINISHED, IN, Inner, ONE_SHOT, OUT, Registration, URGENT};
use crate::base::waiter::Slot;
use crate::socket::endpoint::Endpoint;
use crate::socket::links::Link;
use crate::socket::tcp::Tcp;
use crate::socket::{incoming, lost, outgoing};

impl Inner {
    /// Returns whether a check is worthwhile. Cheap enough for spinning and for the moment before a
    /// sleep.
    pub(crate) fn has_marks(&self) -> bool {
        let Some(slot) = self.slot() else { return false };
        self.links.have_marks(slot)
    }

    /// Returns the fd of the kernel's instance.
    pub(crate) fn fd(&self) -> RawFd {
        self.list.fd
    }

    /// Begins the report of a wait.
    pub(crate) fn begin<'a>(&mut self, events: &'a mut [epoll_event]) -> Report<'a> {
        Report::new(events, std::mem::take(&mut self.memory.owners))
    }

    /// Ends the report, and returns how many events it has.
    pub(crate) fn finish(&mut self, mut report: Report<'_>) -> c_int {
        self.pause(&mut report)
    }

    /// Takes the memory of a report for the next one, of whichever thread. Returns how many events
    /// the report had.
    pub(crate) fn pause(&mut self, report: &mut Report<'_>) -> c_int {
        let count = report.len();
        self.memory.owners = report.take_owners();
        count as c_int
    }

    /// Goes on with a report that was [paused](Self::pause) without an event.
    pub(crate) fn resume(&mut self, report: &mut Report<'_>) {
        report.reuse(std::mem::take(&mut self.memory.owners));
    }

    /// Adds the events of lanes, up to one that must follow the kernel's. Returns whether there is
    /// such a one, which may have come after an event that only the kernel can report.
    #[inline]
    pub(crate) fn collect(&mut self, epoll: &Epoll, report: &mut Report<'_>) -> bool {
        let again = report.len() > 0;
        self.queue_idle_anew();
        self.take_marks();
        let must_follow_kernel = self.look_at_pending(epoll, report, self.queries.all_at(), 0);
        self.closed.report(epoll, self.list.fd, report);
        if again {
            self.keep_order(report);
        }
        must_follow_kernel
    }

    /// Gives positions to `QueuedIdle` registrations whose lanes have an event by now. Their marks
    /// do that, so those of links at rest are taken too.
    #[inline]
    fn queue_idle_anew(&mut self) {
        if self.ready.take_has_idle() && self.links.has_some_at_rest() {
            self.check_idle();
        }
    }

    #[inline(never)]
    fn check_idle(&mut self) {
        self.rung |= self.ready.numbers().any(|fd| self.has_unqueued_event(fd));
    }

    /// Queues the reported registrations in the order of the report, since some of them were just
    /// checked twice. Level-triggered registrations are checked next in the order in which they
    /// were reported.
    #[inline(never)]
    fn keep_order(&mut self, report: &Report<'_>) {
        for fd in report.owners() {
            if let Some(one) = self.registrations.get_mut(fd) {
                self.ready.move_to_end(&mut one.position, *fd);
            }
        }
    }

    /// Begins a wait: see [`KernelQueries::begin_wait`](super::KernelQueries).
    #[inline]
    pub(crate) fn begin_wait(&mut self) -> bool {
        self.queries.begin_wait()
    }

    /// Chooses how a wait goes on after its first check of the lanes, which began at the time `now`.
    #[inline]
    pub(crate) fn choose(&mut self, checked: Checked, now: u64) -> Choice {
        self.queries.choose(checked, now, || self.ready.has_gone_round())
    }

    /// Prepares for a query of the kernel for all its events. These come before what lanes have
    /// marked by now, so that no queued registration has to wait for the kernel any more.
    pub(crate) fn begin_asking(&mut self) {
        self.ready.begin_round();
        for fd in self.ready.numbers() {
            if let Some(registration) = self.registrations.get_mut(&fd) {
                registration.position.follow_kernel(0);
            }
        }
    }

    /// Queues the registrations that peers have marked, by their stamps, behind those that are
    /// queued already. Returns the time of the first mark.
    pub(super) fn take_marks(&mut self) -> Option<u64> {
        self.sleeps.unread_behind = false;
        if self.registrations.answered.has_looks() {
            self.mark_unmarked();
        }
        let Inner { links, registrations: Registrations { records, duplicates, .. }, ready, .. } = self;
        if let Some(slot) = self.wakeup.slot() {
            links.take_marks(slot, |link, marks| list_marked(ready, duplicates, link, marks));
            if self.rung {
                self.rung = take_rung(links, slot, self.sleeps.has_some(), ready, duplicates);
            }
        }
        let first = ready.marked.peek().map(|Reverse((stamp, ..))| stamp.at);
        while let Some(Reverse((stamp, fd, guess))) = ready.marked.pop() {
            if let Some(registration) = records.find(fd, guess) {
                if registration.position.index() != guess {
                    registration.note_record();
                }
                ready.enter_ready(&mut registration.position, fd, stamp.behind);
                let owner = registration.owner.filter(|_| !duplicates.are_none());
                if let Some(owner) = owner {
                    queue_duplicates(ready, duplicates.numbers(owner, fd), records, fd, stamp.behind);
                }
            }
        }
        first
    }

    /// Queues registrations whose marks go to another waiter, in the order of their stamps.
    #[inline(never)]
    fn mark_unmarked(&mut self) {
        let shared = self.exposure.is_shared();
        for fd in self.registrations.attached_where(|one, endpoint| {
            !one.answered.is_by_marks() && one.may_have_some(endpoint, shared)
        }) {
            let has_new = |one: &Registration| {
                one.endpoint().filter(|endpoint| arrived(endpoint, shared) != one.arrived)
            };
            let at = self.registrations.get(&fd).and_then(has_new).and_then(|endpoint| endpoint.rx.lock().at);
            match at {
                Some(at) => self.ready.marked.push(Reverse((at.incoming().0.stamped(), fd, 0))),
                None => {
                    let has_some = self.has_unqueued_event(fd);
                    self.queue_for_look(fd, has_some);
                }
            }
        }
    }

    /// Has all marks checked, even without a ring, and all registrations that no mark reaches. An
    /// edge-triggered one of these is reported only if something is new.
    pub(crate) fn look_unrung(&mut self) {
        self.rung = true;
        let shared = self.exposure.is_shared();
        self.mark_where(|one, endpoint| {
            !one.answered.is_by_marks()
                && (one.may_have_some(endpoint, shared)
                    || outgoing::has_unseen_return(endpoint)
                    || lost::is_lost(endpoint, endpoint.fd())
                    || shared && incoming::unread(endpoint) == 0)
        });
    }

    /// Has the next check include the attached registrations for which `is_due` returns `true`.
    pub(super) fn mark_where(&mut self, is_due: impl Fn(&Registration, &'static Endpoint) -> bool) {
        self.registrations.attached_where(is_due).into_iter().for_each(|fd| self.mark_pending(fd));
    }

    /// Adds the events of queued registrations, and leaves `kept` places of the report free. It
    /// stops at a mark whose sender had sent something by TCP later than `until`, and returns
    /// whether there was one.
    fn look_at_pending(&mut self, epoll: &Epoll, report: &mut Report<'_>, until: u64, kept: usize) -> bool {
        let before = report.len();
        for _ in 0..self.ready.len() {
            if report.places() <= kept {
                break;
            }
            let Some(entry) = self.ready.first() else { break };
            let fd = entry.fd;
            let Some(registration) =
                self.registrations.records.at(entry.index).filter(|one| one.position.is(entry))
            else {
                self.ready.drop_first();
                continue;
            };
            if registration.position.after_kernel_time() > until {
                return true;
            }
            self.ready.leave(&mut registration.position);
            let Some(endpoint) = registration.endpoint() else { continue };
            if !registration.interest.is_armed() {
                continue;
            }
            // Most checks find a lane that goes on, and need nothing of `look_at`.
            if !self.exposure.is_shared()
                && registration.is_told_of_lanes()
                && let Some(reported) = registration.look_at_once(endpoint)
            {
                if reported != 0 {
                    // What came before the registration is one edge, whichever side reports it, so
                    // the kernel is queried too.
                    self.queries.note_incomplete(registration.due && registration.events & EDGE != 0);
                    registration.due = false;
                    report.tell(fd, epoll_event { events: reported, u64: registration.data }, before);
                    if registration.events & EDGE == 0 {
                        self.ready.enter(&mut registration.position, fd);
                    }
                }
                continue;
            }
            self.look_at(epoll, report, before, entry, endpoint);
        }
        false
    }

    /// Adds the events of an armed registration whose turn it is. They are merged with its event
    /// among the first `before` of the report.
    #[inline(never)]
    fn look_at(
        &mut self,
        epoll: &Epoll,
        report: &mut Report<'_>,
        before: usize,
        entry: Entry,
        endpoint: &'static Endpoint,
    ) {
        // The registration may have the fd of a duplicate, and that fd may be closed.
        let socket = endpoint.fd();
        let Some(lanes) = self.check_lanes(report, entry, endpoint, socket) else { return };
        let Lanes { mut reported, full, by_tcp, ended, died, is_new } = lanes;
        let fd = entry.fd;
        let Some(registration) = self.registrations.records.at(entry.index) else { return };
        let reset = registration.events_of_death(endpoint, socket, died, &mut self.returned);
        // The kernel has an event for a reset too, and for an edge-triggered registration the two
        // are one.
        self.queries.note_incomplete(reset.is_dead);
        reported |= reset.events.unwrap_or(0);
        let is_lost = reset.events.is_some();
        let more = by_tcp || endpoint.is_shut() || endpoint.has_peer_finished();
        let has_more = more || ended || registration.beside;
        // A peer marks a connection for other reasons too.
        if registration.events & EDGE != 0 && !(is_new || registration.due || is_lost) {
            reported = 0;
        }
        // With TCP, arriving bytes are an edge for a registration that asks for any, even if
        // another thread has read them since.
        let has_edge = reported != 0 || more && is_new && registration.events & (IN | URGENT) != 0;
        let is_edge = registration.events & EDGE != 0 && has_edge;
        let is_whole = !has_more && registration.events & ONE_SHOT == 0;
        if !is_whole && reported != 0 || is_edge && more {
            // The kernel's event may find no room in the array, so this report may be the only one.
            // It must include what TCP would add.
            reported |= registration.events_of_kernel(endpoint, socket, &mut self.returned);
        }
        if reported != 0 {
            // What came before the registration is one edge, whichever side reports it, so the
            // kernel is queried too.
            self.queries.note_incomplete(is_edge && registration.due);
            registration.due = false;
            report.tell(fd, epoll_event { events: reported, u64: registration.data }, before);
            if registration.events & ONE_SHOT != 0 {
                registration.interest.fire_locally();
                if self.exposure.is_shared() {
                    self.disarm(epoll, fd);
                } else if self.exposure.is_watched() {
                    registration.unregister(self.list.fd, fd);
                }
            } else if registration.events & EDGE == 0 {
                self.ready.enter(&mut registration.position, fd);
            }
        }
        if full {
            self.note_full(fd);
        }
    }

    /// Checks the lanes for [`look_at`](Self::look_at). A registration whose bytes cannot be read
    /// yet is queued again.
    #[inline(always)]
    fn check_lanes(
        &mut self,
        report: &Report<'_>,
        entry: Entry,
        endpoint: &'static Endpoint,
        socket: RawFd,
    ) -> Option<Lanes> {
        let fd = entry.fd;
        let slot = self.slot();
        let registration = self.registrations.records.at(entry.index)?;
        let slot = registration.asks_for_room(slot);
        // No other side reports a lane that another process has drained.
        let is_drained = self.exposure.is_shared() && incoming::unread(endpoint) == 0;
        // Before the check, so that bytes which arrive during it are checked again.
        let asks = registration.events & EDGE != 0 || !registration.answered.is_by_marks();
        // Bytes wake only registrations that ask for some.
        let is_new = asks
            && registration.note_arrived(endpoint, self.exposure.is_shared())
            && registration.events & (IN | URGENT) != 0;
        let found = incoming::look(endpoint, socket, registration.events & IN != 0);
        if is_drained || found.returned && outgoing::is_returned(endpoint) {
            self.returned.push(endpoint);
        }
        // An edge of room is due only where a send has found none. With new bytes, room is reported
        // as well.
        let asks_for_room =
            registration.events & OUT != 0 && (registration.events & EDGE == 0 || registration.due || is_new);
        if asks_for_room && outgoing::leave_ended(endpoint, socket) {
            self.returned.push(endpoint);
        }
        let Answer { mut reported, full, behind, left, by_tcp } =
            judge(endpoint, &found, registration.events, slot);
        if behind {
            // Another thread may be reading TCP up to there, and nothing notifies this one of that.
            // Nor is it notified of bytes below SO_RCVLOWAT.
            self.ready.enter(&mut registration.position, fd);
            self.sleeps.unread_behind = true;
        }
        self.queries.note_incomplete(left);
        if by_tcp && (registration.sends_on_lane || reported != 0) {
            // If the lane has ended but the direction has not left it, the kernel's list does not
            // answer for room yet.
            reported |= asked_of_kernel(socket, registration.events) & registration.events & OUT;
        }
        let is_level = registration.events & IN != 0 && registration.events & EDGE == 0;
        if reported == 0 && is_level && (behind || !found.on_lane) {
            // Its position is that of bytes of TCP: they precede the lane's, or the sender has
            // taken the lane's back.
            if !report.has_kernels() {
                reported = registration.bytes_of_kernel(socket);
                self.queries.note_incomplete(reported != 0);
            } else if report.owners().contains(&fd) {
                // The kernel has just reported it by its name, and will again. Other registrations
                // leave the queue: the kernel may have reported them by the name from before their
                // connection came onto lanes.
                self.ready.enter(&mut registration.position, fd);
            }
        }
        Some(Lanes { reported, full, by_tcp, ended: found.ended, died: found.died, is_new })
    }

    /// Takes over the kernel's events as [`take_over`](Self::take_over) does, with the lanes'
    /// events in their place among them. The doorbell stands where the first lane was marked, so
    /// what its peer had sent by TCP before stands ahead of it. If nothing does, the doorbell may
    /// have been rung for something else, and bytes that the peer has sent by TCP since stand
    /// behind it. `all` is the time of which the kernel has reported all events, if it has.
    pub(crate) fn take_over_with_lanes(
        &mut self,
        epoll: &Epoll,
        report: &mut Report<'_>,
        count: usize,
        all: Option<u64>,
    ) -> bool {
        let room = &report.room()[..count];
        let has_rung = match room.iter().position(|event| event.u64 == self.list.marker) {
            Some(place) => {
                let mut behind = std::mem::take(&mut self.memory.behind);
                behind.clear();
                behind.extend_from_slice(&room[place + 1..]);
                self.take_over(report, place + 1);
                let first = self.take_marks().filter(|_| place > 0).unwrap_or(0);
                self.look_at_pending(epoll, report, first.max(self.queries.all_at()), behind.len());
                report.room()[..behind.len()].copy_from_slice(&behind);
                self.take_over(report, behind.len());
                self.memory.behind = behind;
                true
            }
            None => self.take_over(report, count),
        };
        if let Some(all) = all {
            self.queries.note_all_reported(all);
        }
        self.collect(epoll, report);
        has_rung
    }

    /// Takes over the `count` events that the kernel has put behind those of `report`. Drops the
    /// doorbell's, and adds the lanes' events to those of a socket. Returns `true` if the doorbell
    /// was among them.
    pub(crate) fn take_over(&mut self, report: &mut Report<'_>, count: usize) -> bool {
        report.begin_kernels();
        let before = report.len();
        let mut has_rung = false;
        for index in before..before + count {
            let event = report.at(index);
            let data = event.u64;
            if data == self.list.marker {
                has_rung = true;
            } else if let Some(fd) = self.registrations.names.find(data) {
                if let Some(event) = self.own(fd, event.events) {
                    report.tell(fd, event, before);
                }
            } else if !is_token(data) {
                report.tell_kernels(event);
            }
        }
        // The kernel reports its level-triggered events again.
        self.queries.note_incomplete(report.len() > before);
        self.rung |= has_rung;
        has_rung
    }

    /// Returns the event of a registration for which the kernel has these events, or `None` if
    /// there is nothing to report.
    fn own(&mut self, fd: RawFd, events: u32) -> Option<epoll_event> {
        let registration = self.registrations.get_mut(&fd)?;
        let is_told_edges = is_told_edges(registration.events);
        // The kernel's event that it had to follow is here.
        registration.position.follow_kernel(0);
        if !is_told_edges {
            // TCP may end here and the lane begin, so the next check must not wait for another
            // mark.
            self.ready.enter(&mut registration.position, fd);
        }
        // In a shared instance the kernel's state counts, except for a registration with a token.
        if registration.interest.is_disarmed() && (!self.exposure.is_shared() || registration.name.is_token())
        {
            registration.interest.note_kernel_event();
            return None;
        }
        if registration.interest.is_deleted() {
            registration.interest.note_kernel_event();
            self.list.change(libc::EPOLL_CTL_DEL, fd, 0, 0);
            return None;
        }
        let mut reported = events;
        let endpoint = registration.endpoint();
        if let Some(endpoint) = endpoint {
            let socket = endpoint.fd();
            endpoint.rx.lock().rx.note_tcp_news();
            reported = translate(endpoint, events);
            if events & FINISHED != 0 {
                endpoint.note_peer_finished();
            }
            if events & URGENT != 0 {
                registration.urgent_at = (Tcp { endpoint, fd: socket }).received();
            }
            reported |= of_reset(endpoint, socket, &mut self.returned).unwrap_or(0);
            // This report may be the only one, so it must include what lanes would add.
            let slot = registration.asks_for_room(self.wakeup.slot());
            let answer = said_by_lanes(endpoint, socket, registration.events, slot);
            reported |= answer.reported;
            if answer.by_tcp && registration.sends_on_lane {
                reported |= asked_of_kernel(socket, registration.events) & OUT;
            }
            if registration.events & (ONE_SHOT | EDGE) != 0 {
                // And what TCP has received since.
                reported |= translate(endpoint, asked_of_kernel(socket, registration.events));
            } else {
                registration.beside = true;
            }
        }
        if !self.exposure.is_shared() {
            reported &= registration.events | ALWAYS;
        }
        if reported == 0 {
            if !is_told_edges {
                // The kernel's list has more events than are wanted, and would report them for
                // ever.
                self.set_kernel_events(fd, endpoint);
            }
            return None;
        }
        if endpoint.is_some() && (registration.events & OUT == 0 || reported & OUT != 0) {
            // The report includes the events of lanes. The kernel need not report them again once
            // the connection leaves its lanes.
            registration.due = false;
        }
        if registration.events & ONE_SHOT != 0 {
            registration.interest.note_kernel_event();
        }
        Some(epoll_event { events: reported, u64: registration.data })
    }
}

/// Takes the marks of the links at rest, after a ring. Returns whether the next check must do so
/// without a ring, because the peer of one cannot ring yet.
#[cold]
fn take_rung(
    links: &mut Watched,
    slot: Slot,
    sleeps: bool,
    ready: &mut ReadyQueue,
    duplicates: &Duplicates,
) -> bool {
    // First, so that each mark is either found here or rung for.
    links.learn_known(slot);
    links.take_rung(slot, sleeps, |link, marks| list_marked(ready, duplicates, link, marks));
    !links.all_known()
}

/// Queues the registrations of a connection by other fds than `fd` behind that one, since a mark is
/// for all of them.
#[cold]
fn queue_duplicates(
    ready: &mut ReadyQueue,
    numbers: Numbers,
    records: &mut Records<Registration>,
    fd: RawFd,
    behind: u64,
) {
    for other in numbers.filter(|other| *other != fd) {
        if let Some(registration) = records.get_mut(&other) {
            ready.enter_ready(&mut registration.position, other, behind);
        }
    }
}

/// Lists the connections that peers have marked on a link, each with its stamp.
#[inline(always)]
fn list_marked(ready: &mut ReadyQueue, duplicates: &Duplicates, link: &'static Link, mut marks: u64) {
    while marks != 0 {
        let conn = marks.trailing_zeros() as usize;
        marks &= marks - 1;
        let Some(name) = link.endpoint(conn) else { continue };
        if let Some(endpoint) = name.resolve() {
            let stamp = link.view().lane(conn, link.side.other()).stamped();
            let guess = endpoint.record();
            let newest = if duplicates.are_none() { None } else { duplicates.newest(name) };
            let fd = newest.unwrap_or_else(|| endpoint.fd());
            ready.marked.push(Reverse((stamp, fd, guess)));
        }
    }
}
