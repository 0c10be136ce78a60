//! The events of one registered socket whose lanes answer.

use std::os::fd::RawFd;

use shunt_transport::Kernel;

use super::{ALWAYS, EDGE, FINISHED, IN, ONE_SHOT, OUT, Registration, URGENT};
use crate::base::kernel;
use crate::base::waiter::Slot;
use crate::socket::endpoint::Endpoint;
use crate::socket::incoming::Found;
use crate::socket::outgoing::Room;
use crate::socket::tcp::Tcp;
use crate::socket::{incoming, lost, outgoing};

/// The outcome of a check of a registration's lanes, see [`Inner::check_lanes`](super::Inner::check_lanes).
pub(super) struct Lanes {
    pub(super) reported: u32,
    /// There is no room, and the registration asks for some.
    pub(super) full: bool,
    /// TCP, not a lane, answers whether there is room.
    pub(super) by_tcp: bool,
    /// The lane has ended.
    pub(super) ended: bool,
    /// No process is at the other end any more.
    pub(super) died: bool,
    /// Something has arrived since the last check.
    pub(super) is_new: bool,
}

/// The answer for a registration whose peer may have died with unread bytes.
pub(super) struct Death {
    /// It has.
    pub(super) is_dead: bool,
    /// The events that this adds. `None` if it adds none, or the kernel has yet to report it.
    pub(super) events: Option<u32>,
}

/// The lanes' answer for a registration.
pub(super) struct Answer {
    pub(super) reported: u32,
    /// There is no room, and the registration asks for some.
    pub(super) full: bool,
    /// There are bytes behind those of TCP that have not come yet: an edge, but nothing to read. Or
    /// the kernel does not report that more have come.
    pub(super) behind: bool,
    /// No process is at the other end any more.
    pub(super) left: bool,
    /// TCP, not a lane, answers whether there is room.
    pub(super) by_tcp: bool,
}

impl Registration {
    /// Stores the index of the record in the endpoint, so that the next mark finds it without a
    /// search.
    #[cold]
    pub(super) fn note_record(&self) {
        if let Some(endpoint) = self.endpoint() {
            endpoint.set_record(self.position.index());
        }
    }

    /// Returns whether the registration reports bytes more than once, and a mark comes with them.
    #[inline]
    pub(super) fn is_told_of_lanes(&self) -> bool {
        self.events & IN != 0 && self.events & ONE_SHOT == 0 && self.answered.is_by_marks()
    }

