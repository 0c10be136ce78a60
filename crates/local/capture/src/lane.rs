//! Reads one direction of a connection without the cooperation of either end.
//!
//! The two ends do not wait for the capture. So the sender may overwrite bytes before or while they
//! are copied. After a copy, the cursors are loaded again, and only bytes that cannot have been
//! overwritten count. The others are counted as missed. Example: the ring has 64 KiB, and the
//! sender writes 200 KiB between two polls. The capture then gets the bytes that are still in the
//! ring, and reports the rest as missed.
//!
//! Programs can write anything to this memory, so no word of it is trusted; see `window`.

use std::ops::Range;
use std::sync::atomic::{Ordering::Acquire, fence};

use shunt_abi::geometry::{
    Geometry, LANE_BASE_OFFSET, LANE_CLOSED, LANE_CURSOR, LANE_END_CLOSED, LANE_END_OFFSET,
    LANE_END_SHUT_DOWN, LANE_HEAD_OFFSET, LANE_RETURNED, LANE_SPILLED, LANE_START_OFFSET, LANE_TAIL_OFFSET,
    Side,
};
use shunt_sys::view::View;

use crate::window::{Cursors, Passed, Window};

/// The memory of a link, which other processes write.
pub trait Memory {
    /// Loads the word at `offset`, if there is one.
    fn word(&self, offset: usize) -> Option<u64>;
    /// Copies the bytes at `offset`. Returns `false` if the memory ends before.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> bool;
}

impl Memory for View {
    fn word(&self, offset: usize) -> Option<u64> {
        View::word(self, offset)
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> bool {
        View::read(self, offset, bytes)
    }
}

/// The result of one [`Lane::look`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Bytes missed before those that were copied.
    pub missed: u64,
    /// More bytes are available already.
    pub is_behind: bool,
}

/// How a lane ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The stream has ended with it.
    WithStream,
    /// The stream continues on TCP, and the receiver has read this many bytes of the lane.
    ForTcp(u64),
}

/// The state of a captured lane.
#[derive(Debug)]
pub struct Lane {
    header: usize,
    ring: usize,
    size: u64,
    spill: u64,
    passed: Passed,
    ended: Option<Ended>,
    /// The lane held impossible values. It is not read any more.
    is_spoiled: bool,
}

impl Lane {
    /// Creates the state for the lane that `sender` writes for the connection `conn` of a link.
    pub fn new(geometry: Geometry, conn: usize, sender: Side) -> Lane {
        Lane {
            header: geometry.lane_offset(conn, sender),
            ring: geometry.ring_offset(conn, sender),
            size: geometry.ring_bytes() as u64,
            spill: geometry.spill_bytes() as u64,
            passed: Passed::default(),
            ended: None,
            is_spoiled: false,
        }
    }

    /// Skips the bytes that have been sent already.
    pub fn skip(&mut self, memory: &impl Memory) {
        if let Some(tail) = self.word(memory, LANE_TAIL_OFFSET) {
            self.passed.seen = tail & LANE_CURSOR;
        }
    }

    /// Returns the number of bytes that were copied or missed.
    pub fn seen(&self) -> u64 {
        self.passed.seen
    }

    /// Returns how many calls of [`Lane::look`] copy everything that a lane can hold.
    pub fn looks_to_end(&self) -> u64 {
        Window::looks_for(self.size)
    }

    /// Returns the offset in the stream at which the lane begins, once it has begun.
    pub fn beginning(&self, memory: &impl Memory) -> Option<u64> {
        self.word(memory, LANE_START_OFFSET)?.checked_sub(1)
    }

    /// Returns how the lane ended, after all its bytes have been seen.
    pub fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// Returns `true` if the lane held impossible values.
    pub fn is_spoiled(&self) -> bool {
        self.is_spoiled
    }

    /// Returns `true` if there are new bytes or the lane has ended.
    pub fn has_moved(&self, memory: &impl Memory) -> bool {
        let tail = self.word(memory, LANE_TAIL_OFFSET);
        !self.is_spoiled
            && self.ended.is_none()
            && (tail.is_some_and(|tail| tail & !LANE_SPILLED != self.passed.seen) || self.is_shut(memory))
    }

    /// Returns the sender's cursor, as a limit for [`Lane::look`].
    pub fn published(&self, memory: &impl Memory) -> u64 {
        self.word(memory, LANE_TAIL_OFFSET).unwrap_or(0) & LANE_CURSOR
    }

