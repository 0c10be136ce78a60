//! epoll_ctl, and what attaching does to a registration: which part of it the kernel's set answers, and which the lanes.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::epoll_event;
use shunt_abi::reason::Reason;

use super::{EDGE, EXCLUSIVE, Epoll, Inner, ONE_SHOT, OUT, Registration};
use crate::endpoint::Endpoint;
use crate::links::Link;
use crate::waiter::Slot;
use crate::{errno, real};

/// What the kernel's set must hold: TCP's send buffer is empty while a lane is used, so EPOLLOUT is ours then.
pub(super) fn kernel_events(endpoint: Option<&Endpoint>, wanted: u32) -> u32 {
    match endpoint {
        Some(endpoint) if endpoint.is_attached() && endpoint.tx.lock().tx.on_lane() => wanted & !OUT,
        _ => wanted,
    }
}

impl Inner {
    /// `epoll_ctl` for a level-triggered registration of an attached socket, without the kernel where its set holds
    /// enough already. What it holds too much is taken out when it first reports it. `None`: not such a case; else
    /// an errno, or 0.
    ///
    /// # Safety
    /// `event` must be what the program passed to epoll_ctl.
    pub(super) unsafe fn shortcut(
        &mut self,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        event: *mut epoll_event,
    ) -> Option<i32> {
        let registration = self.registrations.get_mut(&fd)?;
        let endpoint = endpoint?;
        let plain = |events: u32| events & (EDGE | ONE_SHOT | EXCLUSIVE) == 0;
        if registration.attached != Some(endpoint.reference()) || !plain(registration.events) {
            return None;
        }
        match operation {
            libc::EPOLL_CTL_DEL | libc::EPOLL_CTL_MOD if registration.deleted => return Some(libc::ENOENT),
            libc::EPOLL_CTL_ADD if !registration.deleted => return Some(libc::EEXIST),
            libc::EPOLL_CTL_DEL => {
                registration.deleted = true;
                return Some(0);
            }
            libc::EPOLL_CTL_ADD | libc::EPOLL_CTL_MOD if !event.is_null() => {}
            _ => return None,
        }
        // SAFETY: not null, and the program's promise to the kernel.
        let wanted = unsafe { std::ptr::read_unaligned(event) };
        let needed = kernel_events(Some(endpoint), wanted.events);
        if !plain(wanted.events)
            || wanted.u64 != registration.data
            || needed & !registration.kernel_events != 0
        {
            return None;
        }
        registration.events = wanted.events;
        registration.deleted = false;
        self.mark_pending(fd);
        self.wake();
        Some(0)
    }

    /// Takes a registration out of the kernel's set that the program removed before.
    pub(super) fn bury(&mut self, epoll: &Epoll, fd: RawFd, endpoint: Option<&Endpoint>) {
        if self.registrations.get(&fd).is_some_and(|registration| registration.deleted) {
            self.remove(epoll, fd, endpoint);
        }
    }

    pub(super) fn put(
        &mut self,
        epoll: &Epoll,
        operation: i32,
        fd: RawFd,
        endpoint: Option<&Endpoint>,
        wanted: epoll_event,
        kernel_events: u32,
    ) -> Option<Reason> {
        if operation == libc::EPOLL_CTL_MOD
            && let Some(registration) = self.registrations.get_mut(&fd)
        {
            if registration.attached.is_some() && registration.data != wanted.u64 {
                self.by_data.remove(&registration.data);
                self.by_data.insert(wanted.u64, fd);
            }
            registration.events = wanted.events;
            registration.data = wanted.u64;
            registration.kernel_events = kernel_events;
            registration.disarmed = false;
            if registration.attached.is_some() {
                self.mark_pending(fd);
                self.wake();
            }
            return None;
        }
        let registration = Registration {
            events: wanted.events,
            data: wanted.u64,
            kernel_events,
            disarmed: false,
            deleted: false,
            pending: false,
            full: false,
            attached: None,
            primary: false,
            arrived: 0,
        };
        self.registrations.insert(fd, registration);
        let endpoint = endpoint?;
        endpoint.epolls.lock().push(epoll.name());
        if self.nested {
            return Some(Reason::NestedEpoll);
        }
        if wanted.events & EXCLUSIVE != 0 {
            return Some(Reason::ExclusiveEpoll);
        }
        if endpoint.fd.load(Relaxed) != fd {
            return Some(Reason::UnknownEpoll);
        }
        if endpoint.is_attached() {
            return self.attach(epoll, endpoint);
        }
        None
    }

