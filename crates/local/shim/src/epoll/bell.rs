//! The waiter of an epoll instance, and its descriptor in the kernel's interest list: the doorbell,
//! or the [level proxy](super::nested) if the instance is itself watched.
//!
//! The waiter is in one of four states, and only this file changes them. The table *The waiter of a
//! set* in docs/registration.md lists the transitions.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use super::nested::LAMPS;
use super::registration::change;
use super::watched::Watched;
use super::{Epoll, Inner};
use crate::base::code;
use crate::base::waiter::Slot;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Bell {
    /// Lanes wake no thread here.
    #[default]
    Nobody,
    /// There is a waiter, but its descriptor is not in the kernel's list.
    Unheard(Slot),
    Doorbell(Slot),
    Lamp(Slot),
}

use Bell::*;

impl Bell {
    pub(super) fn slot(self) -> Option<Slot> {
        match self {
            Nobody => None,
            Unheard(slot) | Doorbell(slot) | Lamp(slot) => Some(slot),
        }
    }

    fn is_lamp(self) -> bool {
        matches!(self, Lamp(_))
    }

    /// Returns the waiter's descriptor in the kernel's list, and its events there.
    pub(super) fn in_set(self) -> Option<(RawFd, u32)> {
        match self {
            Nobody | Unheard(_) => None,
            Doorbell(slot) => Some((slot.doorbell(), shunt_sys::eventfd::EDGES.bits())),
            Lamp(slot) => Some((slot.listener(), libc::EPOLLIN as u32)),
        }
    }

    /// Notes that the instance has a waiter.
    fn begin(&mut self, slot: Slot) {
        if *self == Nobody {
            *self = Unheard(slot);
        }
    }

    /// Returns the state once the kernel's list has the descriptor. Returns `None` if it has it
    /// already, or there is no waiter.
    fn heard(self, nested: bool) -> Option<Bell> {
        let Unheard(slot) = self else { return None };
        Some(if nested { Lamp(slot) } else { Doorbell(slot) })
    }

    /// Notes that the descriptor is no longer in the kernel's list.
    fn be_unheard(&mut self) {
        *self = self.slot().map_or(Nobody, Unheard);
    }

    /// Gives up the waiter and returns it. Returns `None`, and changes nothing, while the kernel's
    /// list has its descriptor.
    fn end(&mut self) -> Option<Slot> {
        let Unheard(slot) = *self else { return None };
        *self = Nobody;
        Some(slot)
    }
}

impl Inner {
    /// Returns the waiter that lanes wake.
    pub(crate) fn slot(&self) -> Option<Slot> {
        self.bell.slot()
    }

    /// Returns the waiter that lanes wake. Takes a free one if the instance has none.
    pub(super) fn take_slot(&mut self, epoll: &Epoll) -> Option<Slot> {
        let slot = self.slot().or_else(Slot::take)?;
        self.bell.begin(slot);
        slot.register();
        self.put_bell(epoll);
        Some(slot)
    }

    /// Adds the waiter's descriptor to the kernel's list. The instance stays active afterwards,
    /// since the kernel reports the marker to its waits.
    pub(super) fn put_bell(&mut self, epoll: &Epoll) {
        if self.exposure.is_watched() && !self.bell.is_lamp() {
            // A shared instance keeps the doorbell while a thread sleeps there, even when it begins
            // to be watched.
            self.take_bell_out(epoll);
        }
        if self.exposure.is_hidden_for_exec() {
            self.show_bell();
        }
        // A wait that no hook sees would return the doorbell's event to the program.
        if !code::is_clean() {
            return;
        }
        let Some(heard) = self.bell.heard(self.exposure.is_watched()) else { return };
        if heard.is_lamp() && heard.slot().and_then(Slot::make_listener).is_none() {
            return;
        }
        // Before the kernel's list changes: a thread that sleeps in the kernel may get the event
        // immediately.
        epoll.active.fetch_add(1, AcqRel);
        self.bell = heard;
        if self.show_bell() {
            LAMPS.fetch_add(u32::from(heard.is_lamp()), Relaxed);
        } else {
            epoll.active.fetch_sub(1, AcqRel);
            self.bell.be_unheard();
        }
    }

    /// Puts the doorbell back into the kernel's list, from which a load of code has removed it,
    /// once all code has been judged.
    pub(super) fn put_bell_back(&mut self, epoll: &Epoll) {
        if !self.exposure.is_shared() && !self.answered.is_none() {
            self.put_bell(epoll);
        }
    }

    /// Returns whether the kernel's list lacks the doorbell, so that lanes wake no wait.
    pub(super) fn is_unheard(&self) -> bool {
        matches!(self.bell, Unheard(_))
    }

    /// Adds the waiter's descriptor to the kernel's list. Returns `false` if that failed, or no
    /// descriptor belongs there.
    pub(super) fn show_bell(&self) -> bool {
        let shown = self.bell.in_set();
        shown.is_some_and(|(fd, events)| change(self.fd, libc::EPOLL_CTL_ADD, fd, events, self.marker))
    }

    /// Removes the waiter's descriptor from the kernel's list.
    pub(super) fn take_bell_out(&mut self, epoll: &Epoll) {
        if let Some((fd, _)) = self.bell.in_set() {
            self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
            epoll.active.fetch_sub(1, AcqRel);
            LAMPS.fetch_sub(u32::from(self.bell.is_lamp()), Relaxed);
            self.bell.be_unheard();
        }
    }

    /// Gives the waiter back if no thread sleeps here. Its descriptor must not be in the kernel's
    /// list.
    pub(super) fn let_slot_go(&mut self) {
        if self.sleepers == 0
            && let Some(slot) = self.bell.end()
        {
            self.links = Watched::default();
            self.registrations.values_mut().for_each(|one| one.watched = None);
            slot.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs all sequences of seven calls. The kernel's list must have what was added and not
    /// removed, and no waiter may be lost.
    #[test]
    fn whatever_is_done_the_kernels_set_has_what_it_was_given() {
        const CALLS: u32 = 5;
        let length = 7;
        for sequence in 0..CALLS.pow(length) {
            let (mut bell, mut waiter, mut in_set) = (Bell::default(), None, None);
            for place in 0..length {
                match sequence / CALLS.pow(place) % CALLS {
                    0 => {
                        waiter = waiter.or(Some(Slot(place as usize)));
                        bell.begin(Slot(place as usize));
                    }
                    call @ (1 | 2) => {
                        let nested = call == 1;
                        let heard = bell.heard(nested);
                        assert_eq!(heard.is_some(), waiter.is_some() && in_set.is_none());
                        if let Some(heard) = heard {
                            bell = heard;
                            in_set = Some(nested);
                        }
                    }
                    3 => {
                        bell.be_unheard();
                        in_set = None;
                    }
                    _ => {
                        let ended = bell.end();
                        assert_eq!(ended, waiter.filter(|_| in_set.is_none()), "one would be left there");
                        waiter = waiter.filter(|_| ended.is_none());
                    }
                }
                assert_eq!(bell.slot(), waiter);
                assert_eq!(matches!(bell, Doorbell(_)), in_set == Some(false));
                assert_eq!(bell.is_lamp(), in_set == Some(true));
            }
        }
    }
}
