//! epoll_wait: what the lanes answer, and how it goes together with what the kernel answers.

use std::cmp::Reverse;

use libc::{c_int, epoll_event};
use shunt_transport::Kernel;

use super::duplicates::{Duplicates, Numbers};
use super::line::Line;
use super::names::is_token;
use super::patience::{DEGRADED_NANOS, Patience, until_known};
use super::records::Records;
use super::registration::is_told_edges;
use super::report::Report;
use super::shared;
use super::watched::Watched;
use super::{ALWAYS, EDGE, Epoll, FINISHED, IN, Inner, ONE_SHOT, OUT, Registration, URGENT};
use crate::base::kernel;
use crate::base::waiter::Slot;
use crate::socket::endpoint::Endpoint;
use crate::socket::incoming::{self, Found};
use crate::socket::links::{Link, Pin};
use crate::socket::tcp::Tcp;
use crate::socket::{lost, outgoing, stall};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

impl Inner {
    /// Whether a look is worth while: cheap, for spinning and before a sleep.
    pub(crate) fn has_marks(&self) -> bool {
        let Some(slot) = self.slot() else { return false };
        self.links.have_marks(slot)
    }

    /// What a wait is going to return.
    pub(crate) fn begin<'a>(&mut self, events: &'a mut [epoll_event]) -> Report<'a> {
        Report::new(events, std::mem::take(&mut self.owners))
    }

    /// Ends that; returns how many events it has.
    pub(crate) fn finish(&mut self, report: Report<'_>) -> c_int {
        let count = report.len();
        self.owners = report.into_owners();
        count as c_int
    }

    /// The lanes' answer: adds what is ready, up to what the kernel must be asked before.
    #[inline]
    pub(crate) fn collect(&mut self, epoll: &Epoll, report: &mut Report<'_>) {
        let again = report.len() > 0;
        self.place_hollow();
        self.take_marks();
        self.look_at_pending(epoll, report, self.asked_all, 0);
        self.look_at_ghosts(epoll, report);
        if again {
            self.keep_order(report);
        }
    }

    /// What pends without a place may have come to have something since: then marks give the places, also those of links at rest.
    #[inline]
    fn place_hollow(&mut self) {
        if self.line.take_has_hollow() && self.links.has_some_at_rest() {
            self.look_for_hollow();
        }
    }

    #[inline(never)]
    fn look_for_hollow(&mut self) {
        self.rung |= self.line.numbers().any(|fd| self.lacks_place_for_some(fd));
    }

    /// What is told by level is to be looked at next in the order in which it has been told, and some of it has just been looked at twice.
    #[inline(never)]
    fn keep_order(&mut self, report: &Report<'_>) {
        for fd in report.owners() {
            if let Some(one) = self.registrations.get_mut(fd) {
                self.line.move_to_end(&mut one.place, *fd);
            }
        }
    }

    /// Whether something of a lane may have come after what only the kernel can tell of.
    pub(crate) fn awaits_kernel(&self) -> bool {
        self.awaits_kernel
    }

    /// Nobody asks the kernel: if that `is_due`, lanes have filled the report. It has the whole of the next one then, once all that was
    /// in line when it was last asked has had its turn: nobody waits for ever, and what came first is told first.
    #[inline]
    pub(crate) fn put_off_asking(&mut self, is_due: bool) {
        self.must_ask |= is_due;
        self.kernel_is_next = is_due && self.line.has_gone_round();
    }

    /// Whether the kernel is to be asked before lanes are looked at, for once.
    #[inline]
    pub(crate) fn is_kernel_next(&mut self) -> bool {
        std::mem::take(&mut self.kernel_is_next)
    }

    /// The kernel is about to be asked for all there is: whatever a lane has marked by now comes behind its answer.
    pub(crate) fn begin_asking(&mut self) {
        self.line.begin_round();
        for fd in self.line.numbers() {
            if let Some(registration) = self.registrations.get_mut(&fd) {
                registration.place.stand_behind(0);
            }
        }
    }

    /// It has told of all there was at this time, by [`order::now`](crate::base::order::now).
    pub(crate) fn note_asked(&mut self, at: u64) {
        self.asked_all = at;
    }

    /// Has what peers have marked looked at next, in the order in which they did, behind what is to be looked at already. Says when the
    /// first of them did.
    pub(super) fn take_marks(&mut self) -> Option<u64> {
        self.unread_behind = false;
        if self.answered.has_looks() {
            self.mark_unmarked();
        }
        let Inner { links, registrations, line, duplicates, .. } = self;
        if let Some(slot) = self.bell.slot() {
            links.take_marks(slot, |link, marks| list_marked(line, duplicates, link, marks));
            if self.rung {
                self.rung = false;
                take_rung(links, slot, self.sleepers > 0, line, duplicates);
            }
        }
        let first = line.marked.peek().map(|Reverse((stamp, ..))| stamp.at);
        while let Some(Reverse((stamp, fd, guess))) = line.marked.pop() {
            if let Some(registration) = registrations.find(fd, guess) {
                if registration.place.index() != guess {
                    registration.note_record();
                }
                line.enter_placed(&mut registration.place, fd, stamp.behind);
                let owner = registration.owner.filter(|_| !duplicates.are_none());
                if let Some(owner) = owner {
                    place_duplicates(line, duplicates.numbers(owner, fd), registrations, fd, stamp.behind);
                }
            }
        }
        first
    }

    /// The same for those whose marks go to another waiter, by whose stamps they are put in order.
    #[inline(never)]
    fn mark_unmarked(&mut self) {
        let shared = self.shared;
        for fd in self.attached_where(|one, endpoint| {
            !one.answered.is_by_marks() && one.may_have_some(endpoint, shared)
        }) {
            let has_new = |one: &Registration| {
                one.endpoint().filter(|endpoint| arrived(endpoint, shared) != one.arrived)
            };
            let at = self.registrations.get(&fd).and_then(has_new).and_then(|endpoint| endpoint.rx.lock().at);
            match at {
                Some(at) => self.line.marked.push(Reverse((at.incoming().0.stamped(), fd, 0))),
                None => {
                    let has_some = self.lacks_place_for_some(fd);
                    self.queue_for_look(fd, has_some);
                }
            }
        }
    }

    /// Looks at all marks, also where nobody has rung, and at what nobody marks for this instance. There an edge is told only
    /// if there is something new.
    pub(crate) fn look_unrung(&mut self) {
        self.rung = true;
        let shared = self.shared;
        self.mark_where(|one, endpoint| {
            !one.answered.is_by_marks()
                && (one.may_have_some(endpoint, shared)
                    || outgoing::is_returned(endpoint)
                    || lost::is_lost(endpoint, endpoint.fd.load(Relaxed))
                    || shared && incoming::unread(endpoint) == 0)
        });
    }

    /// Has the next look look at those attached registrations of which `is_due` says so.
    pub(super) fn mark_where(&mut self, is_due: impl Fn(&Registration, &'static Endpoint) -> bool) {
        self.attached_where(is_due).into_iter().for_each(|fd| self.mark_pending(fd));
    }

    /// Those attached registrations of which `is_one` says so.
    pub(super) fn attached_where(
        &self,
        is_one: impl Fn(&Registration, &'static Endpoint) -> bool,
    ) -> Vec<RawFd> {
        let found = |(fd, one): (&RawFd, &Registration)| {
            let endpoint = one.endpoint()?;
            is_one(one, endpoint).then_some(*fd)
        };
        self.registrations.iter().filter_map(found).collect()
    }

    /// Tells what is to be told of what is pending, up to what a peer has marked after it had sent anything by TCP later than `until`.
    /// As many as `kept` places of the report stay free.
    fn look_at_pending(&mut self, epoll: &Epoll, report: &mut Report<'_>, until: u64, kept: usize) {
        let before = report.len();
        self.awaits_kernel = false;
        for _ in 0..self.line.len() {
            if report.places() <= kept {
                break;
            }
            let Some(entry) = self.line.first() else { break };
            let fd = entry.fd;
            let Some(registration) = self.registrations.at(entry.index).filter(|one| one.place.is(entry))
            else {
                self.line.drop_first();
                continue;
            };
            if registration.place.behind() > until {
                self.awaits_kernel = true;
                break;
            }
            self.line.leave(&mut registration.place);
            let Some(endpoint) = registration.endpoint() else { continue };
            if !registration.held.is_armed() {
                continue;
            }
            // Most looks are at a lane that goes on: there is nothing of what `look_at` sees to.
            if !self.shared
                && registration.is_told_of_lanes()
                && let Some(reported) = registration.look_at_once(endpoint)
            {
                if reported != 0 {
                    // What came before the registration is one edge, whoever tells of it.
                    self.must_ask |= registration.due && registration.events & EDGE != 0;
                    registration.due = false;
                    report.tell(fd, epoll_event { events: reported, u64: registration.data }, before);
                    if registration.events & EDGE == 0 {
                        self.line.enter(&mut registration.place, fd);
                    }
                }
                continue;
            }
            self.look_at(epoll, report, before, fd, endpoint);
        }
    }

    /// Tells what is to be told of one whose turn it is, which is armed: it becomes one with what is among the first `before` of the report.
    #[inline(never)]
    fn look_at(
        &mut self,
        epoll: &Epoll,
        report: &mut Report<'_>,
        before: usize,
        fd: RawFd,
        endpoint: &'static Endpoint,
    ) {
        let slot = self.slot();
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        let slot = registration.asks_for_room(slot);
        // The registration may go by the number of a duplicate, and that be closed.
        let socket = endpoint.fd.load(Relaxed);
        // Of a lane that another process has drained nobody else tells.
        let is_drained = self.shared && incoming::unread(endpoint) == 0;
        // Before the look, so that what arrives during it is looked at again.
        let asks = registration.events & EDGE != 0 || !registration.answered.is_by_marks();
        // Bytes wake those who ask for some, and nobody else.
        let is_new = asks
            && registration.note_arrived(endpoint, self.shared)
            && registration.events & (IN | URGENT) != 0;
        let found = incoming::look(endpoint, socket, registration.events & IN != 0);
        if is_drained || found.returned && outgoing::is_returned(endpoint) {
            self.returned.push(endpoint);
        }
        let Answer { mut reported, full, behind, left, by_tcp } =
            judge(endpoint, &found, registration.events, slot);
        if behind {
            // Whoever reads TCP up to there may be another thread, and then nothing tells this one; nor of bytes below SO_RCVLOWAT.
            self.line.enter(&mut registration.place, fd);
            self.unread_behind = true;
        }
        self.must_ask |= left;
        if by_tcp && (registration.sends_on_lane || reported != 0) {
            // If the direction has not left its lane, but the lane has ended, the kernel's set does not answer for it yet.
            reported |= asked_of_kernel(socket, registration.events) & registration.events & OUT;
        }
        let is_level = registration.events & IN != 0 && registration.events & EDGE == 0;
        if reported == 0 && is_level && (behind || !found.on_lane) {
            // Its place is that of bytes of TCP: they are to be read before those of the lane, or the sender has taken them back.
            if !report.has_kernels() {
                // Of one without a name it would tell once more.
                let asks = registration.name.is_known();
                reported = if asks { asked_of_kernel(socket, IN) & registration.events & IN } else { 0 };
                self.must_ask |= reported != 0;
            } else if report.owners().contains(&fd) {
                // The kernel has just told of it, and will again. Nobody else may: it may have told by the name that the registration had
                // before its connection came onto lanes.
                self.line.enter(&mut registration.place, fd);
            }
        }
        let mut is_lost = found.died && lost::is_lost(endpoint, socket);
        if is_lost {
            let said = of_reset(endpoint, socket, &mut self.returned);
            is_lost = said.is_some();
            reported |= said.unwrap_or(0) & (registration.events | ALWAYS);
            // It has an event of this too, and for an edge the two are one.
            self.must_ask = true;
        }
        let more = by_tcp || endpoint.is_shut() || endpoint.has_peer_finished();
        let has_more = more || found.ended || registration.beside;
        // A peer marks a connection for other reasons too.
        if registration.events & EDGE != 0 && !(is_new || registration.due || is_lost) {
            reported = 0;
        }
        // With TCP, bytes that arrive are an edge for those who ask for any, and also if another thread has read them since.
        let has_edge = reported != 0 || more && is_new && registration.events & (IN | URGENT) != 0;
        let is_edge = registration.events & EDGE != 0 && has_edge;
        let is_whole = !has_more && registration.events & ONE_SHOT == 0;
        if !is_whole && reported != 0 || is_edge && more {
            // It may be the only report of this, for the kernel's may find no room beside it: so what TCP would add belongs into it.
            let wanted = registration.events | ALWAYS;
            let said = asked_of_kernel(socket, registration.events | FINISHED);
            registration.beside = said & !(IN | OUT) != 0;
            reported |= translate(endpoint, said) & wanted;
            if said & FINISHED != 0 {
                reported |= of_reset(endpoint, socket, &mut self.returned).unwrap_or(0) & wanted;
            }
        }
        if reported != 0 {
            // What came before the registration is one edge, whoever tells of it.
            self.must_ask |= is_edge && registration.due;
            registration.due = false;
            report.tell(fd, epoll_event { events: reported, u64: registration.data }, before);
            if registration.events & ONE_SHOT != 0 {
                registration.held.spend();
                if self.shared {
                    self.disarm(epoll, fd);
                } else if self.nested {
                    registration.withdraw(self.fd, fd);
                }
            } else if registration.events & EDGE == 0 {
                self.line.enter(&mut registration.place, fd);
            }
        }
        if full {
            self.note_full(fd);
        }
    }

    /// The same as [`take_over`](Self::take_over), and the lanes' answer in its place: the doorbell stands among the events where the first
    /// lane spoke, and what its peer had sent by TCP before stands ahead of it. If nothing does, the doorbell has been rung for something
    /// else, and what the peer has sent by TCP since stands behind it. The kernel has told of all there was at the time `all`, if it has.
    pub(crate) fn take_over_with_lanes(
        &mut self,
        epoll: &Epoll,
        report: &mut Report<'_>,
        count: usize,
        all: Option<u64>,
    ) -> bool {
        let room = &report.room()[..count];
        let has_rung = match room.iter().position(|event| event.u64 == self.marker) {
            Some(place) => {
                let mut behind = std::mem::take(&mut self.behind);
                behind.clear();
                behind.extend_from_slice(&room[place + 1..]);
                self.take_over(report, place + 1);
                let first = self.take_marks().filter(|_| place > 0).unwrap_or(0);
                self.look_at_pending(epoll, report, first.max(self.asked_all), behind.len());
                report.room()[..behind.len()].copy_from_slice(&behind);
                self.take_over(report, behind.len());
                self.behind = behind;
                true
            }
            None => self.take_over(report, count),
        };
        if let Some(all) = all {
            self.note_asked(all);
        }
        self.collect(epoll, report);
        has_rung
    }

    /// Takes over the `count` events that the kernel has put behind those of `report`: drops the doorbell's, and adds
    /// what lanes say to a socket's. `true` if the doorbell was among them.
    pub(crate) fn take_over(&mut self, report: &mut Report<'_>, count: usize) -> bool {
        report.begin_kernels();
        let before = report.len();
        let mut has_rung = false;
        for index in before..before + count {
            let event = report.at(index);
            let data = event.u64;
            if data == self.marker {
                has_rung = true;
            } else if let Some(fd) = self.names.find(data) {
                if let Some(event) = self.own(fd, event.events) {
                    report.tell(fd, event, before);
                }
            } else if !is_token(data) {
                report.tell_kernels(event);
            }
        }
        // What it tells by level it tells again.
        self.must_ask |= report.len() > before;
        self.rung |= has_rung;
        has_rung
    }

    /// What is to be told of a registration for which the kernel has these events.
    fn own(&mut self, fd: RawFd, events: u32) -> Option<epoll_event> {
        let registration = self.registrations.get_mut(&fd)?;
        let is_told_edges = is_told_edges(registration.events);
        // Whatever was to come behind the kernel's word has it now.
        registration.place.stand_behind(0);
        if !is_told_edges {
            // TCP may end here and the lane begin: the next look must not wait for another mark.
            self.line.enter(&mut registration.place, fd);
        }
        // In a shared set the kernel knows better, unless it has a token.
        if registration.held.is_disarmed() && (!self.shared || registration.name.is_token()) {
            registration.held.fall_silent();
            return None;
        }
        if registration.held.is_deleted() {
            registration.held.fall_silent();
            self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
            return None;
        }
        let mut reported = events;
        let endpoint = registration.endpoint();
        if let Some(endpoint) = endpoint {
            let socket = endpoint.fd.load(Relaxed);
            endpoint.rx.lock().rx.note_tcp_news();
            reported = translate(endpoint, events);
            if events & FINISHED != 0 {
                endpoint.note_peer_finished();
            }
            if events & URGENT != 0 {
                registration.urgent_at = (Tcp { endpoint, fd: socket }).received();
            }
            reported |= of_reset(endpoint, socket, &mut self.returned).unwrap_or(0);
            // It may be the only report of this, so what lanes would add belongs into it.
            let slot = registration.asks_for_room(self.bell.slot());
            let answer = said_by_lanes(endpoint, socket, registration.events, slot);
            reported |= answer.reported;
            if answer.by_tcp && registration.sends_on_lane {
                reported |= asked_of_kernel(socket, registration.events) & OUT;
            }
            if registration.events & (ONE_SHOT | EDGE) != 0 {
                // And TCP since.
                reported |= translate(endpoint, asked_of_kernel(socket, registration.events));
            } else {
                registration.beside = true;
            }
        }
        if !self.shared {
            reported &= registration.events | ALWAYS;
        }
        if reported == 0 {
            if !is_told_edges {
                // The kernel's set holds more than is wanted, and would report it for ever.
                self.set_kernel_events(fd, endpoint);
            }
            return None;
        }
        if endpoint.is_some() && (registration.events & OUT == 0 || reported & OUT != 0) {
            // What lanes have to tell is in it, and the kernel need not tell it again once the connection leaves them.
            registration.due = false;
        }
        if registration.events & ONE_SHOT != 0 {
            registration.held.fall_silent();
        }
        Some(epoll_event { events: reported, u64: registration.data })
    }

    /// How long a sleep may last at most, beside what the program wants.
    pub(crate) fn patience(&mut self, epoll: &Epoll) -> Patience {
        self.put_bell_back(epoll);
        if self.answered.is_none() {
            return match self.shared && shared::may_be_added() {
                true => Patience::Unrung(DEGRADED_NANOS),
                false => Patience::Endless,
            };
        }
        if self.answered.has_looks() {
            self.gain_all_marks();
        }
        let Some(slot) = self.slot().filter(|_| !self.answered.has_looks() && !self.shared) else {
            return Patience::Unrung(DEGRADED_NANOS);
        };
        if self.is_unheard() {
            // What is left in lanes was there before. What comes now, TCP brings.
            return Patience::Unrung(until_known(u32::MAX));
        }
        slot.register();
        self.rung |= self.links.learn_known(slot);
        if let Some(in_a_row) = self.links.note_sleep_unknown() {
            return Patience::Unrung(until_known(in_a_row));
        }
        self.forget_room();
        let full = self.full.iter().filter_map(|fd| self.registrations.get(fd)?.endpoint());
        full.map(outgoing::longest_sleep).min().map_or(Patience::Endless, Patience::Room)
    }

    /// The same once more, after the last look before the sleep.
    pub(crate) fn last_patience(&self, before: Patience) -> Patience {
        if self.unread_behind { Patience::Unrung(DEGRADED_NANOS) } else { before }
    }

    /// Takes those off the list of full lanes that do not wait for room any more. Who has found some may be another, and this set has it to
    /// tell yet.
    fn forget_room(&mut self) {
        let Inner { registrations, line, .. } = self;
        self.full.retain(|fd| {
            let Some(registration) = registrations.get_mut(fd) else { return false };
            let wanted = registration.events & OUT != 0 && !registration.held.is_disarmed();
            let endpoint = registration.endpoint();
            let is_full = endpoint.is_some_and(|endpoint| endpoint.tx.lock().seen.backlog.is_waiting());
            registration.full = wanted && is_full;
            if wanted && !is_full && registration.due {
                line.enter(&mut registration.place, *fd);
            }
            registration.full
        });
    }

    /// Announces a sleep of at most `patience`; the caller looks once more afterwards, and then [rests](Self::rest) or not.
    pub(crate) fn announce_sleep(&mut self, patience: Patience) {
        let is_short = patience.is_unrung();
        self.sleeps_are_short = is_short && (self.sleepers == 0 || self.sleeps_are_short);
        self.sleepers += 1;
        if let Some(slot) = self.slot() {
            self.links.announce_sleep(slot);
        }
    }

    /// Nothing was found: until the doorbell is rung, nobody need look at the links.
    pub(crate) fn rest(&mut self) {
        self.links.rest();
    }

    /// Something was found: there is no sleep. Others that do sleep must be woken for what comes.
    pub(crate) fn stay_awake(&mut self, epoll: &Epoll) {
        self.awake(epoll);
        let Some(slot) = self.slot() else { return };
        if self.sleepers == 0 {
            self.links.stay_awake(slot);
        } else {
            self.links.announce_sleep(slot);
        }
    }

    /// The sleep is over.
    pub(crate) fn awake(&mut self, epoll: &Epoll) {
        // An instance that was closed meanwhile counts from zero.
        self.sleepers = self.sleepers.saturating_sub(1);
        self.retire_doorbell(epoll);
    }

    /// This thread was told of a ring, and returns to the program without having looked: a sleeping one does.
    pub(crate) fn pass_ring_on(&self) {
        if let Some(slot) = self.slot().filter(|_| self.rung && self.sleepers > 0) {
            slot.ring();
        }
    }

    /// Whether what the lanes have said is not all, since a peer has left.
    pub(crate) fn must_ask(&mut self) -> bool {
        std::mem::take(&mut self.must_ask)
    }

    /// A look or a sleep is over, and has `found` something or not. Says whether there is something to [take](Self::take_left), which is
    /// seldom so.
    #[inline]
    pub(crate) fn end_round(&mut self, epoll: &Epoll, found: bool) -> bool {
        if found {
            self.note_change(epoll);
        }
        self.show_lanes(epoll);
        !self.returned.is_empty() || !self.laid.is_empty()
    }

    /// What is to be done outside the lock: endpoints whose receivers have given bytes back are to be sent again, and what has been read of
    /// closed ones is to be let go of.
    pub(crate) fn take_left(&mut self) -> (Vec<&'static Endpoint>, Vec<Pin>) {
        (std::mem::take(&mut self.returned), std::mem::take(&mut self.laid))
    }

    /// Those whose peers will never know this instance's doorbell go back to TCP.
    pub(crate) fn deaf(&self) -> Vec<&'static Endpoint> {
        let Some(slot) = self.slot().filter(|_| !self.links.all_known()) else { return Vec::new() };
        let attached = self.registrations.values().filter_map(Registration::endpoint);
        attached.filter(|endpoint| !incoming::can_be_rung(endpoint, Some(slot))).collect()
    }

    /// Returns the senders that have [waited](Self::stalled) for too long, at most once in a while:
    /// for a set that always has something to tell, so that none of its waits ends without.
    #[inline]
    pub(crate) fn stalled_if_due(&mut self, now: u64) -> Vec<&'static Endpoint> {
        if self.full.is_empty() || now.saturating_sub(self.looked_at_full) < stall::AWAKE_LOOK_NANOS {
            return Vec::new();
        }
        self.looked_at_full = now;
        self.forget_room();
        self.stalled()
    }

    /// Returns the senders that have waited for room in their lanes for too long, which are to fall
    /// back to TCP.
    #[cold]
    pub(crate) fn stalled(&mut self) -> Vec<&'static Endpoint> {
        let full = self.full.iter().filter_map(|fd| self.registrations.get(fd)?.endpoint());
        full.filter(|endpoint| outgoing::has_stalled(endpoint)).collect()
    }
}

