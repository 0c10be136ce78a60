//! The registrations of an epoll instance, with the ways in which they are found: by fd, by the
//! user data in the kernel's list, and by connection.
//!
//! ```text
//! an event of the kernel --- names ---------------------+
//! a mark of a peer --------- duplicates, or the --------+--> fd --> record
//!                            endpoint's own fd          |
//! epoll_ctl --------------------------------------------+
//! ```

use std::os::fd::RawFd;

use super::Registration;
use super::answered::Count;
use super::duplicates::{Duplicates, Numbers};
use super::names::{Name, Names};
use super::records::{Index, Records};
use super::report::NOBODY;
use crate::socket::endpoint::Endpoint;

/// The registrations of an instance.
#[derive(Default)]
pub(super) struct Registrations {
    /// By their fd in the kernel's list, or by a negative one if that fd has been
    /// [closed](super::freeze_everywhere).
    pub(super) records: Records<Registration>,
    pub(super) names: Names,
    /// Connections that are registered by another fd than their endpoint's.
    pub(super) duplicates: Duplicates,
    /// How many of them lanes answer for.
    pub(super) answered: Count,
    /// How many have been made.
    made: u64,
    /// The negative fd of the last one that was [frozen](super::freeze_everywhere).
    frozen: RawFd,
}

impl Registrations {
    /// Inserts the record that `make` returns, in place of the fd's former record. `make` gets the
    /// number of registrations that were made before, and the index of the record.
    pub(super) fn insert(&mut self, fd: RawFd, make: impl FnOnce(u64, Index) -> Registration) {
        let made = self.made;
        self.made += 1;
        self.records.insert(fd, |index| make(made, index));
    }

    /// Removes a record. Its name and its fd lead nowhere any more.
    pub(super) fn remove(&mut self, fd: RawFd) -> Option<Registration> {
        let one = self.records.remove(&fd)?;
        self.names.forget(one.name, fd);
        one.owner.into_iter().for_each(|owner| self.duplicates.forget(owner, fd));
        Some(one)
    }

    /// Files a record under another fd. Returns `false` if there is none.
    pub(super) fn rename(&mut self, from: RawFd, to: RawFd) -> bool {
        let Some(one) = self.records.get(&from) else { return false };
        self.names.renumber(one.name, to);
        one.owner.into_iter().for_each(|owner| self.duplicates.rename(owner, from, to));
        self.records.rename(from, to);
        true
    }

    /// Returns a fd for the next registration that is frozen, which no descriptor has.
    pub(super) fn next_frozen(&mut self) -> RawFd {
        self.frozen = self.frozen.min(NOBODY).checked_sub(1).unwrap_or(NOBODY - 1);
        self.frozen
    }

    /// Gives a registration another name, which the kernel's list has from now on.
    pub(super) fn name(&mut self, fd: RawFd, name: Name) {
        if let Some(registration) = self.records.get_mut(&fd) {
            self.names.give(&mut registration.name, fd, name);
        }
    }

    /// Returns the fds by which an endpoint is registered, if it is.
    pub(super) fn numbers_of(&self, endpoint: &Endpoint) -> Numbers {
        self.duplicates.numbers(endpoint.reference(), endpoint.fd())
    }

    /// Returns whether the registration under this fd is the endpoint's.
    pub(super) fn is_of(&self, fd: RawFd, endpoint: &Endpoint) -> bool {
        self.get(&fd).is_some_and(|one| one.owner == Some(endpoint.reference()))
    }

    /// Returns whether the program has the endpoint registered by this fd.
    pub(super) fn has_by_number(&self, fd: RawFd, endpoint: &Endpoint) -> bool {
        self.is_of(fd, endpoint) && self.get(&fd).is_some_and(|one| !one.interest.is_deleted())
    }

    /// Lists an fd of the endpoint among the [`Duplicates`], if it is registered by that.
    pub(super) fn note_number(&mut self, fd: RawFd, endpoint: &Endpoint) {
        if self.is_of(fd, endpoint)
            && let Some(one) = self.records.get(&fd)
        {
            self.duplicates.note(endpoint.reference(), one.made, fd);
        }
    }

    /// Notes a new registration. All fds of the endpoint are listed if it is registered by another
    /// one than its own.
    pub(super) fn note_new(&mut self, fd: RawFd, endpoint: &Endpoint) {
        let own = endpoint.fd();
        if fd != own || self.duplicates.has(endpoint.reference()) {
            self.note_number(own, endpoint);
            self.note_number(fd, endpoint);
        }
    }

    /// Returns the attached registrations for which `is_one` returns `true`.
    pub(super) fn attached_where(
        &self,
        is_one: impl Fn(&Registration, &'static Endpoint) -> bool,
    ) -> Vec<RawFd> {
        let found = |(fd, one): (&RawFd, &Registration)| {
            let endpoint = one.endpoint()?;
            is_one(one, endpoint).then_some(*fd)
        };
        self.iter().filter_map(found).collect()
    }

    pub(super) fn get(&self, fd: &RawFd) -> Option<&Registration> {
        self.records.get(fd)
    }

    pub(super) fn get_mut(&mut self, fd: &RawFd) -> Option<&mut Registration> {
        self.records.get_mut(fd)
    }

    pub(super) fn contains_key(&self, fd: &RawFd) -> bool {
        self.records.contains_key(fd)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &RawFd> {
        self.records.keys()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&RawFd, &Registration)> {
        self.records.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&RawFd, &mut Registration)> {
        self.records.iter_mut()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Registration> {
        self.records.values()
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Registration> {
        self.records.values_mut()
    }
}
