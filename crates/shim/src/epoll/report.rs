//! What one epoll_wait is going to return, while it is put together from what lanes say and what the kernel does.

use std::os::fd::RawFd;

use libc::epoll_event;

/// Of no registration that is answered here.
pub(super) const NOBODY: RawFd = -1;

/// The events so far, and whose they are: two registrations may have the same user data.
pub(crate) struct Report<'a> {
    events: &'a mut [epoll_event],
    owners: Vec<RawFd>,
    has_kernels: bool,
    /// How many there were when the kernel was last asked.
    earlier: usize,
}

impl<'a> Report<'a> {
    /// An empty one. `owners` is used for its memory.
    pub(super) fn new(events: &'a mut [epoll_event], mut owners: Vec<RawFd>) -> Report<'a> {
        owners.clear();
        Report { events, owners, has_kernels: false, earlier: 0 }
    }

    /// Whether the kernel has been asked already.
    pub(super) fn has_kernels(&self) -> bool {
        self.has_kernels
    }

    /// What it has said comes next.
    pub(super) fn begin_kernels(&mut self) {
        self.has_kernels = true;
    }

    /// The kernel is asked, perhaps once more, and by then tells again what it tells by level.
    pub(crate) fn begin_asking(&mut self) {
        self.earlier = self.owners.len();
    }

    /// Adds an event of a registration of which only the kernel knows. What has been told of the same user data when the kernel was asked
    /// before is the same, or the program could not tell it apart.
    pub(super) fn tell_kernels(&mut self, event: epoll_event) {
        self.tell_unowned(event, self.earlier);
    }

    /// The same of one that nothing here knows any more, after a look that has told of the first `first`.
    pub(super) fn tell_unowned(&mut self, event: epoll_event, first: usize) {
        let is_same =
            |place: &usize| self.owners[*place] == NOBODY && { self.events[*place].u64 } == { event.u64 };
        match (0..first).find(is_same) {
            Some(place) => self.events[place].events |= event.events,
            None => self.tell(NOBODY, event, 0),
        }
    }

    /// How many events there are.
    pub(crate) fn len(&self) -> usize {
        self.owners.len()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.len() == self.events.len()
    }

    /// How many more there may be.
    pub(super) fn places(&self) -> usize {
        self.events.len() - self.owners.len()
    }

    /// The array behind them: what the kernel puts there is to be taken over next.
    pub(crate) fn room(&mut self) -> &mut [epoll_event] {
        &mut self.events[self.owners.len()..]
    }

    /// What is at a place of the array, told or not.
    pub(super) fn at(&self, index: usize) -> epoll_event {
        self.events[index]
    }

    /// Adds an event, which becomes one with another of the same owner among the first `first`. There is room.
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

    /// Whose events there are, in their order.
    pub(super) fn owners(&self) -> &[RawFd] {
        &self.owners
    }

    /// Gives the memory back.
    pub(super) fn into_owners(self) -> Vec<RawFd> {
        self.owners
    }
}
