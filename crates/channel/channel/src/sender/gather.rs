//! The bytes of one message in several places.

use std::borrow::Cow;
use std::io::IoSlice;

/// A range of the bytes of several slices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gather<'a> {
    pieces: &'a [IoSlice<'a>],
    /// Bytes of the first piece that come before the range.
    skip: usize,
    len: usize,
}

impl<'a> Gather<'a> {
    /// Returns all bytes of the slices.
    #[inline]
    pub(super) fn of(pieces: &'a [IoSlice<'a>]) -> Gather<'a> {
        let len = pieces.iter().fold(0usize, |sum, piece| sum.saturating_add(piece.len()));
        Gather { pieces, skip: 0, len }
    }

    #[inline]
    pub(super) fn len(self) -> usize {
        self.len
    }

    /// Returns the bytes if they are in one place.
    #[inline]
    pub(super) fn single(self) -> Option<&'a [u8]> {
        match self.pieces {
            [] => Some(&[]),
            [only] => Some(&only[self.skip..self.skip + self.len]),
            _ => None,
        }
    }

    /// Returns the bytes in order.
    pub(super) fn pieces(self) -> impl Iterator<Item = &'a [u8]> {
        let (mut skip, mut left) = (self.skip, self.len);
        self.pieces.iter().filter_map(move |piece| {
            let from = skip.min(piece.len());
            skip -= from;
            let count = left.min(piece.len() - from);
            left -= count;
            (count > 0).then(|| &piece[from..from + count])
        })
    }

    /// Returns the first `at` bytes, and the others.
    pub(super) fn split_at(self, at: usize) -> (Gather<'a>, Gather<'a>) {
        let (mut pieces, mut skip) = (self.pieces, self.skip + at);
        while let Some((first, rest)) = pieces.split_first()
            && skip >= first.len()
        {
            skip -= first.len();
            pieces = rest;
        }
        (Gather { len: at, ..self }, Gather { pieces, skip, len: self.len - at })
    }

    /// Returns the bytes in one place.
    pub(super) fn whole(self) -> Cow<'a, [u8]> {
        match self.single() {
            Some(bytes) => Cow::Borrowed(bytes),
            None => Cow::Owned(self.pieces().collect::<Vec<_>>().concat()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_are_those_of_the_bytes_in_one_place(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..9), 0..6),
            ats in proptest::collection::vec(any::<proptest::sample::Index>(), 0..4),
        ) {
            let expected = pieces.concat();
            let slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
            let (mut rest, mut from) = (Gather::of(&slices), 0);
            for at in ats {
                let at = at.index(rest.len() + 1);
                let (first, later) = rest.split_at(at);
                prop_assert_eq!(&*first.whole(), &expected[from..from + at]);
                rest = later;
                from += at;
            }
            prop_assert_eq!(rest.len(), expected.len() - from);
            prop_assert_eq!(&*rest.whole(), &expected[from..]);
        }
    }
}
