//! Registrations whose descriptor has been closed while a duplicate is open: they keep their events
//! under a number that no descriptor has.

use std::os::fd::RawFd;

use super::attachment::unlist;
use super::names::{Name, new_token};
use super::report::NOBODY;
use super::{Epoll, Inner, Registration, listing};
use crate::base::process;
use crate::socket::endpoint::Endpoint;

impl Inner {
    /// Freezes the registration of an fd: see [`super::freeze_everywhere`]. Only the bytes that a
    /// lane still holds are answered here from now on.
    pub(super) fn freeze(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        if !self.registrations.is_of(fd, endpoint) {
            return;
        }
        self.bury(epoll, fd);
        self.restore(fd);
        let Some(one) = self.registrations.records.get_mut(&fd) else { return };
        if one.answered.is_by_lanes() {
            if one.answered.lose_marks(&mut self.registrations.answered).is_some() {
                self.unclaim_unused(endpoint);
            }
            self.registrations.note_number(fd, endpoint);
            let frozen = self.registrations.next_frozen();
            self.rename(fd, frozen);
        } else {
            self.forget(fd);
            unlist(epoll, endpoint);
        }
    }

    /// Thaws the registration of an fd: see [`super::thaw_everywhere`].
    pub(super) fn thaw(&mut self, epoll: &Epoll, fd: RawFd, endpoint: &Endpoint) {
        let owner = Some(endpoint.reference());
        let is_it = |place: &RawFd| {
            let one = self.registrations.get(place).filter(|_| is_frozen(*place));
            one.is_some_and(|one| one.number == fd && one.owner == owner)
        };
        let place = self.registrations.numbers_of(endpoint).find(is_it);
        if let Some(place) = place {
            self.rename(place, fd);
            let is_answered = |one: &Registration| one.answered.is_by_lanes() && one.interest.is_armed();
            if !self.exposure.is_shared() && self.registrations.get(&fd).is_some_and(is_answered) {
                self.registrations.name(fd, new_token(epoll));
                self.set_kernel_events(fd, Some(endpoint));
            }
        }
    }

    /// Has the kernel's list hold a registration as the program made it.
    pub(super) fn restore(&mut self, fd: RawFd) {
        let Some(one) = self.registrations.records.get_mut(&fd) else { return };
        let is_as_made = !one.name.is_token() && !one.exclusive && one.interest.events() == one.events;
        if self.exposure.is_shared() || is_as_made {
            return;
        }
        if one.interest.is_disarmed() {
            one.mark_disarmed(self.list.fd, fd);
        } else if one.give_to_kernel(self.list.fd, fd) {
            self.registrations.names.give(&mut one.name, fd, Name::Given);
            self.merge_by_data(&listing::of(process::pid() as u32, self.list.fd).unwrap_or_default());
        }
    }

    /// Files a registration under another fd.
    fn rename(&mut self, from: RawFd, to: RawFd) {
        if self.registrations.rename(from, to) {
            self.ready.rename(from, to);
            self.room.rename(from, to);
        }
    }

    /// Gives the kernel the program's own registration: see [`super::leave_everywhere`].
    pub(super) fn leave(&self, fd: RawFd) {
        // A change is an edge, so a registration that is as the program made it stays untouched.
        let is_ours = !self.exposure.is_shared() && !self.exposure.is_hidden_for_exec();
        let held = self.registrations.get(&fd).filter(|one| is_ours && one.name.is_known());
        if let Some(one) = held.filter(|one| one.interest.is_armed()) {
            self.list.change(libc::EPOLL_CTL_MOD, fd, one.events, one.data);
        }
    }

    /// Gives the registrations with a token other events and data in the kernel's list. A
    /// registration that the kernel has disarmed reports nothing before it gets its data anew, and
    /// is skipped. A shared instance is left as it is.
    pub(super) fn for_tokens(&self, held: impl Fn(&Registration) -> (u32, u64)) {
        let shows = |one: &Registration| {
            one.name.is_token() && one.interest.may_report() && !self.exposure.is_shared()
        };
        for (&fd, one) in self.registrations.iter().filter(|(_, one)| shows(one)) {
            let (events, data) = held(one);
            self.list.change(libc::EPOLL_CTL_MOD, fd, events, data);
        }
    }
}

/// Returns whether the registration under this key has had another fd, which has been closed: see
/// [`super::freeze_everywhere`].
pub(super) fn is_frozen(place: RawFd) -> bool {
    place < NOBODY
}