/// The marks of the links at rest, after a ring.
#[cold]
fn take_rung(links: &mut Watched, slot: Slot, sleeps: bool, line: &mut Line, duplicates: &Duplicates) {
    links.take_rung(slot, sleeps, |link, marks| list_marked(line, duplicates, link, marks));
}

/// A mark is for all registrations of its connection: those of other numbers than `fd` come behind that.
#[cold]
fn place_duplicates(
    line: &mut Line,
    numbers: Numbers,
    registrations: &mut Records<Registration>,
    fd: RawFd,
    behind: u64,
) {
    for other in numbers.filter(|other| *other != fd) {
        if let Some(registration) = registrations.get_mut(&other) {
            line.enter_placed(&mut registration.place, other, behind);
        }
    }
}

/// What peers have marked on a link, with what they have said of the time when they did.
#[inline(always)]
fn list_marked(line: &mut Line, duplicates: &Duplicates, link: &'static Link, mut marks: u64) {
    while marks != 0 {
        let conn = marks.trailing_zeros() as usize;
        marks &= marks - 1;
        let Some(name) = link.endpoint(conn) else { continue };
        if let Some(endpoint) = name.resolve() {
            let stamp = link.view().lane(conn, link.side.other()).stamped();
            let guess = endpoint.record.load(Relaxed);
            let newest = if duplicates.are_none() { None } else { duplicates.newest(name) };
            let fd = newest.unwrap_or_else(|| endpoint.fd.load(Relaxed));
            line.marked.push(Reverse((stamp, fd, guess)));
        }
    }
}

