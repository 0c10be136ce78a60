//! The waiter of an epoll instance, and its descriptor in the kernel's interest list: the doorbell,
//! or the [level proxy](super::nested) if the instance is itself watched.
//!
//! The waiter is in one of four states, and only this file changes them. The table *The wakeup
//! of an instance* in docs/registration.md lists the transitions.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use super::nested::LEVEL_PROXIES;
use super::watched::Watched;
use super::{Epoll, Inner};
use crate::base::code;
use crate::base::waiter::Slot;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Wakeup {
    /// Lanes wake no thread here.
    #[default]
    NoWaiter,
    /// There is a waiter, but its descriptor is not in the kernel's list.
    NotRegistered(Slot),
    Eventfd(Slot),
    LevelProxyFd(Slot),
}

use Wakeup::*;

impl Wakeup {
    pub(super) fn slot(self) -> Option<Slot> {
        match self {
            NoWaiter => None,
            NotRegistered(slot) | Eventfd(slot) | LevelProxyFd(slot) => Some(slot),
        }
    }

    fn is_level_proxy(self) -> bool {
        matches!(self, LevelProxyFd(_))
    }

    /// Returns the waiter's descriptor in the kernel's list, and its events there.
    pub(super) fn in_kernel(self) -> Option<(RawFd, u32)> {
        match self {
            NoWaiter | NotRegistered(_) => None,
            Eventfd(slot) => Some((slot.doorbell(), shunt_sys::eventfd::EDGES.bits())),
            LevelProxyFd(slot) => Some((slot.listener(), libc::EPOLLIN as u32)),
        }
    }

    /// Notes that the instance has a waiter.
    fn begin(&mut self, slot: Slot) {
        if *self == NoWaiter {
            *self = NotRegistered(slot);
        }
    }

    /// Returns the state once the kernel's list has the descriptor. Returns `None` if it has it
    /// already, or there is no waiter.
    fn registered(self, nested: bool) -> Option<Wakeup> {
        let NotRegistered(slot) = self else { return None };
        Some(if nested { LevelProxyFd(slot) } else { Eventfd(slot) })
    }

    /// Notes that the descriptor is no longer in the kernel's list.
    fn note_unregistered(&mut self) {
        *self = self.slot().map_or(NoWaiter, NotRegistered);
    }

    /// Gives up the waiter and returns it. Returns `None`, and changes nothing, while the kernel's
    /// list has its descriptor.
    fn end(&mut self) -> Option<Slot> {
        let NotRegistered(slot) = *self else { return None };
        *self = NoWaiter;
        Some(slot)
    }
}

impl Inner {
    /// Returns the waiter that lanes wake.
    pub(crate) fn slot(&self) -> Option<Slot> {
        self.wakeup.slot()
    }

    /// Returns the waiter that lanes wake. Takes a free one if the instance has none.
    pub(super) fn take_slot(&mut self, epoll: &Epoll) -> Option<Slot> {
        let slot = self.slot().or_else(Slot::take)?;
        self.wakeup.begin(slot);
        slot.register();
        self.register_wakeup(epoll);
        Some(slot)
    }

    /// Adds the waiter's descriptor to the kernel's list. The instance stays active afterwards,
    /// since the kernel reports the marker to its waits.
    pub(super) fn register_wakeup(&mut self, epoll: &Epoll) {
        if self.exposure.is_watched() && !self.wakeup.is_level_proxy() {
            // A shared instance keeps the doorbell while a thread sleeps there, even when it begins
            // to be watched.
            self.unregister_wakeup(epoll);
        }
        // A wait that no hook sees would return the doorbell's event to the program, and so would
        // one of the program that is about to be executed. The next wait registers it if that fails.
        if !code::is_clean() || self.exposure.is_hidden_for_exec() {
            return;
        }
        let Some(registered) = self.wakeup.registered(self.exposure.is_watched()) else { return };
        if registered.is_level_proxy() && registered.slot().and_then(Slot::make_listener).is_none() {
            return;
        }
        // Before the kernel's list changes: a thread that sleeps in the kernel may get the event
        // immediately.
        epoll.active.fetch_add(1, AcqRel);
        self.wakeup = registered;
        if self.add_wakeup() {
            LEVEL_PROXIES.fetch_add(u32::from(registered.is_level_proxy()), Relaxed);
        } else {
            epoll.active.fetch_sub(1, AcqRel);
            self.wakeup.note_unregistered();
        }
    }

