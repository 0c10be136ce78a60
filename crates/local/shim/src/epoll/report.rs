//! The array that one epoll_wait returns, while it is filled with events of lanes and of the
//! kernel.

use std::os::fd::RawFd;

use libc::epoll_event;

/// The owner of an event whose registration is not answered here.
pub(super) const NOBODY: RawFd = -1;

/// Memory that one report leaves for the next.
#[derive(Default)]
pub(super) struct Memory {
    pub(super) owners: Vec<RawFd>,
    /// The kernel's events that follow the doorbell's.
    pub(super) behind: Vec<epoll_event>,
}

/// The events so far, each with the fd of its registration, since two registrations may have the
/// same user data.
pub(crate) struct Report<'a> {
    events: &'a mut [epoll_event],
    owners: Vec<RawFd>,
    has_kernels: bool,
    /// How many events there were when the kernel was last queried.
    earlier: usize,
}

impl<'a> Report<'a> {
    /// Returns an empty report, which reuses the memory of `owners`.
    pub(super) fn new(events: &'a mut [epoll_event], mut owners: Vec<RawFd>) -> Report<'a> {
        owners.clear();
        Report { events, owners, has_kernels: false, earlier: 0 }
    }

    /// Returns whether events of the kernel have been taken over already.
    pub(super) fn has_kernels(&self) -> bool {
        self.has_kernels
    }

    /// Notes that the kernel's events follow.
    pub(super) fn begin_kernels(&mut self) {
        self.has_kernels = true;
    }

    /// Notes that the kernel is queried now, perhaps again in this wait. It repeats its
    /// level-triggered events then.
    pub(crate) fn begin_asking(&mut self) {
        self.earlier = self.owners.len();
    }

    /// Adds an event of a registration that only the kernel knows. It is merged with an event of
    /// the same user data from an earlier query. That one is of the same registration, or of one
    /// that the program cannot distinguish.
    pub(super) fn tell_kernels(&mut self, event: epoll_event) {
        self.tell_unowned(event, self.earlier);
    }

    /// Adds an event of a registration without a record. It is merged with one of the same user
    /// data among the first `first` events.
    pub(super) fn tell_unowned(&mut self, event: epoll_event, first: usize) {
        let is_same =
            |place: &usize| self.owners[*place] == NOBODY && { self.events[*place].u64 } == { event.u64 };
        match (0..first).find(is_same) {
            Some(place) => self.events[place].events |= event.events,
            None => self.tell(NOBODY, event, 0),
        }
    }

    /// Returns the number of events.
    pub(crate) fn len(&self) -> usize {
        self.owners.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() == self.events.len()
    }

    /// Returns how many more events fit.
    pub(super) fn places(&self) -> usize {
        self.events.len() - self.owners.len()
    }

    /// Returns the free rest of the array. The caller takes over next what the kernel writes there.
    pub(crate) fn room(&mut self) -> &mut [epoll_event] {
        &mut self.events[self.owners.len()..]
    }

    /// Returns the element at `index` of the array, whether it has been added or not.
    pub(super) fn at(&self, index: usize) -> epoll_event {
        self.events[index]
    }

    /// Adds an event, for which there must be room. It is merged with an event of the same owner
    /// among the first `first`.
    #[inline]
    pub(super) fn tell(&mut self, owner: RawFd, event: epoll_event, first: usize) {
        if owner != NOBODY
            && let Some(place) = self.owners[..first].iter().position(|other| *other == owner)
        {
            self.events[place].events |= event.events;
            return;
        }
        self.events[self.owners.len()] = event;
        self.owners.push(owner);
    }

    /// Returns the owners of the events, in their order.
    pub(super) fn owners(&self) -> &[RawFd] {
        &self.owners
    }

    /// Empties the report, and returns the memory of the owners for the next one.
    pub(super) fn take_owners(&mut self) -> Vec<RawFd> {
        std::mem::take(&mut self.owners)
    }

    /// Reuses the memory of `owners` for an empty report.
    pub(super) fn reuse(&mut self, mut owners: Vec<RawFd>) {
        owners.clear();
        self.owners = owners;
    }
}