impl Registration {
    /// The next mark finds it without a search.
    #[cold]
    fn note_record(&self) {
        if let Some(endpoint) = self.endpoint() {
            endpoint.record.store(self.place.index(), Relaxed);
        }
    }

    /// Whether it is told more than once whether there are bytes, and a mark comes with them.
    #[inline]
    fn is_told_of_lanes(&self) -> bool {
        self.events & IN != 0 && self.events & ONE_SHOT == 0 && self.answered.is_by_marks()
    }

    /// What is to be told of a lane that goes on, in a set that no other process has. `None`: nothing is known or changed, and
    /// [`Inner::look_at`] finds out what else there is.
    #[inline(always)]
    fn look_at_once(&mut self, endpoint: &Endpoint) -> Option<u32> {
        if self.beside {
            return None;
        }
        if self.events & (OUT | EDGE) != 0 {
            return self.look_for_room_or_edges(endpoint);
        }
        let has_some = incoming::look_at_once(endpoint)?.unread > 0;
        Some(if has_some { self.events & IN } else { 0 })
    }

    #[inline(never)]
    fn look_for_room_or_edges(&mut self, endpoint: &Endpoint) -> Option<u32> {
        let is_edge = self.events & EDGE != 0;
        // Of an edge TCP may have more to tell then.
        if is_edge && (endpoint.is_shut() || endpoint.has_peer_finished()) {
            return None;
        }
        let bytes = incoming::look_at_once(endpoint)?;
        let wants_room = self.events & OUT != 0;
        if wants_room && !outgoing::has_room_at_once(endpoint) {
            return None;
        }
        if is_edge && std::mem::replace(&mut self.arrived, bytes.arrived) == bytes.arrived && !self.due {
            return Some(0);
        }
        let readable = if bytes.unread > 0 { IN } else { 0 };
        Some((readable | if wants_room { OUT } else { 0 }) & self.events)
    }

