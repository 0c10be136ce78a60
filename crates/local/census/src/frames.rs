//! Finds the bounds of functions in a loaded object by `.eh_frame_hdr`, a table sorted by their
//! addresses, and `.eh_frame`, which has their lengths. Of the possible encodings, it understands
//! the one that compilers and linkers write.

use std::ops::Range;

use crate::Memory;
use crate::bytes::u32_at;
use crate::segments::{self, Segments};

/// The version, and the three encodings: a distance in four bytes from its own place; a count in
/// four bytes; distances in four bytes from the beginning.
const HEADER: [u8; 4] = [1, 0x1b, 0x03, 0x3b];
/// Bytes of the header, the distance and the count.
const TABLE: u64 = 12;
const ROW: u64 = 8;

/// The table of functions of an object.
#[derive(Clone, Copy, Debug)]
pub struct Frames {
    at: u64,
    count: u64,
}

impl Frames {
    /// Returns the table of the object whose first bytes are loaded at `base`. Returns `None` if it
    /// has none, or one in another encoding.
    pub fn of_object(memory: &impl Memory, base: u64) -> Option<Frames> {
        let segments = Segments::read(memory, base, &segments::header(memory, base)?)?;
        Frames::at_table(memory, base.wrapping_sub(segments.first_page).wrapping_add(segments.frames?))
    }

    fn at_table(memory: &impl Memory, at: u64) -> Option<Frames> {
        let mut header = [0; TABLE as usize];
        let is_known = memory.read(at, &mut header) && header.starts_with(&HEADER);
        is_known.then_some(Frames { at, count: u64::from(u32_at(&header, 8)?) })
    }

    /// Returns the bounds of the function that contains `address`.
    pub(crate) fn at(&self, memory: &impl Memory, address: u64) -> Option<Range<u64>> {
        let (mut from, mut to) = (0, self.count);
        while from < to {
            let middle = from.midpoint(to);
            if self.row(memory, middle)?.0 <= address { from = middle + 1 } else { to = middle }
        }
        let (begin, frame) = self.row(memory, from.checked_sub(1)?)?;
        let mut lengths = [0; 16];
        if !memory.read(frame, &mut lengths) {
            return None;
        }
        // The frame begins with its own length and the distance to its common entry. The address of
        // the function and its length follow.
        let is_its = near(frame.checked_add(8)?, u32_at(&lengths, 8)?) == begin;
        let end = begin.checked_add(u64::from(u32_at(&lengths, 12)?))?;
        (is_its && (begin..end).contains(&address)).then_some(begin..end)
    }

    /// Returns the address of the function in this row, and the address of its frame description.
    fn row(&self, memory: &impl Memory, index: u64) -> Option<(u64, u64)> {
        let mut row = [0; ROW as usize];
        let is_read = memory.read(self.at.checked_add(TABLE + index * ROW)?, &mut row);
        is_read.then_some((near(self.at, u32_at(&row, 0)?), near(self.at, u32_at(&row, 4)?)))
    }
}

fn near(from: u64, distance: u32) -> u64 {
    from.wrapping_add_signed(i64::from(distance as i32))
}
