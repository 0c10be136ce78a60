//! Epoll instances that are themselves watched, by poll or by another instance. Only the kernel
//! reports that such an instance is ready. So its connections fall back to TCP, later ones never
//! leave it, and the kernel's list has what the program asked for and nothing else.
//!
//! The kernel must show what lanes still hold. The *level proxy* (`LevelProxyFd`) does that: it is
//! the listener of the instance's doorbell, in the kernel's list, and readable as long as a wait
//! would report an event of a lane. The doorbell cannot do it: once rung, it would make the
//! instance ready for ever.
//!
//! A shared instance has nothing of the shim's in the kernel's list. So only poll and select see
//! what its lanes still hold.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use shunt_abi::reason::Reason;

use super::kernel_interest::KernelInterest;
use super::kernel_list::change;
use super::lane_events::asked_of_kernel;
use super::wakeup::Wakeup;
use super::{EDGE, Epoll, FINISHED, IN, Inner, Registration, all};
use crate::base::names::EndpointRef;
use crate::base::waiter::Slot;
use crate::epoll::{LEAVE, Leaving};
use crate::socket::{endpoint, incoming, lost};

/// How many instances have a level proxy.
pub(super) static LEVEL_PROXIES: AtomicU32 = AtomicU32::new(0);

/// Returns whether any instance has a level proxy.
#[inline]
pub(crate) fn has_level_proxies() -> bool {
    LEVEL_PROXIES.load(Relaxed) != 0
}

/// Updates all level proxies, and returns whether there are any. Called before a wait on another
/// instance, and after a wait on any. By then the program may have read what lanes held, or a peer
/// may have rung without new bytes.
#[inline]
pub(crate) fn show_lanes() -> bool {
    let has_level_proxies = has_level_proxies();
    if has_level_proxies {
        all().for_each(Epoll::show_lanes);
    }
    has_level_proxies
}

/// Forgets the level proxies in a forked child, which has no lanes.
pub(super) fn forget_level_proxies() {
    LEVEL_PROXIES.store(0, Relaxed);
}