    pub(super) fn remove(&mut self, epoll: &Epoll, fd: RawFd, endpoint: Option<&Endpoint>) {
        if let Some(endpoint) = endpoint {
            let at = endpoint.rx.lock().at;
            if let Some(at) = at {
                self.detach(epoll, endpoint, at.link);
            }
            let name = epoll.name();
            endpoint.epolls.lock().retain(|other| *other != name);
        }
        self.registrations.remove(&fd);
    }

    /// From now on the registration of `endpoint` is answered here.
    pub(super) fn attach(&mut self, epoll: &Epoll, endpoint: &Endpoint) -> Option<Reason> {
        let fd = endpoint.fd.load(Relaxed);
        let at = endpoint.rx.lock().at?;
        if self.registrations.get(&fd)?.attached.is_some() {
            return None;
        }
        let data = self.registrations.get(&fd)?.data;
        if self.by_data.contains_key(&data) || data == self.marker {
            // Two sockets with the same user data: an event of the kernel's could not be told apart.
            return Some(Reason::UnknownEpoll);
        }
        let Some(slot) = self.slot.or_else(Slot::take) else { return Some(Reason::NoWaiter) };
        self.slot = Some(slot);
        self.by_data.insert(data, fd);
        slot.register();
        self.put_doorbell(epoll, slot);
        let primary = endpoint.claim(slot) || endpoint.owner() == Some(slot);
        if primary {
            at.incoming().0.set_rx_waiter(Some(slot.0));
        }
        if let Some(registration) = self.registrations.get_mut(&fd) {
            registration.attached = Some(endpoint.reference());
            registration.primary = primary;
        }
        self.secondary += u32::from(!primary);
        self.links.add(at.link);
        epoll.active.fetch_add(1, AcqRel);
        self.mark_pending(fd);
        self.refresh(endpoint);
        // Whoever sleeps on this instance went to sleep without looking at this lane, and may not be counted.
        slot.ring();
        None
    }

    /// Whoever sleeps on this instance looks again: what the program asks for has changed.
    fn wake(&self) {
        if let Some(slot) = self.slot.filter(|_| self.sleepers > 0) {
            slot.ring();
        }
    }

    pub(super) fn detach(&mut self, epoll: &Epoll, endpoint: &Endpoint, link: &'static Link) {
        let fd = endpoint.fd.load(Relaxed);
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        if registration.attached != Some(endpoint.reference()) {
            return;
        }
        registration.attached = None;
        let (data, primary) = (registration.data, registration.primary);
        self.by_data.remove(&data);
        self.secondary -= u32::from(!primary);
        if primary && let Some(slot) = self.slot {
            endpoint.unclaim(slot);
        }
        self.links.remove(link);
        epoll.active.fetch_sub(1, AcqRel);
        self.settle(epoll, fd, endpoint);
    }

    /// Makes the kernel's set exactly what the program asked for.
    pub(super) fn settle(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        if registration.deleted {
            self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
            self.registrations.remove(&fd);
            let name = epoll.name();
            endpoint.epolls.lock().retain(|other| *other != name);
        } else if registration.kernel_events != registration.events && !registration.disarmed {
            self.set_kernel_events(fd, endpoint);
        }
    }

