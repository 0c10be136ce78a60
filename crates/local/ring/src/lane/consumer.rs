//! The receiver's end of a lane.

use super::{
    BLOCK, CLOSED, FLAGS, LaneHeader, Misbehaved, PIECE, ReadError, SPILLED, TAKEN, WHOLE, read_blocks,
};
use crate::bytes::{Ring, SPILL};
use crate::copy::{self, Sampler};
use crate::sync::{Ordering::*, full_fence_after_rmw};
use crate::user::Sink;

/// The receiver's end of a lane.
#[derive(Debug, Default)]
pub struct Consumer {
    head: u64,
    tail: u64,
    /// How many bytes before the cursor were read by others, or reclaimed by the sender.
    gone: u64,
    ended: bool,
    /// The first byte in the spill, if the spill was in use at the last load of `tail`.
    spilled_at: Option<u64>,
    /// Whether the lane has ended or spilled.
    is_slow: bool,
    copies: Sampler,
}

impl Consumer {
    /// Returns a consumer of an unused lane.
    pub fn new() -> Consumer {
        Consumer::default()
    }

    /// Returns the number of bytes read so far.
    pub fn consumed(&self) -> u64 {
        self.head - self.gone
    }

    /// Returns the number of bytes read so far from a lane that has not ended, where `gone` is 0.
    #[inline(always)]
    pub fn cursor(&self) -> u64 {
        self.head
    }

    /// Returns the number of bytes to read that are known without a load of the sender's cursor.
    #[inline]
    pub fn known(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Returns the number of bytes to read.
    #[inline]
    pub fn available(&mut self, lane: &LaneHeader, ring: &impl Ring) -> Result<usize, Misbehaved> {
        self.look_at_tail(lane, ring)?;
        if self.ended {
            // A fork ends every lane, and either process may drain it. Bytes that the other has
            // read or returned are gone.
            let head = lane.head.head.load(Acquire);
            if lane.is_returned() {
                self.give_up(head)?;
            } else {
                self.follow(head)?;
            }
        }
        Ok((self.tail - self.head) as usize)
    }

    /// Returns the number of bytes to read from a lane that has not ended or spilled. Returns
    /// `None` if [`available`](Self::available) must handle the case.
    #[inline(always)]
    pub fn available_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring) -> Option<usize> {
        let known = self.known_at_once(lane)?;
        // With a flag set, `known` would be larger than any ring.
        if known > ring.len() as u64 {
            return None;
        }
        self.tail = self.head + known;
        Some(known as usize)
    }

    /// Returns the distance from this cursor to the sender's. L5: the caller checks that it fits
    /// the ring.
    #[inline(always)]
    fn known_at_once(&self, lane: &LaneHeader) -> Option<u64> {
        let tail = lane.tail.load(Acquire);
        (!self.is_slow && tail >= self.tail).then(|| tail.wrapping_sub(self.head))
    }

    #[inline]
    fn look_at_tail(&mut self, lane: &LaneHeader, ring: &impl Ring) -> Result<(), Misbehaved> {
        if !self.ended {
            let word = lane.tail.load(Acquire);
            let tail = word & !FLAGS;
            if word & SPILLED != 0 {
                self.look_at_spill(lane, ring, tail)?;
            } else {
                // L5: the sender's cursor only moves forward, and never further than the ring is
                // long.
                if tail < self.tail || tail - self.head > ring.len() as u64 {
                    return Err(Misbehaved);
                }
                self.spilled_at = None;
            }
            self.tail = tail;
            self.ended = word & CLOSED != 0;
            self.is_slow = self.ended || self.spilled_at.is_some();
        }
        Ok(())
    }

    /// Handles a tail that reports bytes in the spill. The sender leaves the spill only when the
    /// lane is empty, so the border of this tail is valid as long as there are bytes.
    #[cold]
    fn look_at_spill(&mut self, lane: &LaneHeader, ring: &impl Ring, tail: u64) -> Result<(), Misbehaved> {
        let at = lane.sender.spilled_at.load(Relaxed);
        // L5: as for the ring alone; in addition, neither part contains more bytes than fit there.
        let in_ring = at.saturating_sub(self.head);
        let in_spill = tail.wrapping_sub(at.max(self.head));
        let fits = in_ring <= ring.len() as u64 && in_spill <= ring.spill_len() as u64;
        if tail < self.tail || tail > self.head && !fits || ring.spill_len() == 0 {
            return Err(Misbehaved);
        }
        self.spilled_at = Some(at);
        Ok(())
    }