impl Epoll {
    /// Notes that the instance is itself watched, or that its watcher is about to check it.
    pub(crate) fn set_nested(&self) {
        let endpoints: Vec<_> = {
            let mut inner = self.inner.lock();
            if !inner.exposure.begin_watching() {
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

    /// Returns whether lanes may hold events that the kernel cannot show, because other processes
    /// have the instance.
    pub(crate) fn hides_lanes(&self) -> bool {
        self.is_active() && self.inner.lock().hides_lanes()
    }

    /// Returns whether a wait would report an event of such a lane.
    pub(crate) fn would_tell_of_hidden(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.catch_up(self);
        inner.hides_lanes() && inner.registrations.values().any(|one| one.would_tell(true))
    }
}

impl Inner {
    /// Replaces the doorbell by the level proxy in the kernel's list.
    fn begin_nesting(&mut self, epoll: &Epoll) {
        self.bury_deleted(epoll);
        self.unregister_disarmed();
        self.drop_surplus();
        if self.exposure.is_shared() || self.slot().is_none() {
            return;
        }
        self.unregister_wakeup(epoll);
        if self.registrations.answered.is_none() {
            return self.let_slot_go();
        }
        self.register_wakeup(epoll);
        self.mark_where(|_, _| true);
    }

    /// Makes the level proxy show whether a wait would report an event of a lane. A registration
    /// for which a check has found nothing is not queued any more, so the proxy does not stay
    /// readable.
    #[inline]
    pub(crate) fn show_lanes(&mut self, epoll: &Epoll) {
        if let Wakeup::LevelProxyFd(slot) = self.wakeup {
            self.show_by_level_proxy(epoll, slot);
        }
    }

    #[inline(never)]
    fn show_by_level_proxy(&mut self, epoll: &Epoll, slot: Slot) {
        if self.registrations.answered.is_none() {
            self.unregister_wakeup(epoll);
            return self.let_slot_go();
        }
        self.drop_surplus();
        let mut pending = self.ready.numbers().filter_map(|fd| self.registrations.get(&fd));
        let has_some = pending.any(|one| one.would_tell(false));
        if has_some {
            slot.ring();
        } else {
            slot.hear();
        }
    }

    /// Removes registrations from the kernel's list that the program has removed without the
    /// kernel, since they make the instance ready.
    pub(super) fn bury_deleted(&mut self, epoll: &Epoll) {
        let deleted = self.registrations.iter().filter(|(_, one)| one.interest.is_deleted());
        let deleted: Vec<RawFd> = deleted.map(|(fd, _)| *fd).collect();
        deleted.into_iter().for_each(|fd| self.bury(epoll, fd));
    }

    fn hides_lanes(&self) -> bool {
        self.exposure.is_shared() && !self.registrations.answered.is_none()
    }

    /// Removes all disarmed registrations: see [`Registration::unregister`].
    pub(super) fn unregister_disarmed(&mut self) {
        if self.exposure.excludes_disarmed() {
            self.registrations.iter_mut().for_each(|(&fd, one)| one.unregister(self.list.fd, fd));
        }
    }

    /// Removes one registration, if it is disarmed.
    pub(super) fn unregister(&mut self, fd: RawFd) {
        if self.exposure.excludes_disarmed()
            && let Some(one) = self.registrations.get_mut(&fd)
        {
            one.unregister(self.list.fd, fd);
        }
    }

    /// Undoes [`unregister`](Self::unregister). Called before the program changes the registration
    /// in the kernel's list, or code does that knows nothing of the removal.
    pub(super) fn register_again(&mut self, fd: RawFd) {
        if let Some(one) =
            self.registrations.get_mut(&fd).filter(|one| one.interest == KernelInterest::Unregistered)
        {
            one.mark_disarmed(self.list.fd, fd);
        }
    }

    /// Removes events from the kernel's list that the program has not asked for. They report the
    /// peer's death to a wait, as long as lanes answer. Once such an event holds and no peer has
    /// died, it would make the instance ready without a reason. A change of an edge-triggered
    /// registration makes a new edge, unless the kernel has nothing to report for it.
    fn drop_surplus(&mut self) {
        for (&fd, one) in self.registrations.iter_mut().filter(|(_, one)| one.interest.is_armed()) {
            let surplus = one.interest.events() & !one.events;
            let owner = one.owner.filter(|_| surplus != 0).and_then(EndpointRef::resolve);
            let Some(endpoint) = owner else { continue };
            let socket = endpoint.fd();
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
            one.interest.set_events(one.events);
            self.list.change(libc::EPOLL_CTL_MOD, fd, one.events, one.kernel_data());
        }
    }
}

impl Registration {
    /// Removes an EPOLLONESHOT registration from the kernel's list after a lane has reported its
    /// event. In that list, only an event disarms it, and until then an error would make the
    /// instance ready. It comes back when the program arms it.
    pub(super) fn unregister(&mut self, instance: RawFd, fd: RawFd) {
        let is_ours = self.interest.should_unregister() && self.name.is_token();
        if is_ours && change(instance, libc::EPOLL_CTL_DEL, fd, 0, 0) {
            self.interest.unregister();
        }
    }

    /// Returns whether a wait would report bytes in its lane.
    fn would_tell(&self, shared: bool) -> bool {
        let is_armed = self.events & IN != 0 && self.interest.is_armed();
        self.endpoint().filter(|_| is_armed).is_some_and(|endpoint| {
            let fd = endpoint.fd();
            if self.events & EDGE == 0 {
                incoming::is_readable(endpoint, fd)
            } else {
                // Bytes that follow bytes of TCP which have not come yet are an edge, too.
                (self.due || self.may_tell(endpoint, shared)) && incoming::look(endpoint, fd, true).arrived
            }
        })
    }
}