    /// Puts the doorbell back into the kernel's list, from which a load of code has removed it,
    /// once all code has been judged.
    pub(super) fn register_wakeup_again(&mut self, epoll: &Epoll) {
        if !self.exposure.is_shared() && !self.registrations.answered.is_none() {
            self.register_wakeup(epoll);
        }
    }

    /// Returns whether the kernel's list lacks the doorbell, so that lanes wake no wait.
    pub(super) fn is_wakeup_unregistered(&self) -> bool {
        matches!(self.wakeup, NotRegistered(_))
    }

    /// Adds the waiter's descriptor to the kernel's list. Returns `false` if that failed, or no
    /// descriptor belongs there.
    pub(super) fn add_wakeup(&self) -> bool {
        let shown = self.wakeup.in_kernel();
        shown.is_some_and(|(fd, events)| self.list.change(libc::EPOLL_CTL_ADD, fd, events, self.list.marker))
    }

    /// Removes the waiter's descriptor from the kernel's list.
    pub(super) fn unregister_wakeup(&mut self, epoll: &Epoll) {
        if let Some((fd, _)) = self.wakeup.in_kernel() {
            self.list.change(libc::EPOLL_CTL_DEL, fd, 0, 0);
            epoll.active.fetch_sub(1, AcqRel);
            LEVEL_PROXIES.fetch_sub(u32::from(self.wakeup.is_level_proxy()), Relaxed);
            self.wakeup.note_unregistered();
        }
    }

    /// Gives the waiter back if no thread sleeps here. Its descriptor must not be in the kernel's
    /// list.
    pub(super) fn let_slot_go(&mut self) {
        if !self.sleeps.has_some()
            && let Some(slot) = self.wakeup.end()
        {
            self.links = Watched::default();
            self.registrations.values_mut().for_each(|one| one.watched = None);
            slot.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables;
    use super::*;

    const STATES: [&str; 4] = ["NoWaiter", "NotRegistered", "Eventfd", "LevelProxyFd"];
    const EVENTS: [&str; 5] = ["begin", "registered", "registered, nested", "note_unregistered", "end"];

    #[test]
    fn the_documented_transitions_are_those_of_the_code() {
        let states = [NoWaiter, NotRegistered(Slot(1)), Eventfd(Slot(1)), LevelProxyFd(Slot(1))];
        tables::check("The wakeup of an instance", &STATES, &EVENTS, |event, state| {
            let mut wakeup = states[state];
            match event {
                "begin" => wakeup.begin(Slot(1)),
                "registered" => wakeup = wakeup.registered(false).unwrap_or(wakeup),
                "registered, nested" => wakeup = wakeup.registered(true).unwrap_or(wakeup),
                "note_unregistered" => wakeup.note_unregistered(),
                _ => _ = wakeup.end(),
            }
            match wakeup {
                NoWaiter => STATES[0],
                NotRegistered(_) => STATES[1],
                Eventfd(_) => STATES[2],
                LevelProxyFd(_) => STATES[3],
            }
        });
    }

    /// Runs all sequences of seven calls. The kernel's list must have what was added and not
    /// removed, and no waiter may be lost.
    #[test]
    fn the_kernels_list_has_the_descriptor_that_was_added_and_not_removed() {
        const CALLS: u32 = 5;
        let length = 7;
        for sequence in 0..CALLS.pow(length) {
            let (mut wakeup, mut waiter, mut in_kernel) = (Wakeup::default(), None, None);
            for place in 0..length {
                match sequence / CALLS.pow(place) % CALLS {
                    0 => {
                        waiter = waiter.or(Some(Slot(place as usize)));
                        wakeup.begin(Slot(place as usize));
                    }
                    call @ (1 | 2) => {
                        let nested = call == 1;
                        let registered = wakeup.registered(nested);
                        assert_eq!(registered.is_some(), waiter.is_some() && in_kernel.is_none());
                        if let Some(registered) = registered {
                            wakeup = registered;
                            in_kernel = Some(nested);
                        }
                    }
                    3 => {
                        wakeup.note_unregistered();
                        in_kernel = None;
                    }
                    _ => {
                        let ended = wakeup.end();
                        assert_eq!(ended, waiter.filter(|_| in_kernel.is_none()), "one would be left there");
                        waiter = waiter.filter(|_| ended.is_none());
                    }
                }
                assert_eq!(wakeup.slot(), waiter);
                assert_eq!(matches!(wakeup, Eventfd(_)), in_kernel == Some(false));
                assert_eq!(wakeup.is_level_proxy(), in_kernel == Some(true));
            }
        }
    }
}
