//! Which registration an event of the kernel belongs to. The event shows only user data: the
//! program's, or a *token* of the shim in its place.
//!
//! A registration's name is in one of three states, and only this file changes them. The table
//! *Whose an event is* in docs/registration.md lists the transitions.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustc_hash::FxHashMap;

use super::Epoll;
use crate::base::process;

/// The upper half of every token. No program has such an address, and no counter gets that far.
const TOKENS: u64 = 0xd00b_e112;
static NEXT_TOKEN: AtomicU32 = AtomicU32::new(0);

/// Returns whether this user data is a token.
pub(super) fn is_token(data: u64) -> bool {
    data >> 32 == TOKENS
}

/// Gives a forked child other tokens than its parent, since both may put some into the instances
/// that they share.
pub(super) fn part_tokens() {
    NEXT_TOKEN.store((process::now() >> 10) as u32, Relaxed);
}

pub(super) fn new_token(epoll: &Epoll) -> Name {
    // Before the token is registered: a thread that sleeps in the kernel on this instance may get
    // it immediately.
    epoll.has_tokens.store(true, Release);
    Name::Token(TOKENS << 32 | u64::from(NEXT_TOKEN.fetch_add(1, Relaxed)))
}

/// The user data of a registration in the kernel's interest list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Name {
    /// The program's data, which other registrations may have too. An event with it is reported
    /// unchanged.
    #[default]
    Given,
    /// The program's data, which no other registration in the instance has.
    Unique(u64),
    Token(u64),
}

impl Name {
    /// Returns the name of a registration that has this data in the kernel's list. No other may
    /// have it.
    pub(super) fn of(data: u64) -> Name {
        if is_token(data) { Name::Token(data) } else { Name::Unique(data) }
    }

    /// Returns whether an event with this data belongs to this registration for certain.
    pub(super) fn is_known(self) -> bool {
        self != Name::Given
    }

    pub(super) fn is_token(self) -> bool {
        matches!(self, Name::Token(_))
    }

    /// Returns the user data in the kernel's list, where the program's is `data`.
    pub(super) fn in_kernel(self, data: u64) -> u64 {
        self.key().unwrap_or(data)
    }

    fn key(self) -> Option<u64> {
        match self {
            Name::Given => None,
            Name::Unique(data) | Name::Token(data) => Some(data),
        }
    }
}

/// The registrations of an instance by their names.
#[derive(Default)]
pub(super) struct Names(FxHashMap<u64, RawFd>);

impl Names {
    /// Returns the fd of the registration that an event with this data belongs to, if that is
    /// known.
    pub(super) fn find(&self, data: u64) -> Option<RawFd> {
        self.0.get(&data).copied()
    }

    pub(super) fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Gives the registration `fd` another name, which no other registration may have.
    pub(super) fn give(&mut self, name: &mut Name, fd: RawFd, new: Name) {
        self.forget(*name, fd);
        *name = new;
        self.0.extend(new.key().map(|key| (key, fd)));
    }

    /// Removes the name of a registration that has left the instance.
    pub(super) fn forget(&mut self, name: Name, fd: RawFd) {
        if let Some(key) = name.key().filter(|key| self.find(*key) == Some(fd)) {
            self.0.remove(&key);
        }
    }

    /// Moves a name along with its registration to another fd.
    pub(super) fn renumber(&mut self, name: Name, to: RawFd) {
        self.0.extend(name.key().map(|key| (key, to)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs all sequences of five calls for two registrations. Each must be found by its own name
    /// only.
    #[test]
    fn an_event_is_found_to_be_of_the_one_that_has_its_name() {
        const CALLS: usize = 6;
        let length = 5;
        for sequence in 0..(2 * CALLS).pow(length) {
            let mut names = Names::default();
            let mut both = [(0, Name::default()), (100, Name::default())];
            for place in 0..length {
                let step = sequence / (2 * CALLS).pow(place) % (2 * CALLS);
                let is_taken = |name| both.iter().any(|(_, other)| name == *other);
                let wanted = match step / 2 {
                    0 => Some(Name::Given),
                    1 => Some(Name::of(TOKENS << 32 | u64::from(place))),
                    call @ (2 | 3) => Some(Name::of(call as u64)).filter(|name| !is_taken(*name)),
                    _ => None,
                };
                let (fd, name) = &mut both[step % 2];
                match wanted {
                    Some(wanted) => names.give(name, *fd, wanted),
                    None if step / 2 == 4 => {
                        *fd += 1;
                        names.renumber(*name, *fd);
                    }
                    None => {
                        names.forget(*name, *fd);
                        *name = Name::Given;
                    }
                }
                let known = both.iter().filter(|(_, name)| name.is_known());
                assert_eq!(known.clone().count(), names.0.len(), "{both:?}");
                for (fd, name) in known {
                    assert_eq!(names.find(name.in_kernel(7)), Some(*fd), "{both:?}");
                    assert_eq!(name.is_token(), is_token(name.in_kernel(7)));
                }
            }
        }
    }
}
