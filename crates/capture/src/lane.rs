//! One direction of a connection, read along without a word to either end.
//!
//! The two ends go on as if nobody looked, so bytes may be overwritten before they were copied, or while they are. What is copied counts
//! only if nothing can have come over it, by the cursors as they stand afterwards; else it has been missed, and is counted. The words
//! may be anything: programs write them.

use std::ops::Range;
use std::sync::atomic::{Ordering::Acquire, fence};

use shunt_abi::geometry::{
    Geometry, LANE_BASE_OFFSET, LANE_CLOSED, LANE_CURSOR, LANE_END_CLOSED, LANE_END_OFFSET,
    LANE_END_SHUT_DOWN, LANE_HEAD_OFFSET, LANE_RETURNED, LANE_START_OFFSET, LANE_TAIL_OFFSET, Side,
};
use shunt_sys::view::View;

use crate::window::{Cursors, Passed, Window};

/// The memory of a link, which others write.
pub trait Memory {
    /// The word at `offset`, if there is one.
    fn word(&self, offset: usize) -> Option<u64>;
    /// Copies what is at `offset`. `false` if there is not so much.
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

/// What a look has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Bytes that have been missed, which come before those that were copied.
    pub missed: u64,
    /// There may be more already.
    pub is_behind: bool,
}

/// How a lane has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// So has the stream.
    WithStream,
    /// The stream goes on in TCP, and so much of the lane was received.
    ForTcp(u64),
}

/// See the module.
#[derive(Debug)]
pub struct Lane {
    header: usize,
    ring: usize,
    size: u64,
    passed: Passed,
    ended: Option<Ended>,
    /// It has said what cannot be. Nothing of it is looked at any more.
    is_spoiled: bool,
}

impl Lane {
    /// The lane that `sender` writes for a connection, which must be one of a link's.
    pub fn new(geometry: Geometry, conn: usize, sender: Side) -> Lane {
        Lane {
            header: geometry.lane_offset(conn, sender),
            ring: geometry.ring_offset(conn, sender),
            size: geometry.ring_bytes() as u64,
            passed: Passed::default(),
            ended: None,
            is_spoiled: false,
        }
    }

    /// Leaves alone what has passed already.
    pub fn skip(&mut self, memory: &impl Memory) {
        if let Some(tail) = self.word(memory, LANE_TAIL_OFFSET) {
            self.passed.seen = tail & LANE_CURSOR;
        }
    }

    /// Bytes that have passed, as far as has been looked.
    pub fn seen(&self) -> u64 {
        self.passed.seen
    }

    /// Returns how many looks copy all that a lane can hold: as many as one needs that has ended.
    pub fn looks_to_end(&self) -> u64 {
        Window::looks_for(self.size)
    }

    /// Where in the stream the lane begins, once it has.
    pub fn beginning(&self, memory: &impl Memory) -> Option<u64> {
        self.word(memory, LANE_START_OFFSET)?.checked_sub(1)
    }

    /// How it has ended, once all has been seen.
    pub fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// Whether it has said what cannot be.
    pub fn is_spoiled(&self) -> bool {
        self.is_spoiled
    }

    /// Whether there is something to look at.
    pub fn has_moved(&self, memory: &impl Memory) -> bool {
        let tail = self.word(memory, LANE_TAIL_OFFSET);
        !self.is_spoiled
            && self.ended.is_none()
            && (tail.is_some_and(|tail| tail != self.passed.seen) || self.is_shut(memory))
    }

    /// How far the sender is now: see [`Lane::look`].
    pub fn published(&self, memory: &impl Memory) -> u64 {
        self.word(memory, LANE_TAIL_OFFSET).unwrap_or(0) & LANE_CURSOR
    }

    /// Copies what has come since the last look into `bytes`, in place of what is there, but nothing from `limit` on.
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

    /// Nothing: the words cannot be.
    fn try_look(&mut self, memory: &impl Memory, limit: u64, bytes: &mut Vec<u8>) -> Option<Look> {
        // Before the cursor: who has shut the direction down has published all.
        let is_shut = self.is_shut(memory);
        let word = self.word(memory, LANE_TAIL_OFFSET)?;
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
            // It has begun anew meanwhile, over anything.
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

    /// Loads the cursors, in the order that [`Cursors`] needs, behind a tail that has been.
    fn cursors(&self, memory: &impl Memory, tail: u64) -> Option<Cursors> {
        Some(Cursors {
            tail: tail & LANE_CURSOR,
            base: self.word(memory, LANE_BASE_OFFSET)?,
            head: self.word(memory, LANE_HEAD_OFFSET)? & LANE_CURSOR,
            later_tail: self.word(memory, LANE_TAIL_OFFSET)? & LANE_CURSOR,
        })
    }

    /// Copies bytes of the lane, which are a window's.
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

    /// Whether the sender has ended the stream by a call.
    fn is_shut(&self, memory: &impl Memory) -> bool {
        let end = self.word(memory, LANE_END_OFFSET);
        end.is_some_and(|end| end & (LANE_END_SHUT_DOWN | LANE_END_CLOSED) != 0)
    }

    fn word(&self, memory: &impl Memory, at: usize) -> Option<u64> {
        memory.word(self.header + at)
    }
}