    /// Whether it is worth a look where no mark comes.
    fn may_have_some(&self, endpoint: &Endpoint, shared: bool) -> bool {
        self.due || self.may_tell(endpoint, shared)
    }

    /// Whether a look may find what is to be told, as far as that shows without a mark.
    pub(super) fn may_tell(&self, endpoint: &Endpoint, shared: bool) -> bool {
        let asks_for_bytes = self.events & (IN | URGENT) != 0;
        self.events & EDGE == 0 || asks_for_bytes && arrived(endpoint, shared) != self.arrived
    }

    /// The waiter that the peer is to wake for room, of which there can be one: this set's, unless it sees by itself what becomes of it.
    fn asks_for_room(&self, slot: Option<Slot>) -> Option<Slot> {
        slot.filter(|_| self.answered.is_by_marks())
    }

    /// Whether lanes have something of it to be told now.
    pub(super) fn has_some(&self, endpoint: &Endpoint, slot: Option<Slot>) -> bool {
        let slot = self.asks_for_room(slot);
        said_by_lanes(endpoint, endpoint.fd.load(Relaxed), self.events, slot).reported != 0
    }

    /// Whether anything has arrived since this was last asked.
    fn note_arrived(&mut self, endpoint: &Endpoint, shared: bool) -> bool {
        let arrived = arrived(endpoint, shared);
        std::mem::replace(&mut self.arrived, arrived) != arrived
    }
}