    /// Copies the bytes since the last call into `bytes`, replacing its content. Bytes from `limit`
    /// on are left for the next call.
    pub fn look(&mut self, memory: &impl Memory, limit: u64, bytes: &mut Vec<u8>) -> Look {
        bytes.clear();
        if self.is_spoiled || self.ended.is_some() {
            return Look::default();
        }
        let Some(look) = self.try_look(memory, limit, bytes) else {
            bytes.clear();
            self.is_spoiled = true;
            return Look::default();
        };
        look
    }

    /// Does the work of [`Lane::look`]. Returns `None` if the words are impossible.
    fn try_look(&mut self, memory: &impl Memory, limit: u64, bytes: &mut Vec<u8>) -> Option<Look> {
        // Load this before the cursor: a sender publishes all bytes before it shuts the direction
        // down.
        let is_shut = self.is_shut(memory);
        let word = self.word(memory, LANE_TAIL_OFFSET)?;
        if word & LANE_SPILLED != 0 {
            return self.miss(memory, word, is_shut);
        }
        let cursors = self.cursors(memory, word)?;
        let Some(window) = cursors.window(self.passed, limit, self.size).ok()? else {
            return Some(Look::default());
        };
        let range = window.range();
        if !self.copy(memory, cursors.base, range.clone(), bytes) {
            return None;
        }
        fence(Acquire);
        let after = self.cursors(memory, self.word(memory, LANE_TAIL_OFFSET)?)?;
        if after.tail < cursors.later_tail || after.head < cursors.head {
            return None;
        }
        let valid = match after.base == cursors.base {
            true => after.kept_from(self.size).clamp(range.start, range.end),
            // The sender has started over in the meantime, and may have overwritten anything.
            false => range.end,
        };
        bytes.drain(..(valid - range.start) as usize);
        let missed = valid - self.passed.seen;
        self.passed = Passed { seen: range.end, head: after.head };
        if range.end == cursors.tail {
            self.note_end(memory, word, is_shut)?;
        }
        Some(Look { missed, is_behind: window.is_behind() })
    }

    /// Counts the unread bytes as missed, since some lie in the spill, which a capture does not
    /// copy. No sender begins to use a spill once it is followed.
    fn miss(&mut self, memory: &impl Memory, word: u64, is_shut: bool) -> Option<Look> {
        let tail = word & LANE_CURSOR;
        let head = self.word(memory, LANE_HEAD_OFFSET)? & LANE_CURSOR;
        let missed = tail.checked_sub(self.passed.seen)?;
        // As in `Cursors::window`, of both parts.
        if head < self.passed.head || tail > head.saturating_add(self.size + self.spill) {
            return None;
        }
        self.passed = Passed { seen: tail, head };
        self.note_end(memory, word, is_shut)?;
        Some(Look { missed, is_behind: false })
    }

    /// Loads the cursors after `tail`, in the order that [`Cursors`] needs.
    fn cursors(&self, memory: &impl Memory, tail: u64) -> Option<Cursors> {
        Some(Cursors {
            tail: tail & LANE_CURSOR,
            base: self.word(memory, LANE_BASE_OFFSET)?,
            head: self.word(memory, LANE_HEAD_OFFSET)? & LANE_CURSOR,
            later_tail: self.word(memory, LANE_TAIL_OFFSET)? & LANE_CURSOR,
        })
    }

    /// Copies a range of the lane that lies in a window.
    fn copy(&self, memory: &impl Memory, base: u64, range: Range<u64>, bytes: &mut Vec<u8>) -> bool {
        let count = range.end - range.start;
        bytes.resize(count as usize, 0);
        if count == 0 {
            return true;
        }
        let at = (range.start - base) & (self.size - 1);
        let (first, second) = bytes.split_at_mut(count.min(self.size - at) as usize);
        memory.read(self.ring + at as usize, first) && memory.read(self.ring, second)
    }

    fn note_end(&mut self, memory: &impl Memory, tail: u64, is_shut: bool) -> Option<()> {
        if tail & LANE_RETURNED != 0 {
            let head = self.word(memory, LANE_HEAD_OFFSET)? & LANE_CURSOR;
            self.ended = Some(Ended::ForTcp(head.min(self.passed.seen)));
        } else if is_shut {
            self.ended = Some(Ended::WithStream);
        } else if tail & LANE_CLOSED != 0 {
            self.ended = Some(Ended::ForTcp(self.passed.seen));
        }
        Some(())
    }

    /// Returns `true` if the sender has ended the stream by shutdown or close.
    fn is_shut(&self, memory: &impl Memory) -> bool {
        let end = self.word(memory, LANE_END_OFFSET);
        end.is_some_and(|end| end & (LANE_END_SHUT_DOWN | LANE_END_CLOSED) != 0)
    }

    fn word(&self, memory: &impl Memory, at: usize) -> Option<u64> {
        memory.word(self.header + at)
    }
}