    /// Returns how many of the next bytes are in the same part of the lane.
    #[inline]
    fn to_border(&self) -> usize {
        let border = self.spilled_at.filter(|at| *at > self.head);
        border.map_or(usize::MAX, |at| (at - self.head) as usize)
    }

    /// Returns the number of bytes to read. Does not load the sender's cursor if `enough` are known
    /// already, so that the cache line of the cursor stays with the sender.
    #[inline]
    fn known_or_available(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        enough: usize,
    ) -> Result<usize, Misbehaved> {
        let known = self.known();
        // Another process may read a lane that has ended.
        if known >= enough && lane.receiver.over.load(Relaxed) == 0 {
            return Ok(known);
        }
        self.available(lane, ring)
    }

    /// Returns whether the lane has ended and everything in it has been read. The receiver calls
    /// this after [`available`](Self::available).
    #[inline]
    pub fn is_finished(&self) -> bool {
        self.ended && self.head == self.tail
    }

    /// Reads the available bytes into `sink` and returns their number.
    #[inline]
    pub fn read(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
    ) -> Result<usize, ReadError> {
        read_blocks(sink, |sink| self.read_block(lane, ring, sink))
    }

    #[inline]
    fn read_block(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
    ) -> Result<usize, ReadError> {
        // After each lost race, try half as many bytes, so that this reader succeeds even while
        // another process reads byte after byte.
        let mut most = BLOCK;
        loop {
            let known = self.known_or_available(lane, ring, sink.remaining())?;
            let count = known.min(sink.remaining()).min(most).min(self.to_border());
            let read = match count {
                0 => return Ok(0),
                1..=WHOLE => self.read_piece(lane, ring, sink, count)?,
                _ => self.read_in_pieces(lane, ring, sink, count)?,
            };
            if read > 0 {
                return Ok(read);
            }
            most = (count / 2).max(1);
        }
    }

