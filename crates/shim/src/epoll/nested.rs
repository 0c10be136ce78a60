//! Sets that are themselves watched, by poll or by another set. Only the kernel tells of them, so their connections go back to
//! TCP and later ones never leave it, and the kernel's set holds what the program has asked for and nothing else.
//!
//! What lanes still hold, the kernel must be shown. The *lamp* is the listener of the set's doorbell: in the kernel's set, and
//! readable as long as a wait would tell of a lane. The doorbell itself would make the set ready for ever once it has been rung.
//!
//! A set that other processes have too holds nothing of ours, so what its lanes still hold is seen by poll and select alone.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use shunt_abi::reason::Reason;

use super::answer::asked_of_kernel;
use super::bell::Bell;
use super::held::Held;
use super::registration::change;
use super::{EDGE, Epoll, FINISHED, IN, Inner, Registration, all};
use crate::base::names::EndpointRef;
use crate::base::waiter::Slot;
use crate::epoll::{LEAVE, Leaving};
use crate::socket::{endpoint, incoming, lost};

/// Sets that have a lamp.
pub(super) static LAMPS: AtomicU32 = AtomicU32::new(0);

/// Whether there is any lamp.
#[inline]
pub(crate) fn has_lamps() -> bool {
    LAMPS.load(Relaxed) != 0
}

/// Before a wait on another set, and after one on any: the program may have read what lanes held since they were last shown, or
/// a peer has rung who has brought nothing. Whether there is any lamp.
#[inline]
pub(crate) fn show_lanes() -> bool {
    let has_lamps = has_lamps();
    if has_lamps {
        all().for_each(Epoll::show_lanes);
    }
    has_lamps
}

/// In a forked child, which has no lanes.
pub(super) fn forget_lamps() {
    LAMPS.store(0, Relaxed);
}

impl Epoll {
    /// The instance is itself watched, or looked at by who watches it.
    pub(crate) fn set_nested(&self) {
        let endpoints: Vec<_> = {
            let mut inner = self.inner.lock();
            if std::mem::replace(&mut inner.nested, true) {
                return inner.show_lanes(self);
            }
            inner.registrations.keys().filter_map(|fd| endpoint::behind(*fd)).collect()
        };
        endpoints.into_iter().for_each(|endpoint| LEAVE.call((endpoint, Leaving::Bar, Reason::NestedEpoll)));
        let mut inner = self.inner.lock();
        inner.begin_nesting(self);
        inner.show_lanes(self);
    }

    fn show_lanes(&self) {
        self.inner.lock().show_lanes(self);
    }

    /// Whether lanes may hold something that the kernel cannot be shown, since the set is not this process's alone.
    pub(crate) fn hides_lanes(&self) -> bool {
        self.is_active() && self.inner.lock().hides_lanes()
    }

    /// Whether a wait would tell of such a lane.
    pub(crate) fn would_tell_of_hidden(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.catch_up(self);
        inner.hides_lanes() && inner.registrations.values().any(|one| one.would_tell(true))
    }
}

impl Inner {
    /// The doorbell's place in the kernel's set becomes the lamp's.
    fn begin_nesting(&mut self, epoll: &Epoll) {
        self.bury_deleted(epoll);
        self.withdraw_disarmed();
        self.drop_surplus();
        if self.shared || self.slot().is_none() {
            return;
        }
        self.take_bell_out(epoll);
        if self.answered.is_none() {
            return self.let_slot_go();
        }
        self.put_bell(epoll);
        self.mark_where(|_, _| true);
    }

    /// Has the lamp say whether a wait would tell of a lane. What a look has found nothing of is not pending any more: it does
    /// not shine for ever.
    #[inline]
    pub(crate) fn show_lanes(&mut self, epoll: &Epoll) {
        if let Bell::Lamp(slot) = self.bell {
            self.show_by_lamp(epoll, slot);
        }
    }

