//! Buffers of the program: the memory that a socket call sends from or receives into.
//!
//! The buffers are raw addresses, as the program would give them to the kernel. An address that the
//! program must not touch is a [`Fault`], and does not crash. A cursor walks them, so that one call
//! can be served partly by TCP and partly by a lane.
//!
//! A cursor covers no more than the kernel moves in one call ([`most_at_once`]). It ends there, in
//! the middle of a piece if need be, and the bytes behind are not part of the call.

use std::io::{IoSlice, IoSliceMut};
use std::marker::PhantomData;

use shunt_sys::memory::most_at_once;

/// One piece of a buffer, laid out as C's `struct iovec`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Piece {
    /// First byte.
    pub base: *mut u8,
    /// Number of bytes.
    pub len: usize,
}

/// Returns whether the given bytes can be touched in the way that the cursor needs.
pub type Reach = fn(*mut u8, usize) -> bool;

/// The program passed memory that it must not touch: EFAULT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// Returns how many bytes a call on `pieces` moves at most: their sum, or `most` if that is less.
fn cut(pieces: &[Piece], most: usize) -> usize {
    pieces.iter().fold(0usize, |sum, piece| sum.saturating_add(piece.len)).min(most)
}

/// Returns how many bytes a call on `pieces` moves at most.
pub fn most_of(pieces: &[Piece]) -> usize {
    cut(pieces, most_at_once())
}

/// A cursor over the pieces of one call.
#[derive(Clone, Copy, Debug)]
struct Cursor<'a> {
    pieces: *const Piece,
    count: usize,
    offset: usize,
    remaining: usize,
    reach: Reach,
    _pieces: PhantomData<&'a [Piece]>,
}

impl<'a> Cursor<'a> {
    fn new(pieces: &'a [Piece], reach: Reach) -> Cursor<'a> {
        let remaining = most_of(pieces);
        let (base, count) = (pieces.as_ptr(), pieces.len());
        let mut cursor = Cursor { pieces: base, count, offset: 0, remaining, reach, _pieces: PhantomData };
        cursor.advance(0);
        cursor
    }

    fn pieces(&self) -> &'a [Piece] {
        // SAFETY: `pieces` and `count` always describe a tail of the slice passed to `new`,
        // borrowed for 'a.
        unsafe { std::slice::from_raw_parts(self.pieces, self.count) }
    }

    /// Returns the remaining pieces: the first without its used bytes, the last cut at the end of
    /// the call.
    fn list(&self) -> impl Iterator<Item = Piece> {
        let (mut skip, mut left) = (self.offset, self.remaining);
        self.pieces().iter().map_while(move |piece| {
            let len = (piece.len - skip).min(left);
            let part = Piece { base: piece.base.wrapping_add(skip), len };
            let is_within = left > 0;
            left -= len;
            skip = 0;
            is_within.then_some(part)
        })
    }

    /// Returns the longest run that is contiguous in memory, at most `limit` bytes.
    fn run(&self, limit: usize) -> (*mut u8, usize) {
        let limit = limit.min(self.remaining);
        match self.pieces().first() {
            Some(first) => (first.base.wrapping_add(self.offset), (first.len - self.offset).min(limit)),
            None => (std::ptr::null_mut(), 0),
        }
    }

    /// Advances by `count` bytes. Afterwards the first piece has bytes left or there is none, so
    /// that an empty piece never looks like the end.
    fn advance(&mut self, mut count: usize) {
        debug_assert!(count <= self.remaining);
        self.remaining -= count;
        while let Some(first) = self.pieces().first() {
            let left = first.len - self.offset;
            if count < left {
                self.offset += count;
                return;
            }
            count -= left;
            self.offset = 0;
            self.pieces = self.pieces.wrapping_add(1);
            self.count -= 1;
        }
    }
}

macro_rules! cursor {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name<'a>(Cursor<'a>);

        impl<'a> $name<'a> {
            /// A cursor at the first byte of `pieces`.
            ///
            /// # Safety
            #[doc = concat!("Every piece must be valid for ", $what, " for as long as the cursor or a copy of it is used.")]
            pub unsafe fn new(pieces: &'a [Piece]) -> $name<'a> {
                $name(Cursor::new(pieces, |_, _| true))
            }

            /// Returns a cursor over pieces of unknown validity: it calls `reach` for every run
            /// before it touches the run.
            ///
            /// # Safety
            #[doc = concat!("What `reach` says yes to must be valid for ", $what, ", as for `new`.")]
            pub unsafe fn checked(pieces: &'a [Piece], reach: Reach) -> $name<'a> {
                $name(Cursor::new(pieces, reach))
            }

            /// Returns the number of bytes left.
            pub fn remaining(&self) -> usize {
                self.0.remaining
            }

            /// Returns the pieces left, for a system call. The first is never used up.
            pub fn list(&self) -> impl Iterator<Item = Piece> {
                self.0.list()
            }

            /// Moves past `count` bytes, no more than are left.
            pub fn advance(&mut self, count: usize) {
                self.0.advance(count);
            }

            /// Returns whether the next `count` bytes can all be touched.
            pub(crate) fn reaches(&self, count: usize) -> bool {
                let mut ahead = *self;
                let mut left = count;
                while left > 0 {
                    let Ok((_, run)) = ahead.run(left) else { return false };
                    ahead.advance(run);
                    left -= run;
                }
                true
            }

            #[inline]
            pub(crate) fn run(&self, limit: usize) -> Result<(*mut u8, usize), Fault> {
                let (base, len) = self.0.run(limit);
                if (self.0.reach)(base, len) { Ok((base, len)) } else { Err(Fault) }
            }
        }
    };
}

cursor!(
    /// A cursor over the bytes to send.
    Source,
    "reads"
);
cursor!(
    /// A cursor over the memory that received bytes go to.
    Sink,
    "writes"
);

