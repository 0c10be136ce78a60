//! The sender's end of a lane.

use std::ops::Range;

use super::{
    BLOCK, CLOSED, FLAGS, LEFT, LaneHeader, Misbehaved, PAGE, PIECE, Published, RETURNED, SPILLED, Spill,
    TAKEN, WHOLE,
};
use crate::bytes::{Ring, SPILL};
use crate::copy::{self, Chooser, Method};
use crate::sync::{Ordering::*, full_fence_after_rmw};
use crate::user::Source;

/// The sender's end of a lane.
#[derive(Debug, Default)]
pub struct Producer {
    tail: u64,
    head: u64,
    base: u64,
    /// How far the tail may move [on the fast path](Producer::place_at_once): to the end of the
    /// page that is being written, and not past the last known cursor of the receiver. 0 while the
    /// lane is spilled.
    until: u64,
    spill: Option<Spilled>,
    copies: Chooser,
}

/// The sender's state of a lane that is spilled.
#[derive(Clone, Copy, Debug)]
struct Spilled {
    /// The value of `tail` at the first byte in the spill.
    at: u64,
    /// Whether `tail` has the flag [`SPILLED`].
    is_said: bool,
    /// Whether the sender adds nothing until the lane is empty.
    is_held: bool,
}

impl Producer {
    /// Returns a producer of an unused lane.
    pub fn new() -> Producer {
        Producer::default()
    }

    /// Returns the number of bytes published so far.
    pub fn published(&self) -> u64 {
        self.tail
    }

    /// Returns the position in the ring at which the next byte goes.
    pub fn position(&self) -> u64 {
        match self.spill {
            None => self.tail - self.base,
            Some(spill) => SPILL + (self.tail - spill.at),
        }
    }

    /// Sends the following bytes to the spill, until the lane is empty. Returns `false` if there is
    /// no spill, or if bytes must stay in the ring because a capture reads the lane.
    pub fn spill(&mut self, lane: &LaneHeader, ring: &impl Ring) -> bool {
        match &mut self.spill {
            Some(spill) => spill.is_held = false,
            None if ring.spill_len() == 0 || lane.is_followed() => return false,
            None => {
                self.spill = Some(Spilled { at: self.tail, is_said: false, is_held: false });
                self.until = 0;
            }
        }
        true
    }

    /// Adds nothing to the spill until the lane is empty, or it is [spilled](Self::spill) again.
    pub fn hold_spill(&mut self) {
        if let Some(spill) = &mut self.spill {
            spill.is_held = true;
        }
    }

    /// Returns the state of the spill of a full lane.
    pub fn spill_of(&self, lane: &LaneHeader, ring: &impl Ring) -> Spill {
        match self.spill {
            None if ring.spill_len() == 0 || lane.is_followed() => Spill::None,
            None => Spill::Closed,
            Some(spill) => {
                let has_room = self.tail - self.head.max(spill.at) < ring.spill_len() as u64;
                if spill.is_held && has_room { Spill::Closed } else { Spill::Full }
            }
        }
    }

    /// Publishes as much of `source` as fits, at most a block. Whatever the outcome, `source`
    /// advances by exactly the bytes that were published.
    #[inline]
    pub fn write(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        source: &mut Source<'_>,
    ) -> Result<Published, Misbehaved> {
        let wanted = source.remaining().min(BLOCK);
        let room = self.room(lane, ring, wanted)?;
        if room == 0 {
            return if lane.is_closed() { self.commit(lane, 0) } else { Ok(Published::Full) };
        }
        let count = wanted.min(room);
        if let Err(reason) = ring.back(self.position(), count) {
            return Ok(Published::NoMemory(reason));
        }
        let published = match count {
            ..=WHOLE => self.write_piece(lane, ring, source, count),
            _ => self.write_in_pieces(lane, ring, source, count),
        };
        self.see_how_far(ring.len() as u64);
        published
    }

    /// Updates `until` after a write. The page of the last byte is the one that is being written,
    /// and memory backs it.
    fn see_how_far(&mut self, size: u64) {
        if self.spill.is_some() {
            return;
        }
        // Both operands are powers of two.
        let end = (self.tail - self.base).next_multiple_of(PAGE.min(size));
        self.until = (self.base + end).min(self.head + size);
    }

    #[inline(never)]
    fn write_in_pieces(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        source: &mut Source<'_>,
        count: usize,
    ) -> Result<Published, Misbehaved> {
        if !source.reaches(count) {
            return Ok(Published::Fault);
        }
        let mut done = 0;
        while done < count {
            match self.write_piece(lane, ring, source, PIECE.min(count - done))? {
                Published::Bytes(piece) => done += piece,
                // Another thread has unmapped the memory meanwhile.
                Published::Fault if done > 0 => break,
                ended => return Ok(ended),
            }
        }
        Ok(Published::Bytes(done))
    }