    #[inline(never)]
    fn show_by_lamp(&mut self, epoll: &Epoll, slot: Slot) {
        if self.answered.is_none() {
            self.take_bell_out(epoll);
            return self.let_slot_go();
        }
        self.drop_surplus();
        let mut pending = self.line.numbers().filter_map(|fd| self.registrations.get(&fd));
        let has_some = pending.any(|one| one.would_tell(false));
        if has_some {
            slot.ring();
        } else {
            slot.hear();
        }
    }

    /// What the program has removed without the kernel's knowing makes the set ready.
    pub(super) fn bury_deleted(&mut self, epoll: &Epoll) {
        let deleted = self.registrations.iter().filter(|(_, one)| one.held.is_deleted());
        let deleted: Vec<RawFd> = deleted.map(|(fd, _)| *fd).collect();
        deleted.into_iter().for_each(|fd| self.bury(epoll, fd));
    }

    fn hides_lanes(&self) -> bool {
        self.shared && !self.answered.is_none()
    }

    /// See [`Registration::withdraw`].
    pub(super) fn withdraw_disarmed(&mut self) {
        if self.nested && !self.shared {
            self.registrations.iter_mut().for_each(|(&fd, one)| one.withdraw(self.fd, fd));
        }
    }

    /// The same, of one.
    pub(super) fn withdraw(&mut self, fd: RawFd) {
        if self.nested
            && !self.shared
            && let Some(one) = self.registrations.get_mut(&fd)
        {
            one.withdraw(self.fd, fd);
        }
    }

    /// Undoes that, before the program, or somebody who knows nothing of it, makes of the registration what the kernel's set must
    /// know.
    pub(super) fn reinstate(&mut self, fd: RawFd) {
        if let Some(one) = self.registrations.get_mut(&fd).filter(|one| one.held == Held::Withdrawn) {
            one.mark_disarmed(self.fd, fd);
        }
    }

    /// What the kernel's set holds beyond what the program has asked for is there to tell a wait of the peer's death, as long as
    /// lanes answer. Once it holds true and nobody has died, it has done that, and would make the set ready for nothing. Of what is
    /// told edges a change makes a new one, but not where the kernel has nothing to tell.
    fn drop_surplus(&mut self) {
        for (&fd, one) in self.registrations.iter_mut().filter(|(_, one)| one.held.is_armed()) {
            let surplus = one.held.events() & !one.events;
            let owner = one.owner.filter(|_| surplus != 0).and_then(EndpointRef::resolve);
            let Some(endpoint) = owner else { continue };
            let socket = endpoint.fd.load(Relaxed);
            let said = asked_of_kernel(socket, one.events | surplus);
            let is_needed =
                one.answered.is_by_lanes() && (said & surplus == 0 || lost::is_lost(endpoint, socket));
            let makes_edge = one.events & EDGE != 0 && said & !surplus != 0;
            if is_needed || makes_edge {
                continue;
            }
            if said & FINISHED != 0 {
                endpoint.note_peer_finished();
            }
            one.held.hold(one.events);
            change(self.fd, libc::EPOLL_CTL_MOD, fd, one.events, one.kernel_data());
        }
    }
}

impl Registration {
    /// A lane has told of a registration for one event. In the kernel's set nothing but an event of its own disarms it, and until
    /// then an error would make the set ready. So it is taken out, and comes back when the program arms it.
    pub(super) fn withdraw(&mut self, set: RawFd, fd: RawFd) {
        let is_told = self.held.is_to_withdraw() && self.name.is_token();
        if is_told && change(set, libc::EPOLL_CTL_DEL, fd, 0, 0) {
            self.held.withdraw();
        }
    }

    /// Whether a wait would tell of bytes in its lane.
    fn would_tell(&self, shared: bool) -> bool {
        let is_armed = self.events & IN != 0 && self.held.is_armed();
        self.endpoint().filter(|_| is_armed).is_some_and(|endpoint| {
            let fd = endpoint.fd.load(Relaxed);
            if self.events & EDGE == 0 {
                incoming::is_readable(endpoint, fd)
            } else {
                // Bytes behind those that TCP has not brought yet are an edge, too.
                (self.due || self.may_tell(endpoint, shared)) && incoming::look(endpoint, fd, true).arrived
            }
        })
    }
}