    #[inline(never)]
    fn read_in_pieces(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
        count: usize,
    ) -> Result<usize, ReadError> {
        if !sink.reaches(count) {
            return Err(ReadError::Fault);
        }
        let mut done = 0;
        while done < count {
            match self.read_piece(lane, ring, sink, PIECE.min(count - done)) {
                Ok(0) => break,
                Ok(piece) => done += piece,
                Err(_) if done > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }

    /// Reads `count` available bytes (at least one) in one step. Returns 0 if another process has
    /// read meanwhile.
    #[inline(always)]
    fn read_piece(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
        count: usize,
    ) -> Result<usize, ReadError> {
        let mut ahead = *sink;
        let begun = self.copies.is_due(self.head, count).then(copy::ticks);
        ring.drain(self.position(lane)?, count, &mut ahead)?;
        if let Some(begun) = begun {
            self.note_copy(lane, count, begun);
        }
        if !self.advance(lane, ring, count)? {
            return Ok(0);
        }
        *sink = ahead;
        Ok(count)
    }

    /// Reports a copy that has been timed. The sender loads the report now and then.
    #[cold]
    fn note_copy(&mut self, lane: &LaneHeader, count: usize, begun: u64) {
        let ticks = copy::ticks().wrapping_sub(begun);
        lane.head.copied.store(self.copies.report(self.head, count, ticks), Relaxed);
    }

    /// Returns whether a caller of [`look_at_once`](Self::look_at_once) should copy so many bytes by
    /// [`read`](Self::read) instead: in pieces, or because the copy is to be timed.
    #[inline(always)]
    pub fn is_for_read(&self, count: usize) -> bool {
        count > WHOLE || self.copies.is_due(self.head, count)
    }

    /// Returns how many of the next `wanted` bytes a lane that has not ended contains. Does not
    /// load the sender's cursor if `wanted` bytes are known.
    ///
    /// The caller copies them from their [place](Self::place), and then [takes](Self::take) them.
    /// Returns `None` if there are none, or if [`read`](Self::read) must handle the case.
    #[inline(always)]
    pub fn look_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring, wanted: usize) -> Option<usize> {
        if self.known() >= wanted {
            // Another process may read a lane that has ended.
            let is_open = !self.is_slow && lane.receiver.over.load(Relaxed) == 0;
            return (is_open && wanted > 0).then_some(wanted);
        }
        let known = self.known_at_once(lane)?;
        // As in `available_at_once`; the subtraction also rejects 0.
        if known.wrapping_sub(1) > ring.mask() as u64 {
            return None;
        }
        self.tail = self.head + known;
        Some(wanted.min(known as usize))
    }

    /// Moves the cursor past `count` bytes that have been copied, so that they are this reader's.
    /// Returns `Err` with the cursor's value if another process has moved it.
    #[inline(always)]
    pub fn take(&mut self, lane: &LaneHeader, count: usize) -> Result<(), u64> {
        let next = self.head + count as u64;
        // The load has acquire order and a fence follows, because `tx_wants` is loaded next and the
        // sender does the reverse.
        lane.head.head.compare_exchange(self.head, next, AcqRel, Acquire)?;
        full_fence_after_rmw();
        self.head = next;
        Ok(())
    }

    /// Copies without reading, from `skip` bytes after the cursor.
    pub fn peek(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
    ) -> Result<usize, ReadError> {
        self.available(lane, ring)?;
        self.peek_known(lane, ring, sink)
    }

    /// Copies the bytes that are [`known`](Self::known) without reading them. The cache line of the
    /// sender's cursor stays with the sender.
    #[inline]
    pub fn peek_known(
        &self,
        lane: &LaneHeader,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
    ) -> Result<usize, ReadError> {
        let count = self.known().min(sink.remaining());
        let first = count.min(self.to_border());
        if count > 0 {
            ring.drain(self.position(lane)?, first, sink)?;
        }
        if count > first {
            ring.drain(SPILL, count - first, sink)?;
        }
        Ok(count)
    }

    /// Discards `count` bytes, no more than are available.
    pub fn discard(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        count: usize,
    ) -> Result<usize, Misbehaved> {
        loop {
            let count = self.available(lane, ring)?.min(count);
            if count == 0 || self.advance(lane, ring, count)? {
                return Ok(count);
            }
        }
    }

    /// Returns the position of the next byte in the ring. Called when there is one: the load of the
    /// tail with acquire made the base visible.
    #[inline]
    fn position(&self, lane: &LaneHeader) -> Result<u64, Misbehaved> {
        if let Some(at) = self.spilled_at
            && at <= self.head
        {
            return Ok(SPILL + (self.head - at));
        }
        // L5: the base was the tail of an empty lane, so no byte before it is unread.
        self.head.checked_sub(lane.sender.base.load(Relaxed)).ok_or(Misbehaved)
    }

    /// Returns the position of the next byte in a ring, where every position is valid. A sender
    /// that lies only changes which of its own bytes are read.
    #[inline(always)]
    pub fn place(&self, lane: &LaneHeader) -> u64 {
        self.head.wrapping_sub(lane.sender.base.load(Relaxed))
    }

    /// Moves the cursor past `count` bytes, so that they are this reader's. Returns `false` if
    /// another process has moved it; the cursor is then where that process put it.
    #[inline]
    fn advance(&mut self, lane: &LaneHeader, ring: &impl Ring, count: usize) -> Result<bool, Misbehaved> {
        match self.take(lane, count) {
            Ok(()) => Ok(true),
            Err(found) => self.fall_behind(lane, ring, found).map(|()| false),
        }
    }

    /// Handles a cursor that another process has moved. L5: only the cursor of an ended lane may
    /// move so, and its end is final. Each time leaves fewer bytes, so this reader finishes after
    /// at most as many times as the ring has bytes.
    #[cold]
    fn fall_behind(&mut self, lane: &LaneHeader, ring: &impl Ring, found: u64) -> Result<(), Misbehaved> {
        self.look_at_tail(lane, ring)?;
        if self.ended { self.follow(found) } else { Err(Misbehaved) }
    }

    /// Takes over a cursor that another process has moved, or gives up if the sender has reclaimed
    /// the rest.
    #[cold]
    fn follow(&mut self, found: u64) -> Result<(), Misbehaved> {
        if found & TAKEN != 0 {
            return self.give_up(found);
        }
        // L5: the cursor only moves forward, and never past the published bytes.
        if !(self.head..=self.tail).contains(&found) {
            return Err(Misbehaved);
        }
        self.head = found;
        Ok(())
    }

    /// Marks all bytes from `found` on as gone: the sender has reclaimed them.
    #[cold]
    fn give_up(&mut self, found: u64) -> Result<(), Misbehaved> {
        let read = found & !TAKEN;
        // L5: as in `follow`.
        if !(self.consumed()..=self.tail).contains(&read) {
            return Err(Misbehaved);
        }
        self.gone = self.tail - read;
        self.head = self.tail;
        Ok(())
    }
}