    /// Publishes `count` bytes in one step. The ring has room for them.
    #[inline(always)]
    fn write_piece(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        source: &mut Source<'_>,
        count: usize,
    ) -> Result<Published, Misbehaved> {
        let mut ahead = *source;
        let begun = self.copies.is_due(self.tail, count).then(copy::ticks);
        if ring.fill(self.position(), count, &mut ahead, self.copies.method(count)).is_err() {
            return Ok(Published::Fault);
        }
        if let Some(begun) = begun {
            self.note_copy(lane, ring, count, begun);
        }
        let published = self.commit(lane, count)?;
        if let Published::Bytes(_) = published {
            *source = ahead;
        }
        Ok(published)
    }

    /// Returns the method by which the caller of [`place_at_once`](Self::place_at_once) copies
    /// `count` bytes. Returns `None` if [`write`](Self::write) must time the copy.
    #[inline(always)]
    pub fn method_at_once(&self, count: usize) -> Option<Method> {
        (!self.copies.is_due(self.tail, count)).then(|| self.copies.method(count))
    }

    /// Records a copy that has been timed.
    #[cold]
    fn note_copy(&mut self, lane: &LaneHeader, ring: &impl Ring, count: usize, begun: u64) {
        let ticks = copy::ticks().wrapping_sub(begun);
        self.copies.note(self.tail, count, ticks, lane.head.copied.load(Relaxed), ring.len());
    }

    /// Publishes `count` bytes that are already in the ring behind the tail, unless the lane has
    /// ended.
    ///
    /// [`write`](Producer::write) calls this; a caller that had the kernel fill the ring calls it
    /// too.
    #[inline(always)]
    pub fn commit(&mut self, lane: &LaneHeader, count: usize) -> Result<Published, Misbehaved> {
        let outcome = match self.spill {
            None => self.publish(lane, count),
            Some(spill) => self.publish_spilled(lane, count, spill),
        };
        match outcome {
            Ok(()) => Ok(Published::Bytes(count)),
            Err(found) => self.end(lane, found),
        }
    }

    #[cold]
    fn publish_spilled(&mut self, lane: &LaneHeader, count: usize, spill: Spilled) -> Result<(), u64> {
        let before = if spill.is_said { SPILLED } else { 0 };
        let tail = self.tail + count as u64;
        lane.sender.spilled_at.store(spill.at, Relaxed);
        lane.tail.compare_exchange(self.tail | before, tail | SPILLED, AcqRel, Acquire)?;
        full_fence_after_rmw();
        self.tail = tail;
        self.spill = Some(Spilled { is_said: true, ..spill });
        Ok(())
    }

    /// Publishes `count` bytes of a lane that has not ended and is not spilled. Returns `Err` with
    /// the value of `tail` if it has; then nothing has happened, and [`commit`](Self::commit)
    /// handles the case.
    #[inline(always)]
    pub fn publish(&mut self, lane: &LaneHeader, count: usize) -> Result<(), u64> {
        let tail = self.tail + count as u64;
        lane.tail.compare_exchange(self.tail, tail, AcqRel, Acquire)?;
        // The waiter words are loaded after this fence: see *Sleeping and waking*.
        full_fence_after_rmw();
        self.tail = tail;
        Ok(())
    }

    /// Handles a lane that has ended. Whichever side ended it, the receiver may return bytes until
    /// the sender continues on TCP.
    #[cold]
    fn end(&mut self, lane: &LaneHeader, found: u64) -> Result<Published, Misbehaved> {
        if found & !FLAGS != self.tail || found & CLOSED == 0 {
            return Err(Misbehaved);
        }
        if found & RETURNED == 0 {
            return Ok(Published::Closed);
        }
        lane.tail.fetch_or(LEFT, AcqRel);
        lane.head.head.fetch_or(TAKEN, AcqRel);
        self.refresh(lane)?;
        Ok(Published::Returned)
    }

    /// Returns the room in the ring. Loads the receiver's cursor only if `wanted` bytes do not fit
    /// otherwise, or not on this page.
    #[inline]
    pub fn room(&mut self, lane: &LaneHeader, ring: &impl Ring, wanted: usize) -> Result<usize, Misbehaved> {
        if let Some(spill) = self.spill {
            return self.room_in_spill(lane, ring, spill);
        }
        let size = ring.len() as u64;
        if self.leaves_page(size, wanted as u64) || size - (self.tail - self.head) < wanted as u64 {
            self.refresh(lane)?;
            self.goes_to_first_page(lane);
        }
        Ok((size - (self.tail - self.head)) as usize)
    }

