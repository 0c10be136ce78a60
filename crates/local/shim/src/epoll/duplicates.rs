//! The fds by which an epoll instance has one connection, if it has it by another fd than the
//! endpoint's. A duplicate of a socket is a registration of its own, with its own events and data,
//! but an event of the socket is for all of them.
//!
//! ```text
//! socket 7 and its duplicate 9, in one instance:
//!     mark --> endpoint --> [9, 7]: both are checked, the newest first, as in the kernel
//! ```
//!
//! An instance that has each connection by its endpoint's fd keeps nothing here, and its marks cost
//! nothing more (L7).

use std::os::fd::RawFd;

use rustc_hash::FxHashMap;

use crate::base::names::EndpointRef;

/// A registration: how many were made in its instance before, and its fd.
type Numbered = (u64, RawFd);

/// The registrations of each such connection, the newest first.
#[derive(Default)]
pub(super) struct Duplicates(FxHashMap<u64, Vec<Numbered>>);

impl Duplicates {
    /// Returns whether each connection is registered by its endpoint's fd alone.
    #[inline]
    pub(super) fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether this connection is registered by other fds.
    pub(super) fn has(&self, endpoint: EndpointRef) -> bool {
        !self.0.is_empty() && self.0.contains_key(&endpoint.pack())
    }

    /// Returns the fds of a connection, whose endpoint has the fd `own`. A connection that is not
    /// listed here has at most that one.
    pub(super) fn numbers(&self, endpoint: EndpointRef, own: RawFd) -> Numbers {
        if self.are_none() {
            return Numbers::One(Some(own));
        }
        match self.0.get(&endpoint.pack()) {
            Some(all) => Numbers::Several(all.iter().map(|(_, fd)| *fd).collect::<Vec<_>>().into_iter()),
            None => Numbers::One(Some(own)),
        }
    }

    /// Returns the fd of the newest registration of a connection that is listed here.
    #[cold]
    pub(super) fn newest(&self, endpoint: EndpointRef) -> Option<RawFd> {
        self.0.get(&endpoint.pack())?.first().map(|(_, fd)| *fd)
    }

    /// Lists an fd of a connection.
    pub(super) fn note(&mut self, endpoint: EndpointRef, made: u64, fd: RawFd) {
        let all = self.0.entry(endpoint.pack()).or_default();
        all.retain(|(_, other)| *other != fd);
        let place = all.partition_point(|(other, _)| *other > made);
        all.insert(place, (made, fd));
    }

    /// Removes an fd, whose registration has left the instance.
    pub(super) fn forget(&mut self, endpoint: EndpointRef, fd: RawFd) {
        if self.are_none() {
            return;
        }
        let Some(all) = self.0.get_mut(&endpoint.pack()) else { return };
        all.retain(|(_, other)| *other != fd);
        if all.is_empty() {
            self.0.remove(&endpoint.pack());
        }
    }

    /// Changes the fd of a registration.
    pub(super) fn rename(&mut self, endpoint: EndpointRef, from: RawFd, to: RawFd) {
        let all = self.0.get_mut(&endpoint.pack()).into_iter().flatten();
        all.filter(|(_, fd)| *fd == from).for_each(|(_, fd)| *fd = to);
    }
}

/// The fds of one connection.
pub(super) enum Numbers {
    One(Option<RawFd>),
    Several(std::vec::IntoIter<RawFd>),
}

impl Iterator for Numbers {
    type Item = RawFd;

    fn next(&mut self) -> Option<RawFd> {
        match self {
            Numbers::One(number) => number.take(),
            Numbers::Several(numbers) => numbers.next(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: RawFd = 50;

    fn numbers(duplicates: &Duplicates, index: u32) -> Vec<RawFd> {
        duplicates.numbers(EndpointRef::new(index, 1), OWN).collect()
    }

    /// Runs all sequences of five calls, and compares with a plain list of the registrations.
    #[test]
    fn numbers_are_those_that_are_registered_the_newest_first() {
        const CALLS: usize = 4;
        let length = 5;
        let endpoint = EndpointRef::new(1, 1);
        for sequence in 0..(2 * CALLS).pow(length) {
            let (mut duplicates, mut plain) = (Duplicates::default(), Vec::<Numbered>::new());
            for made in 0..length {
                let step = sequence / (2 * CALLS).pow(made) % (2 * CALLS);
                let (fd, to) = (step as RawFd % 2, 10 + made as RawFd);
                match step / 2 {
                    0 | 1 => {
                        duplicates.note(endpoint, made.into(), fd);
                        plain.retain(|(_, other)| *other != fd);
                        plain.insert(0, (made.into(), fd));
                    }
                    2 => {
                        duplicates.forget(endpoint, fd);
                        plain.retain(|(_, other)| *other != fd);
                    }
                    _ => {
                        duplicates.rename(endpoint, fd, to);
                        plain.iter_mut().filter(|one| one.1 == fd).for_each(|one| one.1 = to);
                    }
                }
                let expected: Vec<_> = plain.iter().map(|(_, fd)| *fd).collect();
                assert_eq!(duplicates.are_none(), expected.is_empty());
                assert_eq!(duplicates.newest(endpoint), expected.first().copied());
                assert_eq!(numbers(&duplicates, 1), if expected.is_empty() { vec![OWN] } else { expected });
                assert_eq!(numbers(&duplicates, 2), [OWN], "another connection's are untouched");
            }
        }
    }

    #[test]
    fn a_registration_that_is_noted_late_has_its_place_by_its_age() {
        let (mut duplicates, endpoint) = (Duplicates::default(), EndpointRef::new(1, 1));
        duplicates.note(endpoint, 5, 9);
        duplicates.note(endpoint, 2, 7);
        duplicates.note(endpoint, 3, 8);
        assert_eq!(numbers(&duplicates, 1), [9, 8, 7]);
    }
}