/// A number that is another once something has arrived, by a lane or so that the kernel tells nobody. Of urgent data it tells
/// those who have asked, and in a shared set nobody does on behalf of who has bytes in a lane.
pub(super) fn arrived(endpoint: &Endpoint, shared: bool) -> u64 {
    let fd = endpoint.fd.load(Relaxed);
    let urgent = shared && endpoint.is_attached() && kernel::has_urgent(fd);
    let is_unsaid = endpoint.low_water.of(fd) > 0;
    let unsaid = if is_unsaid { (Tcp { endpoint, fd }).received() } else { 0 };
    (incoming::arrived(endpoint) + unsaid) | if urgent { 1 << 63 } else { 0 }
}

/// What the lanes of a registration say.
struct Answer {
    reported: u32,
    /// There is no room, and some is wanted.
    full: bool,
    /// There are bytes, but behind those of TCP that have not come yet: an edge, but nothing to read. Or the kernel does
    /// not tell of more.
    behind: bool,
    /// There is nobody at the other end any more.
    left: bool,
    /// Whether there is room is TCP's to say.
    by_tcp: bool,
}

/// What lanes say now.
fn said_by_lanes(endpoint: &Endpoint, fd: RawFd, wanted: u32, slot: Option<Slot>) -> Answer {
    judge(endpoint, &incoming::look(endpoint, fd, wanted & IN != 0), wanted, slot)
}