    #[cold]
    fn room_in_spill(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        spill: Spilled,
    ) -> Result<usize, Misbehaved> {
        self.refresh(lane)?;
        if self.head == self.tail {
            self.leave_spill(lane, spill);
            return Ok(ring.len());
        }
        let size = if spill.is_held { 0 } else { ring.spill_len() as u64 };
        Ok(size.saturating_sub(self.tail - self.head.max(spill.at)) as usize)
    }

    /// Leaves the spill; the lane is empty. As in [`goes_to_first_page`](Self::goes_to_first_page),
    /// the receiver loads the position of bytes only when it sees some.
    fn leave_spill(&mut self, lane: &LaneHeader, spill: Spilled) {
        self.spill = None;
        self.base = self.tail;
        self.until = self.tail;
        lane.sender.base.store(self.base, Relaxed);
        if spill.is_said {
            lane.tail.fetch_and(!SPILLED, AcqRel);
        }
    }

    /// Returns the position for `wanted` bytes that fit on one page, with memory behind it. The
    /// caller [publishes](Self::publish) them there.
    ///
    /// Loads the receiver's cursor only if they do not fit on the current page. Then it returns a
    /// position only if the lane is empty.
    #[inline(always)]
    pub fn place_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring, wanted: usize) -> Option<u64> {
        let place = self.place_on_page(wanted);
        let turns = |this: &mut Self| this.turns_page(lane, ring.len() as u64, wanted as u64);
        place.or_else(|| turns(self).then(|| self.tail - self.base))
    }

    /// Returns the position for `wanted` bytes if they fit on the page that is being written.
    #[inline(always)]
    pub fn place_on_page(&self, wanted: usize) -> Option<u64> {
        (self.tail + wanted as u64 <= self.until).then(|| self.tail - self.base)
    }

    /// Returns to the first page, which has been written before, if [`room`](Self::room) would do
    /// so for `wanted` bytes.
    #[inline(never)]
    fn turns_page(&mut self, lane: &LaneHeader, size: u64, wanted: u64) -> bool {
        let turns = self.spill.is_none()
            && self.leaves_page(size, wanted)
            && self.refresh(lane).is_ok()
            && self.goes_to_first_page(lane)
            && wanted <= PAGE.min(size);
        if turns {
            self.until = self.base + PAGE.min(size);
        }
        turns
    }

    /// Returns to the first page if the lane is empty. The receiver loads the base only when it
    /// sees bytes to read, and the base does not move while there are any.
    #[inline]
    fn goes_to_first_page(&mut self, lane: &LaneHeader) -> bool {
        let goes = self.head == self.tail && self.tail > self.base && !lane.is_followed();
        if goes {
            self.base = self.tail;
            self.until = self.tail;
            lane.sender.base.store(self.base, Relaxed);
        }
        goes
    }

    /// Returns whether `wanted` bytes would end behind the page that is being written, if there is
    /// such a page.
    #[inline]
    fn leaves_page(&self, size: u64, wanted: u64) -> bool {
        // Both operands are powers of two.
        let (at, page) = (self.tail - self.base, PAGE.min(size));
        at > 0 && ((at - 1) & (page - 1)) + 1 + wanted > page
    }

    /// Returns the number of bytes that the receiver has not read.
    pub fn unread(&mut self, lane: &LaneHeader) -> Result<u64, Misbehaved> {
        self.refresh(lane)?;
        Ok(self.tail - self.head)
    }

    /// Returns the positions of the bytes that the receiver returned, first those in the ring and
    /// then those in the spill. Valid after [`Published::Returned`].
    pub fn unread_ranges(&self) -> [Range<u64>; 2] {
        let border = self.spill.map_or(self.tail, |spill| spill.at);
        let in_ring = self.head.min(border) - self.base..border - self.base;
        let in_spill = SPILL + (self.head.max(border) - border)..SPILL + (self.tail - border);
        [in_ring, in_spill]
    }

    fn refresh(&mut self, lane: &LaneHeader) -> Result<(), Misbehaved> {
        let head = lane.head.head.load(Acquire) & !TAKEN;
        // L5: the receiver's cursor only moves forward, and never past the published bytes.
        if head < self.head || head > self.tail {
            return Err(Misbehaved);
        }
        self.head = head;
        Ok(())
    }
}