// Both types are laid out as C's `struct iovec`, which std guarantees for `IoSlice`.
const _: () = assert!(size_of::<Piece>() == size_of::<IoSlice<'_>>());

impl<'a> Source<'a> {
    /// Returns a cursor over memory of this process.
    pub fn of(slices: &'a [IoSlice<'a>]) -> Source<'a> {
        // SAFETY: the layouts are the same.
        let pieces = unsafe { std::slice::from_raw_parts(slices.as_ptr().cast(), slices.len()) };
        // SAFETY: what the slices borrow can be read for 'a.
        unsafe { Source::new(pieces) }
    }
}

impl<'a> Sink<'a> {
    /// Returns a cursor over memory of this process.
    pub fn of(slices: &'a mut [IoSliceMut<'a>]) -> Sink<'a> {
        // SAFETY: the layouts are the same.
        let pieces = unsafe { std::slice::from_raw_parts(slices.as_ptr().cast(), slices.len()) };
        // SAFETY: the slices borrow the memory exclusively for 'a, and it can be written.
        unsafe { Sink::new(pieces) }
    }
}

impl Sink<'_> {
    /// Has `take` fill at most `limit` bytes, and advances past those that it did fill. If `limit`
    /// is less than the bytes left, `take` gets at most one contiguous run.
    pub fn within<R>(&mut self, limit: usize, take: impl FnOnce(&mut Sink<'_>) -> R) -> R {
        if limit >= self.remaining() {
            return take(self);
        }
        let (base, len) = self.0.run(limit);
        let piece = [Piece { base, len }];
        // SAFETY: a part of one of this cursor's pieces, used while the cursor is.
        let mut part = unsafe { Sink::checked(&piece, self.0.reach) };
        let outcome = take(&mut part);
        self.advance(len - part.remaining());
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_walks_pieces_and_skips_empty_ones() {
        let mut bytes = *b"abcdef";
        let base = bytes.as_mut_ptr();
        let pieces = [
            Piece { base, len: 0 },
            Piece { base, len: 2 },
            Piece { base: base.wrapping_add(2), len: 0 },
            Piece { base: base.wrapping_add(2), len: 4 },
        ];
        // SAFETY: the pieces lie in `bytes`, which outlives the cursor.
        let mut source = unsafe { Source::new(&pieces) };
        assert_eq!((source.remaining(), source.list().count()), (6, 3));
        assert_eq!(source.run(9), Ok((base, 2)));
        source.advance(1);
        assert_eq!(source.run(9), Ok((base.wrapping_add(1), 1)));
        source.advance(1);
        assert_eq!(source.run(3), Ok((base.wrapping_add(2), 3)));
        source.advance(4);
        assert_eq!((source.remaining(), source.run(1).map(|run| run.1)), (0, Ok(0)));
        assert_eq!(source.list().count(), 0);
    }

    /// All lists of up to three pieces whose lengths lie around a limit, against the sum in a wider
    /// integer.
    #[test]
    fn a_call_is_cut_where_the_sum_of_its_pieces_reaches_the_limit() {
        const MOST: usize = 0x7fff_f000;
        let lens =
            [0, 1, 2, MOST / 2, MOST - 1, MOST, MOST + 1, 1 << 31, 3 << 30, usize::MAX - 1, usize::MAX];
        let base: *mut u8 = std::ptr::null_mut();
        let check = |pieces: &[Piece]| {
            let sum: u128 = pieces.iter().map(|piece| piece.len as u128).sum();
            assert_eq!(cut(pieces, MOST) as u128, sum.min(MOST as u128), "{pieces:?}");
        };
        check(&[]);
        for first in lens {
            check(&[Piece { base, len: first }]);
            for second in lens {
                check(&[Piece { base, len: first }, Piece { base, len: second }]);
                for third in lens {
                    check(&[first, second, third].map(|len| Piece { base, len }));
                }
            }
        }
    }

    #[test]
    fn a_cursor_ends_where_the_call_is_cut() {
        let most = most_at_once();
        let base: *mut u8 = std::ptr::null_mut();
        let pieces = [most - 10, 0, 4, 100, 7].map(|len| Piece { base, len });
        // SAFETY: nothing is touched.
        let mut source = unsafe { Source::new(&pieces) };
        let lens = |source: &Source<'_>| source.list().map(|piece| piece.len).collect::<Vec<_>>();
        assert_eq!((source.remaining(), lens(&source)), (most, vec![most - 10, 0, 4, 6]));
        source.advance(most - 8);
        assert_eq!((source.remaining(), lens(&source)), (8, vec![2, 6]));
        source.advance(3);
        assert_eq!((source.run(100).map(|run| run.1), lens(&source)), (Ok(5), vec![5]));
        assert!(source.reaches(5));
        source.advance(5);
        assert_eq!((source.remaining(), lens(&source), source.run(1).map(|run| run.1)), (0, vec![], Ok(0)));
    }

    #[test]
    fn a_part_of_a_sink_is_one_run_within_the_limit() {
        let mut bytes = *b"abcdef";
        let base = bytes.as_mut_ptr();
        let pieces = [Piece { base, len: 2 }, Piece { base: base.wrapping_add(2), len: 4 }];
        // SAFETY: as above.
        let mut sink = unsafe { Sink::new(&pieces) };
        let fill = |part: &mut Sink<'_>| {
            let seen = part.remaining();
            part.advance(seen.min(3));
            seen
        };
        assert_eq!((sink.within(5, fill), sink.remaining()), (2, 4));
        assert_eq!((sink.within(1, fill), sink.remaining()), (1, 3));
        assert_eq!((sink.within(9, fill), sink.remaining()), (3, 0));
    }
}
