//! An undo log of each thread, for calls that sleep and never return: a signal handler may leave a
//! call by longjmp, and cancellation unwinds a thread's frames.
//!
//! An entry is abandoned if its frame lies below the current stack pointer. Example: recv adds an
//! entry for its frame at 0x1000, and a handler leaves it by longjmp. The next call that sleeps has
//! its frame at 0x1800, so it undoes that entry.
//!
//! The comparison is meaningless between two stacks. So entries made on the alternate signal stack,
//! or on the shim's separate stack, are not checked. Those entries, and entries beyond the log's
//! capacity, stay in effect until the thread ends. That may cost a connection its lane, but never a
//! byte.

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;

/// Capacity, for blocking calls of one thread that interrupt each other. A call makes up to two
/// entries.
const ENTRIES: usize = 12;

/// One entry, which its [`Kind`] interprets. See `crate::ops::undo`.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    pub(crate) kind: &'static Kind,
    pub(crate) words: Words,
}

/// Four integers or addresses.
pub(crate) type Words = [usize; 4];

/// The operations on one kind of entry.
pub(crate) struct Kind {
    /// Undoes the entry, because its call will not return.
    pub(crate) undo: fn(Words),
    /// Returns how often this entry counts as a call in progress on the endpoint at the given
    /// address.
    pub(crate) calls_on: fn(Words, usize) -> u32,
    /// Counts the entry again, after all counts were reset.
    pub(crate) count_again: fn(Words),
}

impl Kind {
    /// An entry that has no effect and that no endpoint counts.
    pub(crate) const NOTHING: Kind = Kind { undo: |_| {}, calls_on: |_, _| 0, count_again: |_| {} };
}

impl Held {
    pub(crate) const NOTHING: Held = Held::new(&Kind::NOTHING, [0; 4]);

    pub(crate) const fn new(kind: &'static Kind, words: Words) -> Held {
        Held { kind, words }
    }
}

/// The entries of one thread. The innermost call's entry is the last.
pub(crate) struct UndoLog {
    len: Cell<usize>,
    entries: UnsafeCell<[MaybeUninit<(usize, Held)>; ENTRIES]>,
    /// The bounds of the alternate signal stack, when the last handler ran.
    pub(crate) alternate: Cell<(usize, usize)>,
}

impl UndoLog {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len.get() == 0
    }

    /// Adds an entry for a frame at `here`, and undoes the entries of abandoned calls.
    /// `is_elsewhere` tests for stacks other than the alternate signal stack. The caller has raised
    /// the shield and registered for the end of the thread.
    #[inline]
    pub(crate) fn enter(&self, held: Held, here: usize, is_elsewhere: impl Fn(usize) -> bool) -> usize {
        if !self.is_empty() {
            self.clear(here, is_elsewhere);
        }
        let place = self.len.get();
        if place < ENTRIES {
            // SAFETY: within the array. A signal handler's entries are made in the next call, and
            // removed before that call returns.
            unsafe { (*self.entries.get())[place].write((here, held)) };
            self.len.set(place + 1);
        }
        place
    }

    /// Removes the entry of a call that has returned. Entries after it belong to calls that a
    /// handler abandoned within this call.
    #[inline]
    pub(crate) fn leave(&self, place: usize) {
        while self.len.get() > place + 1 {
            self.pop();
        }
        self.len.set(place);
    }

    #[cold]
    fn clear(&self, here: usize, is_elsewhere: impl Fn(usize) -> bool) {
        let (low, high) = self.alternate.get();
        let is_elsewhere = |at: usize| (low..high).contains(&at) || is_elsewhere(at);
        while let Some((at, _)) = self.last()
            && at <= here
            && !is_elsewhere(at)
            && !is_elsewhere(here)
        {
            self.pop();
        }
    }

    /// Undoes all entries at the end of the thread.
    pub(crate) fn undo_all(&self) {
        while self.last().is_some() {
            self.pop();
        }
    }

    fn last(&self) -> Option<(usize, Held)> {
        let index = self.len.get().checked_sub(1)?;
        // SAFETY: entries below `len` have been written.
        Some(unsafe { (*self.entries.get())[index].assume_init() })
    }

    /// Returns the entries from the outermost call to the innermost.
    pub(crate) fn all(&self) -> impl Iterator<Item = Held> {
        // SAFETY: as above.
        (0..self.len.get()).map(|index| unsafe { (*self.entries.get())[index].assume_init() }.1)
    }

    fn pop(&self) {
        if let Some((_, held)) = self.last() {
            self.len.set(self.len.get() - 1);
            (held.kind.undo)(held.words);
        }
    }
}
