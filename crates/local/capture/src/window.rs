//! Validates the cursors of a lane before they are used for a copy.
//!
//! ```text
//!        base          head             tail
//!   ring:  |.............|################|            tail - head <= size of the ring
//! ```
//!
//! Both ends write these words, and a program may write anything there. But if the words are loaded
//! in the order `tail`, `base`, `head`, `tail`, two honest ends can only produce values with these
//! properties:
//!
//! - The receiver never passes the sender: `head <= later tail`.
//! - The sender never has more than a ring unread: `tail <= head + size`, since `head` was loaded
//!   later.
//! - No cursor goes back: `seen <= tail <= later tail`, and `head` is at least its value at the
//!   last poll.
//!
//! A [`Window`] exists only if all of that holds. So one poll copies at most a ring, whatever the
//! words are. A program that wants to make a capture write much must advance its cursors ring by
//! ring, like any sender.

use std::ops::Range;

/// Bytes that a sender may have written beyond its cursor before it publishes them: a block of a
/// ring.
const UNDER_WAY: u64 = 64 * 1024;
/// The maximum number of bytes that one poll copies.
const CHUNK: u64 = 256 * 1024;

/// The words in the order in which they were loaded, without their flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cursors {
    pub(crate) tail: u64,
    pub(crate) base: u64,
    pub(crate) head: u64,
    pub(crate) later_tail: u64,
}

/// The error for words that two honest ends cannot write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Impossible;

/// The bytes of a lane that one poll may copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    range: Range<u64>,
    is_behind: bool,
}

/// The progress of a capture in a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Passed {
    /// Bytes that were copied or missed.
    pub(crate) seen: u64,
    /// The receiver's cursor at the last poll.
    pub(crate) head: u64,
}

impl Cursors {
    /// Returns the bytes that may be copied from a ring of `size` bytes, up to `limit`. Returns
    /// `None` while the sender is starting the ring over.
    pub(crate) fn window(self, passed: Passed, limit: u64, size: u64) -> Result<Option<Window>, Impossible> {
        let Cursors { tail, base, head, later_tail } = self;
        let is_monotonic = passed.seen <= tail && tail <= later_tail && passed.head <= head;
        let is_in_ring = head <= later_tail && tail <= head.saturating_add(size);
        if !(is_monotonic && is_in_ring) {
            return Err(Impossible);
        }
        // The sender has set the base between the two loads.
        if base > tail {
            return Ok(None);
        }
        let wanted = tail.min(limit.max(passed.seen));
        // Bytes of an earlier base are at unknown places.
        let from = passed.seen.max(base).max(self.kept_from(size)).min(wanted);
        let until = wanted.min(from + CHUNK.min(size));
        Ok(Some(Window { range: from..until, is_behind: until < wanted }))
    }

    /// Returns the first byte that cannot have been overwritten yet. A sender overwrites nothing
    /// that is unread, and writes at most a block beyond its cursor.
    pub(crate) fn kept_from(self, size: u64) -> u64 {
        self.head.min((self.later_tail + UNDER_WAY).saturating_sub(size))
    }
}

impl Window {
    /// Returns the range of bytes to copy, at most a ring.
    pub(crate) fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Returns `true` if the lane has more bytes already.
    pub(crate) fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Returns how many polls copy everything that a ring of `size` bytes can hold.
    pub(crate) fn looks_for(size: u64) -> u64 {
        size.div_ceil(CHUNK) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shunt_abi::geometry::LANE_CURSOR;

    const SIZE: u64 = 256 * 1024;

    fn window(words: [u64; 4], seen: u64) -> Result<Option<Window>, Impossible> {
        let [tail, base, head, later_tail] = words;
        let passed = Passed { seen, head: 0 };
        Cursors { tail, base, head, later_tail }.window(passed, u64::MAX, SIZE)
    }

    fn range(words: [u64; 4], seen: u64) -> Range<u64> {
        window(words, seen).unwrap().unwrap().range()
    }

    #[test]
    fn bytes_between_the_cursors_may_be_copied() {
        assert_eq!(range([100, 0, 0, 100], 0), 0..100);
        assert_eq!(range([100, 0, 100, 100], 40), 40..100);
        assert_eq!(range([SIZE, 0, 0, SIZE], 0), 0..SIZE);
    }

    #[test]
    fn bytes_that_may_be_overwritten_are_left_out() {
        let tail = 10 * SIZE;
        assert_eq!(range([tail, 0, tail - 1000, tail], 0), tail + UNDER_WAY - SIZE..tail);
        assert_eq!(range([tail, tail - 10, tail, tail], 0), tail - 10..tail);
    }

    #[test]
    fn a_tail_further_than_a_ring_from_the_head_is_impossible() {
        assert_eq!(window([1 << 60, 0, 0, 1 << 60], 0), Err(Impossible));
        assert_eq!(window([SIZE + 1, 0, 0, SIZE + 1], 0), Err(Impossible));
        // The receiver has advanced between the two loads.
        assert_eq!(range([SIZE, 0, SIZE, 2 * SIZE], 0), SIZE..SIZE);
    }

    #[test]
    fn cursors_that_go_back_or_pass_each_other_are_impossible() {
        assert_eq!(window([100, 0, 50, 100], 101), Err(Impossible));
        assert_eq!(window([100, 0, 50, 99], 0), Err(Impossible));
        assert_eq!(window([100, 0, 101, 100], 0), Err(Impossible));
        let passed = Passed { seen: 0, head: 51 };
        let cursors = Cursors { tail: 100, base: 0, head: 50, later_tail: 100 };
        assert_eq!(cursors.window(passed, u64::MAX, SIZE), Err(Impossible));
    }

    fn word() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            0..4 * SIZE,
            (0..4 * SIZE).prop_map(|less| LANE_CURSOR - less),
            Just(1 << 60),
            Just(u64::MAX)
        ]
        .prop_map(|word| word & LANE_CURSOR)
    }

    proptest! {
        #[test]
        fn no_words_yield_more_than_a_ring(
            words in proptest::array::uniform4(word()),
            (seen, head, limit) in (word(), word(), word()),
            size in prop_oneof![Just(4096), Just(SIZE), Just(16 * SIZE)],
        ) {
            let [tail, base, head_now, later_tail] = words;
            let cursors = Cursors { tail, base, head: head_now, later_tail };
            let Ok(Some(window)) = cursors.window(Passed { seen, head }, limit, size) else { return Ok(()) };
            let range = window.range();
            prop_assert!(seen <= range.start && range.start <= range.end && range.end <= tail);
            prop_assert!(range.end - range.start <= size.min(CHUNK));
            prop_assert!(range.end <= limit.max(seen));
            // The bytes that remain are in the ring too.
            prop_assert!(tail.min(limit.max(seen)) - range.start <= size);
            prop_assert_eq!(window.is_behind(), range.end < tail.min(limit.max(seen)));
        }
    }
}