    /// Returns the events of a lane that goes on, in an instance that no other process has. Returns
    /// `None`, and changes nothing, if [`Inner::look_at`](super::Inner::look_at) must find out more.
    #[inline(always)]
    pub(super) fn look_at_once(&mut self, endpoint: &Endpoint) -> Option<u32> {
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
        // TCP may have more to report with such an edge.
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

    /// Returns whether the kernel has bytes for a level-triggered registration. Without a name, the
    /// kernel's event for it could not be merged with this one.
    pub(super) fn bytes_of_kernel(&self, socket: RawFd) -> u32 {
        if self.name.is_known() { asked_of_kernel(socket, IN) & self.events & IN } else { 0 }
    }

    /// Returns the events that TCP adds to those of a lane.
    pub(super) fn events_of_kernel(
        &mut self,
        endpoint: &'static Endpoint,
        socket: RawFd,
        returned: &mut Vec<&'static Endpoint>,
    ) -> u32 {
        let said = asked_of_kernel(socket, self.events | FINISHED);
        self.beside = said & !(IN | OUT) != 0;
        let mut events = translate(endpoint, said);
        if said & FINISHED != 0 {
            events |= of_reset(endpoint, socket, returned).unwrap_or(0);
        }
        events & (self.events | ALWAYS)
    }

    /// Returns the events that the death of the peer adds, if it has died.
    pub(super) fn events_of_death(
        &self,
        endpoint: &'static Endpoint,
        socket: RawFd,
        died: bool,
        returned: &mut Vec<&'static Endpoint>,
    ) -> Death {
        let is_dead = died && lost::is_lost(endpoint, socket);
        let events = if is_dead { of_reset(endpoint, socket, returned) } else { None };
        Death { is_dead, events: events.map(|events| events & (self.events | ALWAYS)) }
    }

    /// Returns whether a check is worthwhile where no mark comes.
    pub(super) fn may_have_some(&self, endpoint: &Endpoint, shared: bool) -> bool {
        self.due || self.may_tell(endpoint, shared)
    }

    /// Returns whether a check may find an event, as far as that shows without a mark.
    pub(super) fn may_tell(&self, endpoint: &Endpoint, shared: bool) -> bool {
        let asks_for_bytes = self.events & (IN | URGENT) != 0;
        self.events & EDGE == 0 || asks_for_bytes && arrived(endpoint, shared) != self.arrived
    }

    /// Returns the waiter that the peer is to wake for room. There can be only one: this
    /// instance's, unless its waits check the registration by themselves.
    pub(super) fn asks_for_room(&self, slot: Option<Slot>) -> Option<Slot> {
        slot.filter(|_| self.answered.is_by_marks())
    }

    /// Returns whether lanes have an event for it now.
    pub(super) fn has_some(&self, endpoint: &Endpoint, slot: Option<Slot>) -> bool {
        let slot = self.asks_for_room(slot);
        said_by_lanes(endpoint, endpoint.fd(), self.events, slot).reported != 0
    }

    /// Returns whether anything has arrived since the last call.
    pub(super) fn note_arrived(&mut self, endpoint: &Endpoint, shared: bool) -> bool {
        let arrived = arrived(endpoint, shared);
        std::mem::replace(&mut self.arrived, arrived) != arrived
    }
}

/// Returns a value that changes when something has arrived by a lane, or in a way that the kernel
/// reports to no thread. The kernel reports urgent data only where it is requested, and in a shared
/// instance it is not requested for the sake of lanes.
pub(super) fn arrived(endpoint: &Endpoint, shared: bool) -> u64 {
    let fd = endpoint.fd();
    let urgent = shared && endpoint.is_attached() && kernel::has_urgent(fd);
    let is_unsaid = endpoint.options.low_water.of(fd) > 0;
    let unsaid = if is_unsaid { (Tcp { endpoint, fd }).received() } else { 0 };
    (incoming::arrived(endpoint) + unsaid) | if urgent { 1 << 63 } else { 0 }
}

/// Returns the lanes' answer now.
pub(super) fn said_by_lanes(endpoint: &Endpoint, fd: RawFd, wanted: u32, slot: Option<Slot>) -> Answer {
    judge(endpoint, &incoming::look(endpoint, fd, wanted & IN != 0), wanted, slot)
}

#[inline]
pub(super) fn judge(endpoint: &Endpoint, found: &Found, wanted: u32, slot: Option<Slot>) -> Answer {
    let is_told = found.readable || found.arrived && wanted & EDGE != 0;
    let mut events = if is_told { IN } else { 0 };
    let behind = found.arrived && !is_told || found.unsaid;
    let (room, left) = if wanted & OUT != 0 { outgoing::room(endpoint, slot) } else { (Room::OfTcp, false) };
    // The end of a lane is an edge of room, as an event of the socket is on TCP. A send finds out what
    // TCP takes.
    if matches!(room, Room::Some | Room::Ended) {
        events |= OUT;
    }
    let by_tcp = wanted & OUT != 0 && room == Room::OfTcp;
    let full = matches!(room, Room::None | Room::Returning);
    Answer { reported: events & wanted, full, behind, left, by_tcp }
}

/// Returns the events that the death of a peer with unread bytes adds, for a caller that holds the
/// lock of an instance. If both ends had finished, there is no error. Returns `None` if it adds
/// none, or the kernel has yet to report it. The endpoint is added to `returned`, so that all
/// instances learn that it is off its lane.
pub(super) fn of_reset(
    endpoint: &'static Endpoint,
    fd: RawFd,
    returned: &mut Vec<&'static Endpoint>,
) -> Option<u32> {
    let has_come = lost::reset_in_a_set(endpoint, fd)?;
    returned.push(endpoint);
    has_come.then(|| translate(endpoint, asked_of_kernel(fd, IN | OUT | FINISHED)))
}

/// Polls the socket in the kernel without waiting, and returns its events. The bits of poll and
/// epoll are the same.
pub(super) fn asked_of_kernel(fd: RawFd, wanted: u32) -> u32 {
    let mut entry = libc::pollfd { fd, events: wanted as u16 as i16, revents: 0 };
    kernel::poll_now(std::slice::from_mut(&mut entry));
    u32::from(entry.revents as u16) & (wanted | ALWAYS)
}

/// Translates the kernel's events of an attached socket: the lane answers for EPOLLOUT, and only
/// the shim knows a pending error.
pub(super) fn translate(endpoint: &Endpoint, events: u32) -> u32 {
    let error = if endpoint.owes_alone() { libc::EPOLLERR as u32 } else { 0 };
    let room = if events & OUT != 0 && endpoint.tx.lock().tx.on_lane() { OUT } else { 0 };
    events & !room | error
}
