//! What a thread has announced for the time of a sleep, in case it never comes back from it: a handler may leave a call
//! by longjmp, and a cancelled thread's frames are gone.
//!
//! Entries of calls that were left are found by the stack pointer: their frames lie below the present one. That says
//! nothing across two stacks, so an alternate signal stack is left out, and one that calls are answered on; then, or with more entries
//! than there is room for, what was announced stays so until the thread ends. That costs a connection its lane, but never a byte.

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;

/// Room for blocking calls of one thread that interrupt each other; each may have two.
const ENTRIES: usize = 12;

/// What has been announced, as whoever announces it understands it: see `crate::ops::held`.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    pub(crate) kind: &'static Kind,
    pub(crate) words: Words,
}

/// Four numbers, or addresses.
pub(crate) type Words = [usize; 4];

/// What is to be done about one kind of it.
pub(crate) struct Kind {
    /// Nobody comes back to undo it.
    pub(crate) undo: fn(Words),
    /// How often the endpoint at this address counts it among the calls in progress.
    pub(crate) calls_on: fn(Words, usize) -> u32,
    /// Counts it again, where all counts have been forgotten.
    pub(crate) count_again: fn(Words),
}

impl Kind {
    /// Nothing is, and no endpoint counts it.
    pub(crate) const NOTHING: Kind = Kind { undo: |_| {}, calls_on: |_, _| 0, count_again: |_| {} };
}

impl Held {
    pub(crate) const NOTHING: Held = Held::new(&Kind::NOTHING, [0; 4]);

    pub(crate) const fn new(kind: &'static Kind, words: Words) -> Held {
        Held { kind, words }
    }
}

/// The entries of one thread, the innermost last.
pub(crate) struct Journal {
    len: Cell<usize>,
    entries: UnsafeCell<[MaybeUninit<(usize, Held)>; ENTRIES]>,
    /// Where the alternate signal stack is, as of the last handler.
    pub(crate) alternate: Cell<(usize, usize)>,
}

impl Journal {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.len.get() == 0
    }

    /// Enters what is held by a frame at `here`, and undoes what calls that were left have held. Of other stacks than the alternate one
    /// `is_elsewhere` knows. Under the shield, and with the end of the thread awaited.
    #[inline]
    pub(crate) fn enter(&self, held: Held, here: usize, is_elsewhere: impl Fn(usize) -> bool) -> usize {
        if !self.is_empty() {
            self.clear(here, is_elsewhere);
        }
        let place = self.len.get();
        if place < ENTRIES {
            // SAFETY: within the array. Handlers enter theirs in the call to come, and leave before it does.
            unsafe { (*self.entries.get())[place].write((here, held)) };
            self.len.set(place + 1);
        }
        place
    }

    /// The call has come back. What is above its entry was left by a handler within it.
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

    /// Undoes everything: the thread is over.
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

    /// From the outermost.
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
