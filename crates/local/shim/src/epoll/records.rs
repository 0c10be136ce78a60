//! A map from fds to records. Each record has an index that stays the same as long as it is kept,
//! so that code which remembers the index finds the record without a search.

use std::os::fd::RawFd;

use rustc_hash::FxHashMap;
use slab::Slab;

/// The index of a record. After the record is removed, another one may get it.
pub(super) type Index = usize;

pub(super) struct Records<T> {
    places: FxHashMap<RawFd, Index>,
    all: Slab<(RawFd, T)>,
}

impl<T> Default for Records<T> {
    fn default() -> Records<T> {
        Records { places: FxHashMap::default(), all: Slab::new() }
    }
}

impl<T> Records<T> {
    /// Inserts the record that `make` returns for its index, in place of the fd's former record.
    pub(super) fn insert(&mut self, fd: RawFd, make: impl FnOnce(Index) -> T) {
        self.remove(&fd);
        let place = self.all.vacant_entry();
        let index = place.key();
        self.places.insert(fd, index);
        place.insert((fd, make(index)));
    }

    pub(super) fn remove(&mut self, fd: &RawFd) -> Option<T> {
        let index = self.places.remove(fd)?;
        self.all.try_remove(index).map(|(_, one)| one)
    }

    /// Moves a record to another fd, in place of that fd's former record.
    pub(super) fn rename(&mut self, from: RawFd, to: RawFd) {
        if let Some(index) = self.places.remove(&from) {
            self.remove(&to);
            self.places.insert(to, index);
            self.all.get_mut(index).into_iter().for_each(|(fd, _)| *fd = to);
        }
    }

    /// Returns the record that has this index now.
    #[inline]
    pub(super) fn at(&mut self, index: Index) -> Option<&mut T> {
        self.all.get_mut(index).map(|(_, one)| one)
    }

    /// Returns the record of this fd, which probably has the index `guess`.
    #[inline]
    pub(super) fn find(&mut self, fd: RawFd, guess: Index) -> Option<&mut T> {
        let is_there = self.all.get(guess).is_some_and(|(other, _)| *other == fd);
        let index = if is_there { guess } else { *self.places.get(&fd)? };
        self.all.get_mut(index).map(|(_, one)| one)
    }

    pub(super) fn get(&self, fd: &RawFd) -> Option<&T> {
        self.all.get(*self.places.get(fd)?).map(|(_, one)| one)
    }

    pub(super) fn get_mut(&mut self, fd: &RawFd) -> Option<&mut T> {
        self.all.get_mut(*self.places.get(fd)?).map(|(_, one)| one)
    }

    pub(super) fn contains_key(&self, fd: &RawFd) -> bool {
        self.places.contains_key(fd)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&RawFd, &T)> {
        self.all.iter().map(|(_, (fd, one))| (fd, one))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&RawFd, &mut T)> {
        self.all.iter_mut().map(|(_, (fd, one))| (&*fd, one))
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &RawFd> {
        self.iter().map(|(fd, _)| fd)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &T> {
        self.iter().map(|(_, one)| one)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.iter_mut().map(|(_, one)| one)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const NUMBERS: RawFd = 3;

    /// Runs all sequences of six calls for three fds, one of them negative. Each record must be
    /// found by its fd and by its index, which stays the same, and by nothing else.
    #[test]
    fn what_is_kept_keeps_its_place() {
        let (length, calls) = (6, 3 * NUMBERS as usize);
        for sequence in 0..calls.pow(length) {
            let (mut records, mut plain) = (Records::default(), BTreeMap::new());
            let mut rest = sequence;
            for step in 0..length {
                let fd = (rest % NUMBERS as usize) as RawFd - 1;
                let other = (fd + 2) % NUMBERS - 1;
                match rest % calls / NUMBERS as usize {
                    0 => {
                        records.insert(fd, |index| (index, step));
                        plain.insert(fd, step);
                    }
                    1 => assert_eq!(records.remove(&fd).map(|one| one.1), plain.remove(&fd)),
                    _ => {
                        records.rename(fd, other);
                        let moved = plain.remove(&fd);
                        plain.extend(moved.map(|one| (other, one)));
                    }
                }
                rest /= calls;
                let mut all: Vec<_> = records.iter().map(|(fd, one)| (*fd, one.1)).collect();
                all.sort_unstable();
                assert!(all.into_iter().eq(plain.iter().map(|(fd, one)| (*fd, *one))), "sequence {sequence}");
                for fd in -1..NUMBERS - 1 {
                    let found = records.get(&fd).copied();
                    assert_eq!(found.map(|one| one.1), plain.get(&fd).copied());
                    assert_eq!(found.is_some(), records.contains_key(&fd));
                    if let Some(one) = found {
                        assert_eq!(records.at(one.0).copied(), Some(one));
                    }
                }
            }
        }
    }
}
