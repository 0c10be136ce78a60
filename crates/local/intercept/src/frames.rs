//! Finds the functions of a program in its unwind tables: `.eh_frame_hdr`, which is sorted by
//! address, and `.eh_frame`, which has the lengths.
//!
//! The format allows several encodings. Compilers emit one of them, and this module reads only that
//! one. It checks each row of the table against the frame that the row refers to.

use std::ops::Range;

use crate::Closed;
use crate::elf::File;

const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
/// The version; then the encodings: of the `.eh_frame` pointer (relative to itself, 4 bytes), of
/// the count (4 bytes), and of the rows (relative to the table, 4 bytes).
const HEADER: [u8; 4] = [1, 0x1b, 0x03, 0x3b];
/// Offset of the first row: behind header, pointer and count.
const TABLE: usize = 12;
const LINE: usize = 8;

/// The function table of a program.
pub(crate) struct Frames {
    /// Address and content of the table, to the end of its segment.
    header_at: u64,
    header: Vec<u8>,
    count: usize,
    frames_at: u64,
    frames: Vec<u8>,
}

impl Frames {
    /// Reads the table. Returns `None` if the program has none, or one in another encoding.
    pub(crate) fn of(program: &File) -> Result<Option<Frames>, Closed> {
        let told = program.segments.iter().find(|segment| segment.kind == PT_GNU_EH_FRAME);
        let Some(segment) = told else { return Ok(None) };
        let (header_at, header) = (segment.address, program.content(segment)?);
        let (Some(distance), Some(count)) = (half(&header, 4), half(&header, 8)) else { return Ok(None) };
        if !header.starts_with(&HEADER) || header.len() < TABLE + count as usize * LINE {
            return Ok(None);
        }
        let frames_at = near(header_at + 4, distance);
        let Some(frames) = program.from(frames_at, u64::MAX)? else { return Ok(None) };
        Ok(Some(Frames { header_at, header, count: count as usize, frames_at, frames }))
    }

    /// Returns the function that contains `address`.
    pub(crate) fn at(&self, address: u64) -> Option<Range<u64>> {
        let (mut from, mut to) = (0, self.count);
        while from < to {
            let middle = from.midpoint(to);
            if self.begin(middle)? <= address { from = middle + 1 } else { to = middle }
        }
        self.function(from.checked_sub(1)?).filter(|function| function.contains(&address))
    }

    /// Iterates over all functions in order of their addresses.
    pub(crate) fn all(&self) -> impl Iterator<Item = Range<u64>> {
        (0..self.count).filter_map(|index| self.function(index))
    }

    fn begin(&self, index: usize) -> Option<u64> {
        half(&self.header, TABLE + index * LINE).map(|distance| near(self.header_at, distance))
    }

    fn function(&self, index: usize) -> Option<Range<u64>> {
        /// Offset of the function's relative address in its frame: behind the frame's length and
        /// the pointer to its common information.
        const DISTANCE: u64 = 8;
        let begin = self.begin(index)?;
        let frame = near(self.header_at, half(&self.header, TABLE + index * LINE + 4)?);
        let at = usize::try_from(frame.checked_add(DISTANCE)?.checked_sub(self.frames_at)?).ok()?;
        let is_its = near(frame + DISTANCE, half(&self.frames, at)?) == begin;
        let len = half(&self.frames, at + 4)?;
        is_its.then(|| begin..begin.saturating_add(len.into()))
    }
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

fn near(from: u64, distance: u32) -> u64 {
    from.wrapping_add_signed(i64::from(distance as i32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_program_tells_where_its_functions_are() {
        let own = File::open(Path::new("/proc/self/exe")).unwrap();
        let frames = Frames::of(&own).unwrap().unwrap();
        let all: Vec<_> = frames.all().collect();
        assert!(all.len() > 100 && all.is_sorted_by_key(|function| function.start));
        for function in all.iter().filter(|function| !function.is_empty()).take(100) {
            assert_eq!(frames.at(function.start).as_ref(), Some(function));
            assert_eq!(frames.at(function.end - 1).as_ref(), Some(function));
        }
        assert_eq!(frames.at(0), None);
    }
}