    pub(super) fn set_kernel_events(&mut self, fd: RawFd, endpoint: &Endpoint) {
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        registration.kernel_events = kernel_events(Some(endpoint), registration.events);
        let (events, data) = (registration.kernel_events, registration.data);
        self.change_kernel(libc::EPOLL_CTL_MOD, fd, events, data);
    }

    /// A change of our own to the kernel's set. If the registration has vanished it fails and changes nothing.
    pub(super) fn change_kernel(&self, operation: i32, fd: RawFd, events: u32, data: u64) {
        let before = errno::get();
        let mut event = epoll_event { events, u64: data };
        // SAFETY: an event of our own.
        unsafe { real::epoll_ctl(self.fd, operation, fd, &mut event) };
        errno::set(before);
    }

    /// Puts the doorbell into the kernel's set, for its edges. The instance stays active
    /// afterwards, since the kernel will report the marker.
    pub(super) fn put_doorbell(&mut self, epoll: &Epoll, slot: Slot) {
        let mut event = epoll_event { events: shunt_sys::eventfd::EDGES.bits(), u64: self.marker };
        // First: a thread that sleeps in the kernel on this instance may be told of the doorbell at once.
        epoll.active.fetch_add(1, AcqRel);
        // SAFETY: an event of our own. Adding it twice fails with EEXIST, which is as good.
        let result = unsafe { real::epoll_ctl(self.fd, libc::EPOLL_CTL_ADD, slot.doorbell(), &mut event) };
        if result != 0 {
            epoll.active.fetch_sub(1, AcqRel);
        }
    }

    /// Takes the doorbell out of the kernel's set.
    pub(super) fn hide_doorbell(&mut self) {
        if let Some(slot) = self.slot {
            self.hidden = true;
            self.change_kernel(libc::EPOLL_CTL_DEL, slot.doorbell(), 0, 0);
        }
    }

    /// Puts it back, if it was taken out for an exec that has failed.
    pub(crate) fn show_doorbell(&mut self) {
        if let Some(slot) = self.slot.filter(|_| std::mem::take(&mut self.hidden)) {
            let events = shunt_sys::eventfd::EDGES.bits();
            self.change_kernel(libc::EPOLL_CTL_ADD, slot.doorbell(), events, self.marker);
        }
    }

    /// Takes the doorbell out of the kernel's set, and has it look anew at what lanes have answered until now.
    pub(super) fn leave(&mut self) {
        if self.slot.is_none() {
            return;
        }
        self.hide_doorbell();
        for (&fd, registration) in
            self.registrations.iter().filter(|(_, registration)| !registration.disarmed)
        {
            self.change_kernel(libc::EPOLL_CTL_MOD, fd, registration.events, registration.data);
        }
    }

    pub(super) fn refresh(&mut self, endpoint: &Endpoint) {
        let fd = endpoint.fd.load(Relaxed);
        let Some(registration) = self.registrations.get_mut(&fd) else { return };
        let wanted = kernel_events(Some(endpoint), registration.events);
        let enough = wanted & !registration.kernel_events == 0;
        let too_much = registration.kernel_events & OUT & !wanted != 0;
        if (enough && !too_much) || registration.disarmed || registration.deleted {
            return;
        }
        self.set_kernel_events(fd, endpoint);
        // What the kernel no longer answers, the next look must.
        self.mark_pending(fd);
    }

    pub(super) fn mark_pending(&mut self, fd: RawFd) {
        if let Some(registration) = self.registrations.get_mut(&fd) {
            registration.queue(&mut self.pending, fd);
        }
    }

    /// A lane of this registration has no room.
    pub(super) fn note_full(&mut self, fd: RawFd) {
        if let Some(registration) = self.registrations.get_mut(&fd)
            && !registration.full
        {
            registration.full = true;
            self.full.push(fd);
        }
    }
}

impl Registration {
    /// To be looked at in the next wait.
    pub(super) fn queue(&mut self, pending: &mut VecDeque<RawFd>, fd: RawFd) {
        if !self.pending {
            self.pending = true;
            pending.push_back(fd);
        }
    }
}