#[inline]
fn judge(endpoint: &Endpoint, found: &Found, wanted: u32, slot: Option<Slot>) -> Answer {
    let is_told = found.readable || found.arrived && wanted & EDGE != 0;
    let mut events = if is_told { IN } else { 0 };
    let behind = found.arrived && !is_told || found.unsaid;
    let (room, left) = if wanted & OUT != 0 { outgoing::room(endpoint, slot) } else { (None, false) };
    if room == Some(true) {
        events |= OUT;
    }
    let by_tcp = wanted & OUT != 0 && room.is_none();
    Answer { reported: events & wanted, full: room == Some(false), behind, left, by_tcp }
}

/// What the death of a peer with unread bytes adds, for one who holds the lock of a set: of two that had finished, no error. `None`: nothing,
/// or the kernel has yet to tell of it. All sets are told afterwards that the endpoint is off its lane: it joins those that are `returned`.
fn of_reset(endpoint: &'static Endpoint, fd: RawFd, returned: &mut Vec<&'static Endpoint>) -> Option<u32> {
    let has_come = lost::reset_in_a_set(endpoint, fd)?;
    returned.push(endpoint);
    has_come.then(|| translate(endpoint, asked_of_kernel(fd, IN | OUT | FINISHED)))
}

/// What the kernel says of the socket now. The bits of poll and epoll are the same.
pub(super) fn asked_of_kernel(fd: RawFd, wanted: u32) -> u32 {
    let mut entry = libc::pollfd { fd, events: wanted as u16 as i16, revents: 0 };
    kernel::poll_now(std::slice::from_mut(&mut entry));
    u32::from(entry.revents as u16) & (wanted | ALWAYS)
}

/// The kernel's events for an attached socket, with EPOLLOUT as the lane has it, and the error that only the shim knows.
fn translate(endpoint: &Endpoint, events: u32) -> u32 {
    let error = if endpoint.owes_alone() { libc::EPOLLERR as u32 } else { 0 };
    let room = if events & OUT != 0 && endpoint.tx.lock().tx.on_lane() { OUT } else { 0 };
    events & !room | error
}
