//! The waiter of a set, and what stands for it in the kernel's set: its doorbell, or the [lamp](super::nested) where the set is
//! itself watched.
//!
//! One of four states, which only what is here changes: the table *The waiter of a set* in docs/registration.md.

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
    /// Lanes wake nobody.
    #[default]
    Nobody,
    /// There is a waiter, but the kernel's set does not hear of it.
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

    /// What of it is in the kernel's set, and for which events.
    pub(super) fn in_set(self) -> Option<(RawFd, u32)> {
        match self {
            Nobody | Unheard(_) => None,
            Doorbell(slot) => Some((slot.doorbell(), shunt_sys::eventfd::EDGES.bits())),
            Lamp(slot) => Some((slot.listener(), libc::EPOLLIN as u32)),
        }
    }

    /// There is a waiter from now on.
    fn begin(&mut self, slot: Slot) {
        if *self == Nobody {
            *self = Unheard(slot);
        }
    }

    /// What it is once the kernel's set has it. `None`: that has it already, or there is nothing to have.
    fn heard(self, nested: bool) -> Option<Bell> {
        let Unheard(slot) = self else { return None };
        Some(if nested { Lamp(slot) } else { Doorbell(slot) })
    }

    /// The kernel's set has it no more.
    fn be_unheard(&mut self) {
        *self = self.slot().map_or(Nobody, Unheard);
    }

    /// The waiter is given up, which the kernel's set must not have then.
    fn end(&mut self) -> Option<Slot> {
        let Unheard(slot) = *self else { return None };
        *self = Nobody;
        Some(slot)
    }
}

impl Inner {
    /// The waiter that lanes wake.
    pub(crate) fn slot(&self) -> Option<Slot> {
        self.bell.slot()
    }

    /// The same, from now on if there was none and there is one to have.
    pub(super) fn take_slot(&mut self, epoll: &Epoll) -> Option<Slot> {
        let slot = self.slot().or_else(Slot::take)?;
        self.bell.begin(slot);
        slot.register();
        self.put_bell(epoll);
        Some(slot)
    }

    /// Has the kernel's set hear of the waiter. The instance stays active afterwards, since the kernel will report the marker.
    pub(super) fn put_bell(&mut self, epoll: &Epoll) {
        if self.nested && !self.bell.is_lamp() {
            // A shared set keeps the doorbell as long as somebody sleeps there, also if it comes to be watched.
            self.take_bell_out(epoll);
        }
        if self.hidden {
            self.show_bell();
        }
        // A wait that no hook sees may come, which would return the doorbell.
        if !code::is_clean() {
            return;
        }
        let Some(heard) = self.bell.heard(self.nested) else { return };
        if heard.is_lamp() && heard.slot().and_then(Slot::make_listener).is_none() {
            return;
        }
        // First: a thread that sleeps in the kernel on this instance may be told of it at once.
        epoll.active.fetch_add(1, AcqRel);
        self.bell = heard;
        if self.show_bell() {
            LAMPS.fetch_add(u32::from(heard.is_lamp()), Relaxed);
        } else {
            epoll.active.fetch_sub(1, AcqRel);
            self.bell.be_unheard();
        }
    }

    /// Puts the doorbell back into the kernel's set, which a load has taken out, once its code has
    /// been judged.
    pub(super) fn put_bell_back(&mut self, epoll: &Epoll) {
        if !self.shared && !self.answered.is_none() {
            self.put_bell(epoll);
        }
    }

    /// Returns whether the kernel's set lacks the doorbell, so that lanes wake no wait.
    pub(super) fn is_unheard(&self) -> bool {
        matches!(self.bell, Unheard(_))
    }

    /// Puts into the kernel's set what belongs there.
    pub(super) fn show_bell(&self) -> bool {
        let shown = self.bell.in_set();
        shown.is_some_and(|(fd, events)| change(self.fd, libc::EPOLL_CTL_ADD, fd, events, self.marker))
    }

    /// Takes it out of the kernel's set.
    pub(super) fn take_bell_out(&mut self, epoll: &Epoll) {
        if let Some((fd, _)) = self.bell.in_set() {
            self.change_kernel(libc::EPOLL_CTL_DEL, fd, 0, 0);
            epoll.active.fetch_sub(1, AcqRel);
            LAMPS.fetch_sub(u32::from(self.bell.is_lamp()), Relaxed);
            self.bell.be_unheard();
        }
    }

    /// Nobody need be woken by lanes any more, if nobody sleeps. The kernel's set has it no more.
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

    /// All sequences of seven calls: what the kernel's set has, it was given and has not lost, and no waiter is forgotten.
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
