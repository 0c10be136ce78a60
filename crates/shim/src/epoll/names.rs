//! Whose an event of the kernel's is: by its user data, which is the program's, or a token of ours in its place.
//!
//! One of three states, which only what is here changes: the table *Whose an event is* in docs/registration.md.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustc_hash::FxHashMap;

use super::Epoll;
use crate::base::process;

/// The upper half of every token. As an address it would be no program's, and nobody counts that far.
const TOKENS: u64 = 0xd00b_e112;
static NEXT_TOKEN: AtomicU32 = AtomicU32::new(0);

/// Whether this user data is of ours.
pub(super) fn is_token(data: u64) -> bool {
    data >> 32 == TOKENS
}

/// A forked child's tokens in the sets that it shares are none of its parent's.
pub(super) fn part_tokens() {
    NEXT_TOKEN.store((process::now() >> 10) as u32, Relaxed);
}

pub(super) fn new_token(epoll: &Epoll) -> Name {
    // First: a thread that sleeps in the kernel on this instance may be given it at once.
    epoll.has_tokens.store(true, Release);
    Name::Token(TOKENS << 32 | u64::from(NEXT_TOKEN.fetch_add(1, Relaxed)))
}

/// What the kernel's set holds as the user data of a registration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Name {
    /// The program's data, which others may have too: an event that has it is told as it comes.
    #[default]
    Given,
    /// The program's data, which no other has.
    Unique(u64),
    Token(u64),
}

impl Name {
    /// The name by which the kernel's set has it, if it has this data there.
    pub(super) fn of(data: u64) -> Name {
        if is_token(data) { Name::Token(data) } else { Name::Unique(data) }
    }

    /// Whether an event says that it is this registration's.
    pub(super) fn is_known(self) -> bool {
        self != Name::Given
    }

    pub(super) fn is_token(self) -> bool {
        matches!(self, Name::Token(_))
    }

    /// The user data in the kernel's set, where the program's is `data`.
    pub(super) fn in_set(self, data: u64) -> u64 {
        self.key().unwrap_or(data)
    }

    fn key(self) -> Option<u64> {
        match self {
            Name::Given => None,
            Name::Unique(data) | Name::Token(data) => Some(data),
        }
    }
}

/// The registrations of a set by their names.
#[derive(Default)]
pub(super) struct Names(FxHashMap<u64, RawFd>);

impl Names {
    /// Whose an event with this data is, if that can be told.
    pub(super) fn find(&self, data: u64) -> Option<RawFd> {
        self.0.get(&data).copied()
    }

    pub(super) fn are_none(&self) -> bool {
        self.0.is_empty()
    }

    /// The registration `fd` goes by another name. No other goes by that.
    pub(super) fn give(&mut self, name: &mut Name, fd: RawFd, new: Name) {
        self.forget(*name, fd);
        *name = new;
        self.0.extend(new.key().map(|key| (key, fd)));
    }

    /// The registration is there no more.
    pub(super) fn forget(&mut self, name: Name, fd: RawFd) {
        if let Some(key) = name.key().filter(|key| self.find(*key) == Some(fd)) {
            self.0.remove(&key);
        }
    }

    /// It is filed under another number.
    pub(super) fn renumber(&mut self, name: Name, to: RawFd) {
        self.0.extend(name.key().map(|key| (key, to)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All sequences of five calls for two registrations, of which each is found by its name and by no other.
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
                    assert_eq!(names.find(name.in_set(7)), Some(*fd), "{both:?}");
                    assert_eq!(name.is_token(), is_token(name.in_set(7)));
                }
            }
        }
    }
}
