//! One direction of one connection: a byte ring with a beginning and an end in the stream.
//!
//! The sender's end is a [`Producer`], the receiver's a [`Consumer`]. Each keeps its own cursor privately and
//! copies the other's from shared memory, checked on every load (L5). Either may end the lane: see
//! *Switch back* in `docs/local-path.md`.
//!
//! A lane may have a *spill*, a second ring, for a sender whose receiver reads nothing for a while:
//!
//! ```text
//!                         spilled_at
//!            head             |               tail
//!   stream: ..|###############|################|
//!             `---- ring -----'---- spill -----'
//! ```
//!
//! Bytes from `spilled_at` on are in the spill, which is a ring as well. The flag [`SPILLED`] of
//! `tail` says so; with it the receiver's fast paths find nothing. The sender leaves the spill when
//! the lane is empty, so at any time at most one border lies among the unread bytes. Example: the
//! ring holds 256 KiB, and the sender writes 300,000 bytes. The ring takes 262,144. After a while
//! the sender [spills](Producer::spill): `spilled_at` is 262,144, and the rest goes to the
//! beginning of the spill. Once the receiver has read all, the next byte goes to the beginning of
//! the ring again.

use std::ops::Range;

use shunt_abi::reason::Reason;

use crate::bytes::{Ring, SPILL};
use crate::sync::{AtomicU32, AtomicU64, Ordering::*, full_fence_after_rmw};
use crate::user::{Fault, Sink, Source};

/// The bit of `tail` that ends a lane.
const CLOSED: u64 = 1 << 63;
/// The bit of `tail`, set together with [`CLOSED`], by which the receiver gives back what it has not read.
const RETURNED: u64 = 1 << 62;
/// The bit of `tail`, set together with [`CLOSED`], by which the sender says that it goes on in TCP: from then on nothing can be
/// given back.
const LEFT: u64 = 1 << 61;
/// The bit of `tail` by which the sender says that bytes from `spilled_at` on are in the spill.
const SPILLED: u64 = 1 << 60;
const FLAGS: u64 = CLOSED | RETURNED | LEFT | SPILLED;
/// The bit of `head` by which the sender takes what was given back. A receiver, one of two processes since a fork, that has not
/// read it by then never does.
const TAKEN: u64 = 1 << 63;
/// What one call writes or reads at the most. It is wholly good memory of the program's, or none of it is touched.
pub(crate) const BLOCK: usize = 64 * 1024;
/// A message up to this long is published, and read, as a whole.
pub(crate) const WHOLE: usize = 32 * 1024;
/// A longer one goes in pieces, so that both ends copy at the same time, and what one has just copied is still in the
/// nearest cache when the other does.
pub(crate) const PIECE: usize = 8 * 1024;
/// A sender about to leave the page it writes to goes back to the first if the lane is empty, so that a lane that is
/// never full stays in the cache and takes no memory but that page.
pub(crate) const PAGE: u64 = if cfg!(loom) { 2 } else { 4096 };

/// The shared words of a lane. Each end has a line for the cursor that it moves all the time, and one for what it says
/// rarely and the other end reads all the time.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct LaneHeader {
    tail: AtomicU64,
    sender: SenderLine,
    head: HeadLine,
    receiver: ReceiverLine,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct SenderLine {
    start: AtomicU64,
    end: AtomicU32,
    tx_wants: AtomicU32,
    tx_waiter: AtomicU32,
    /// The broker says that somebody reads along, who needs what was written last to stay where it is for a while.
    followed: AtomicU32,
    /// What stands at the beginning of the ring: a value of `tail`.
    base: AtomicU64,
    /// See [`Stamp`].
    marked_at: AtomicU64,
    behind: AtomicU64,
    /// While [`SPILLED`] is set: the value of `tail` that stands at the beginning of the spill.
    spilled_at: AtomicU64,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct HeadLine {
    head: AtomicU64,
    /// Since a fork, 1 + what the processes that share the receiver's socket have read from TCP.
    read: AtomicU64,
    /// How much of TCP the receiver had read when it said "watching", or last read some.
    reached: AtomicU64,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct ReceiverLine {
    watching: AtomicU32,
    rx_waiter: AtomicU32,
    /// Set by whoever ends the lane, before `tail` says so: a receiver that knows of bytes enough does not look there.
    over: AtomicU32,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<LaneHeader>() == shunt_abi::geometry::LANE_BYTES);
    assert!(std::mem::offset_of!(LaneHeader, sender.end) == shunt_abi::geometry::LANE_END_OFFSET);
    assert!(std::mem::offset_of!(LaneHeader, tail) == shunt_abi::geometry::LANE_TAIL_OFFSET);
    assert!(std::mem::offset_of!(LaneHeader, head.head) == shunt_abi::geometry::LANE_HEAD_OFFSET);
    assert!(std::mem::offset_of!(LaneHeader, sender.start) == shunt_abi::geometry::LANE_START_OFFSET);
    assert!(std::mem::offset_of!(LaneHeader, sender.followed) == shunt_abi::geometry::LANE_FOLLOWED_OFFSET);
    assert!(std::mem::offset_of!(LaneHeader, sender.base) == shunt_abi::geometry::LANE_BASE_OFFSET);
    assert!(CLOSED == shunt_abi::geometry::LANE_CLOSED);
    assert!(SPILLED == shunt_abi::geometry::LANE_SPILLED);
    assert!(RETURNED == shunt_abi::geometry::LANE_RETURNED && !FLAGS == shunt_abi::geometry::LANE_CURSOR);
    assert!(End::ShutDown as u64 == shunt_abi::geometry::LANE_END_SHUT_DOWN);
    assert!(End::Closed as u64 == shunt_abi::geometry::LANE_END_CLOSED);
    assert!(End::Died as u64 == shunt_abi::geometry::LANE_END_DIED);
    assert!(SHARED as u64 == shunt_abi::geometry::LANE_END_SHARED);
    assert!(ABANDONED as u64 == shunt_abi::geometry::LANE_END_ABANDONED);
};

/// The peer wrote an impossible value; the lane must be left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misbehaved;

/// Why a lane could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// See [`Misbehaved`].
    Misbehaved,
    /// The bytes stay unread: see [`Fault`].
    Fault,
}

impl From<Misbehaved> for ReadError {
    fn from(_: Misbehaved) -> ReadError {
        ReadError::Misbehaved
    }
}

impl From<Fault> for ReadError {
    fn from(_: Fault) -> ReadError {
        ReadError::Fault
    }
}

/// How the sender of a lane left its socket. A hint about what TCP is about to say, never a substitute for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum End {
    /// It has not.
    Open = 0,
    /// It has shut the direction down by a call.
    ShutDown = 1,
    /// It has closed the socket by a call.
    Closed = 2,
    /// Its process ended: the broker says so.
    Died = 4,
}

/// In `rx_waiter`, beside a slot.
const LASTING: u32 = 1 << 31;

/// Beside an [`End`]: the sender's end of the connection has been reset, and that has been told.
const RESET_TOLD: u32 = 8;

/// Beside an [`End`]: the sender has shared its socket with a process that it has forked.
const SHARED: u32 = 16;

/// Beside [`End::Died`]: none of those that shared the socket holds it any more. The broker says so.
const ABANDONED: u32 = 32;

/// Beside an [`End`]: all that the sender has sent since the lane began is in it, and it has ended the stream.
const COMPLETE: u32 = 64;

/// What the sender says of the time when it marked a lane for a waiter that had nothing of it to look at. It is believed in nothing
/// but the order in which things are told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// That time.
    pub at: u64,
    /// When it had last sent something by TCP, to anybody.
    pub behind: u64,
}

/// What the spill of a full lane is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spill {
    /// Nothing: there is none, or bytes must stay in the ring because a capture reads along.
    None,
    /// It has room, but is not used yet, or is held.
    Closed,
    /// It has no room.
    Full,
}

/// What a [`Producer::write`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// So many bytes, at least one, are in the lane.
    Bytes(usize),
    /// No room.
    Full,
    /// The lane has ended. The sender is to [leave](LaneHeader::leave) it, or to [take back](LaneHeader::take_back) what was published
    /// and not read; everything not published before belongs to TCP.
    Closed,
    /// The lane has ended, and published bytes that are unread belong to TCP too: see
    /// [`Producer::unread_ranges`].
    Returned,
    /// Nothing: see [`Fault`].
    Fault,
    /// Nothing: see [`Ring::back`].
    NoMemory(Reason),
}

impl LaneHeader {
    /// An unused lane; only the model checker and tests make one, a link's headers begin as zeroed memory.
    pub fn new() -> LaneHeader {
        LaneHeader {
            tail: AtomicU64::new(0),
            sender: SenderLine {
                start: AtomicU64::new(0),
                end: AtomicU32::new(0),
                tx_wants: AtomicU32::new(0),
                tx_waiter: AtomicU32::new(0),
                followed: AtomicU32::new(0),
                base: AtomicU64::new(0),
                marked_at: AtomicU64::new(0),
                behind: AtomicU64::new(0),
                spilled_at: AtomicU64::new(0),
            },
            head: HeadLine { head: AtomicU64::new(0), read: AtomicU64::new(0), reached: AtomicU64::new(0) },
            receiver: ReceiverLine {
                watching: AtomicU32::new(0),
                rx_waiter: AtomicU32::new(0),
                over: AtomicU32::new(0),
            },
        }
    }

    /// Ends the lane at what has been published so far. Either end may; the second time changes nothing.
    pub fn close(&self) {
        self.note_end();
        self.tail.fetch_or(CLOSED, AcqRel);
        full_fence_after_rmw();
    }

    /// The sender ends the lane, and goes on in TCP. If the receiver was first and has given bytes back, those go there first.
    pub fn leave(&self) {
        self.note_end();
        self.tail.fetch_or(CLOSED | LEFT, AcqRel);
        full_fence_after_rmw();
    }

    /// The receiver ends the lane and gives back what it has not read: the sender sends that again, by TCP, before
    /// anything else. `false` if the sender has gone on already.
    pub fn give_back(&self) -> bool {
        self.note_end();
        let mut word = self.tail.load(Relaxed);
        while word & (LEFT | RETURNED) == 0 {
            match self.tail.compare_exchange(word, word | CLOSED | RETURNED, AcqRel, Relaxed) {
                Ok(_) => {
                    full_fence_after_rmw();
                    return true;
                }
                Err(now) => word = now,
            }
        }
        word & RETURNED != 0
    }

    /// The sender ends the lane and takes back what the receiver has not read, as if that had given it back.
    pub fn take_back(&self) {
        self.note_end();
        self.tail.fetch_or(CLOSED | RETURNED, AcqRel);
        full_fence_after_rmw();
    }

    fn note_end(&self) {
        self.receiver.over.store(1, Relaxed);
    }

    /// Whether the receiver has given back what it has not read.
    #[inline]
    pub fn is_returned(&self) -> bool {
        self.tail.load(Acquire) & RETURNED != 0
    }

    /// Whether the receiver has ever read anything.
    pub fn has_been_read(&self) -> bool {
        self.head.head.load(Relaxed) & !TAKEN > 0
    }

    /// Whether the sender has taken that.
    pub fn is_taken(&self) -> bool {
        self.head.head.load(Acquire) & TAKEN != 0
    }

    /// Whether the lane has ended.
    pub fn is_closed(&self) -> bool {
        self.tail.load(Acquire) & CLOSED != 0
    }

    /// Whether the lane looks empty, by both cursors as they stand in shared memory: a hint.
    pub fn looks_empty(&self) -> bool {
        self.tail.load(Relaxed) & !FLAGS == self.head.head.load(Relaxed) & !TAKEN
    }

    /// L4, receiver: from now on it looks at this lane before it sleeps.
    pub fn watch(&self) {
        self.receiver.watching.store(1, Release);
    }

    /// L4, sender: may it begin?
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.receiver.watching.load(Acquire) != 0
    }

    /// The sender begins at stream offset `offset`. Before anything is published.
    pub fn begin(&self, offset: u64) {
        self.sender.start.store(offset + 1, Release);
    }

    /// Where in the stream the lane begins, once it has.
    #[inline]
    pub fn beginning(&self) -> Option<u64> {
        self.sender.start.load(Acquire).checked_sub(1)
    }

    /// The sender says how its direction ended, before it makes the call that ends it. What was said before stays.
    pub fn set_end(&self, end: End) {
        self.sender.end.fetch_or(end as u32, AcqRel);
    }

    /// How the sender's direction ended: the last that was said of it.
    #[inline]
    pub fn end(&self) -> End {
        match self.sender.end.load(Acquire) & !(RESET_TOLD | SHARED | ABANDONED | COMPLETE) {
            0 => End::Open,
            word if word & End::Died as u32 != 0 => End::Died,
            word if word & End::Closed as u32 != 0 => End::Closed,
            _ => End::ShutDown,
        }
    }

    /// Whether it ended by a close, or with its process: [`End::Closed`] or [`End::Died`].
    #[inline]
    pub fn is_left(&self) -> bool {
        self.sender.end.load(Acquire) & (End::Closed as u32 | End::Died as u32) != 0
    }

    /// Whether the sender had shut the direction down by a call, whatever happened to it later.
    pub fn was_shut_down(&self) -> bool {
        self.sender.end.load(Acquire) & End::ShutDown as u32 != 0
    }

    /// The sender, or a process that shares its socket, has been told of a reset.
    pub fn note_reset_told(&self) {
        self.sender.end.fetch_or(RESET_TOLD, AcqRel);
    }

    /// Whether one of them has: there is no second reset.
    pub fn is_reset_told(&self) -> bool {
        self.sender.end.load(Acquire) & RESET_TOLD != 0
    }

    /// The sender is about to share its socket with a child, which may hold it still when the sender's process has ended.
    pub fn note_shared(&self) {
        self.sender.end.fetch_or(SHARED, AcqRel);
    }

    /// Whether it ever has.
    pub fn was_shared(&self) -> bool {
        self.sender.end.load(Acquire) & SHARED != 0
    }

    /// The sender is about to end the stream, and has gone by TCP for none of it since the lane began; or takes that back.
    pub fn note_complete(&self, is_complete: bool) {
        match is_complete {
            true => self.sender.end.fetch_or(COMPLETE, AcqRel),
            false => self.sender.end.fetch_and(!COMPLETE, AcqRel),
        };
    }

    /// Returns whether the stream ends where the lane does.
    pub fn is_complete(&self) -> bool {
        self.sender.end.load(Acquire) & COMPLETE != 0
    }

    /// Returns whether the sender has gone on in TCP.
    pub fn has_left(&self) -> bool {
        self.tail.load(Acquire) & LEFT != 0
    }

    /// Whether its last holder has ended too.
    pub fn was_abandoned(&self) -> bool {
        self.sender.end.load(Acquire) & ABANDONED != 0
    }

    /// The receiver is about to share its socket, of which so many bytes have been read from TCP.
    pub fn share_read(&self, read: u64) {
        // Only the first process to fork knows by itself alone.
        let _ = self.head.read.compare_exchange(0, read + 1, AcqRel, Relaxed);
    }

    /// What has been read from TCP by all who share it, if anybody does.
    pub fn shared_read(&self) -> Option<u64> {
        self.head.read.load(Acquire).checked_sub(1)
    }

    /// The receiver has read `count` bytes more from TCP.
    pub fn note_read(&self, count: usize) {
        if self.shared_read().is_some() {
            self.head.read.fetch_add(count as u64, AcqRel);
        }
    }

    /// The receiver has read so much of TCP.
    pub fn note_reached(&self, read: u64) {
        self.head.reached.store(read, Relaxed);
    }

    /// What it has yet to read of TCP before the lane, as far as it has said so. A sender believes it in nothing but how long it
    /// waits for the receiver to come by.
    pub fn ahead(&self) -> u64 {
        self.beginning().map_or(0, |beginning| beginning.saturating_sub(self.head.reached.load(Relaxed)))
    }

    /// The receiver names the waiter to ring, before it announces its sleep.
    #[inline]
    pub fn set_rx_waiter(&self, slot: Option<usize>) {
        let word = slot.map_or(0, |slot| slot as u32 + 1);
        if self.receiver.rx_waiter.load(Relaxed) != word {
            self.receiver.rx_waiter.store(word, Release);
        }
    }

    /// The same of a waiter that looks sooner or later, whether it sleeps now or not: an epoll instance.
    #[inline]
    pub fn set_lasting_rx_waiter(&self, slot: usize) {
        let word = (slot as u32 + 1) | LASTING;
        if self.receiver.rx_waiter.load(Relaxed) != word {
            self.receiver.rx_waiter.store(word, Release);
        }
    }

    /// Whether such a waiter was named last.
    pub fn has_lasting_rx_waiter(&self) -> bool {
        self.receiver.rx_waiter.load(Relaxed) & LASTING != 0
    }

    /// The waiter to ring for bytes. The sender has just passed a full fence.
    #[inline]
    pub fn rx_waiter(&self) -> Option<usize> {
        checked_slot(self.receiver.rx_waiter.load(Relaxed))
    }

    /// The sender is about to mark the lane.
    #[inline]
    pub fn stamp(&self, stamp: Stamp) {
        self.sender.marked_at.store(stamp.at, Relaxed);
        self.sender.behind.store(stamp.behind, Relaxed);
    }

    /// What it said when it did. Asked after the mark has been taken.
    #[inline]
    pub fn stamped(&self) -> Stamp {
        Stamp { at: self.sender.marked_at.load(Relaxed), behind: self.sender.behind.load(Relaxed) }
    }

    /// Whether somebody reads along: then the sender uses all of the ring, as it does of one that is never empty.
    #[inline]
    fn is_followed(&self) -> bool {
        self.sender.followed.load(Relaxed) != 0
    }

    /// The sender wants to be told of space through `slot`. It must look for space once more afterwards.
    ///
    /// The wish is granted once. A waiter that has not announced its sleep before it wishes must look at its ready
    /// word before it sleeps: it may have been told between the two, of space that it has used since.
    pub fn want_space(&self, slot: usize) {
        self.sender.tx_waiter.store(slot as u32 + 1, Relaxed);
        self.sender.tx_wants.swap(1, AcqRel);
        full_fence_after_rmw();
    }

    /// Whether the sender waits for space. Asked after [`Consumer::read`].
    #[inline]
    pub fn is_space_wanted(&self) -> bool {
        self.sender.tx_wants.load(Relaxed) != 0
    }

    /// The waiter to ring for space, if the sender waits for some. Asked after [`Consumer::read`].
    #[inline]
    pub fn take_space_wanted(&self) -> Option<usize> {
        if !self.is_space_wanted() || self.sender.tx_wants.swap(0, AcqRel) == 0 {
            return None;
        }
        checked_slot(self.sender.tx_waiter.load(Relaxed))
    }
}

impl Default for LaneHeader {
    fn default() -> LaneHeader {
        LaneHeader::new()
    }
}

fn checked_slot(word: u32) -> Option<usize> {
    // 0 is nobody.
    let slot = ((word & !LASTING) as usize).wrapping_sub(1);
    (slot < shunt_abi::geometry::WAITERS).then_some(slot)
}

/// The sender's end.
#[derive(Debug, Default)]
pub struct Producer {
    tail: u64,
    head: u64,
    base: u64,
    /// How far the tail may go [at once](Producer::place_at_once): to the end of the page that is being written to, and not past the
    /// receiver's cursor, as far as that is known. 0 while the lane is spilled.
    until: u64,
    spill: Option<Spilled>,
}

/// The sender's part of a lane that is spilled.
#[derive(Clone, Copy, Debug)]
struct Spilled {
    /// The first byte in the spill.
    at: u64,
    /// `tail` has the flag.
    is_said: bool,
    /// Nothing is added until the lane is empty.
    is_held: bool,
}

impl Producer {
    /// A producer of an unused lane.
    pub fn new() -> Producer {
        Producer::default()
    }

    /// Bytes published so far.
    pub fn published(&self) -> u64 {
        self.tail
    }

    /// Where in the ring the next byte goes.
    pub fn position(&self) -> u64 {
        match self.spill {
            None => self.tail - self.base,
            Some(spill) => SPILL + (self.tail - spill.at),
        }
    }

    /// Has what follows go to the spill, until the lane is empty. `false`: it has none, or its bytes
    /// are to stay in the ring, because a capture reads along.
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

    /// What the spill is good for, if the lane is full.
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

    /// Publishes as much of `source` as fits, a block at the most. Whatever it returns, what has been published is that by which
    /// `source` has advanced.
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

    /// After a write: its last byte is on the page that is being written to, which has memory.
    fn see_how_far(&mut self, size: u64) {
        if self.spill.is_some() {
            return;
        }
        // Both are powers of two.
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
                // Another thread has taken the memory away meanwhile.
                Published::Fault if done > 0 => break,
                ended => return Ok(ended),
            }
        }
        Ok(Published::Bytes(done))
    }

    /// Publishes `count` bytes, for which there is room, at once.
    #[inline(always)]
    fn write_piece(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        source: &mut Source<'_>,
        count: usize,
    ) -> Result<Published, Misbehaved> {
        let mut ahead = *source;
        if ring.fill(self.position(), count, &mut ahead).is_err() {
            return Ok(Published::Fault);
        }
        let published = self.commit(lane, count)?;
        if let Published::Bytes(_) = published {
            *source = ahead;
        }
        Ok(published)
    }

    /// Makes `count` bytes that were put behind the tail visible, unless the lane has ended.
    ///
    /// [`write`](Producer::write) does this by itself; a caller that had the kernel fill the ring uses it.
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

    /// The same of a lane that has not ended, as most have not. `Err`: nothing has happened, and [`commit`](Self::commit) sees to that.
    #[inline(always)]
    pub fn publish(&mut self, lane: &LaneHeader, count: usize) -> Result<(), u64> {
        let tail = self.tail + count as u64;
        lane.tail.compare_exchange(self.tail, tail, AcqRel, Acquire)?;
        // The waiter words are read after this: see *Sleeping and waking*.
        full_fence_after_rmw();
        self.tail = tail;
        Ok(())
    }

    /// The lane has ended. Whoever ended it, the receiver may give bytes back until this side goes on in TCP.
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

    /// Room in the ring; looks at the receiver's cursor only if `wanted` bytes do not fit otherwise, or not on this page.
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

    /// The lane is empty. As in [`goes_to_first_page`](Self::goes_to_first_page), the receiver looks
    /// where bytes are only when it sees some.
    fn leave_spill(&mut self, lane: &LaneHeader, spill: Spilled) {
        self.spill = None;
        self.base = self.tail;
        self.until = self.tail;
        lane.sender.base.store(self.base, Relaxed);
        if spill.is_said {
            lane.tail.fetch_and(!SPILLED, AcqRel);
        }
    }

    /// Where `wanted` bytes go that fit on one page, as far as is known without a look at the receiver's cursor, or if that shows the lane
    /// empty. The page has memory behind it. They are to be [published](Self::publish) there.
    #[inline(always)]
    pub fn place_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring, wanted: usize) -> Option<u64> {
        let place = self.place_on_page(wanted);
        let turns = |this: &mut Self| this.turns_page(lane, ring.len() as u64, wanted as u64);
        place.or_else(|| turns(self).then(|| self.tail - self.base))
    }

    /// The same if that is the page which is being written to.
    #[inline(always)]
    pub fn place_on_page(&self, wanted: usize) -> Option<u64> {
        (self.tail + wanted as u64 <= self.until).then(|| self.tail - self.base)
    }

    /// Goes back to the first page for so many bytes, which has been written to before, if [`room`](Self::room) would.
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

    /// If the lane is empty: the receiver reads the base only when it sees bytes to read, and as long as it has any the base stays.
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

    /// Whether so many bytes end behind the page that is being written to, if there is one.
    #[inline]
    fn leaves_page(&self, size: u64, wanted: u64) -> bool {
        // Both are powers of two.
        let (at, page) = (self.tail - self.base, PAGE.min(size));
        at > 0 && ((at - 1) & (page - 1)) + 1 + wanted > page
    }

    /// Bytes that the receiver has not read.
    pub fn unread(&mut self, lane: &LaneHeader) -> Result<u64, Misbehaved> {
        self.refresh(lane)?;
        Ok(self.tail - self.head)
    }

    /// Positions of what the receiver gave back, first those in the ring and then those in the
    /// spill. After [`Published::Returned`].
    pub fn unread_ranges(&self) -> [Range<u64>; 2] {
        let border = self.spill.map_or(self.tail, |spill| spill.at);
        let in_ring = self.head.min(border) - self.base..border - self.base;
        let in_spill = SPILL + (self.head.max(border) - border)..SPILL + (self.tail - border);
        [in_ring, in_spill]
    }

    fn refresh(&mut self, lane: &LaneHeader) -> Result<(), Misbehaved> {
        let head = lane.head.head.load(Acquire) & !TAKEN;
        // L5: the receiver's cursor only moves forward, and never past what was published.
        if head < self.head || head > self.tail {
            return Err(Misbehaved);
        }
        self.head = head;
        Ok(())
    }
}

/// The receiver's end.
#[derive(Debug, Default)]
pub struct Consumer {
    head: u64,
    tail: u64,
    /// How much of what is behind the cursor others have read, or the sender has taken back.
    gone: u64,
    ended: bool,
    /// The first byte in the spill, if that was used at the last look.
    spilled_at: Option<u64>,
    /// It has ended, or spilled.
    is_slow: bool,
}

impl Consumer {
    /// A consumer of an unused lane.
    pub fn new() -> Consumer {
        Consumer::default()
    }

    /// Bytes read so far.
    pub fn consumed(&self) -> u64 {
        self.head - self.gone
    }

    /// The same of a lane that has not ended, of which nothing can be gone.
    #[inline(always)]
    pub fn cursor(&self) -> u64 {
        self.head
    }

    /// Bytes to read, as far as is known without a look at the sender's cursor.
    #[inline]
    pub fn known(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Bytes to read.
    #[inline]
    pub fn available(&mut self, lane: &LaneHeader, ring: &impl Ring) -> Result<usize, Misbehaved> {
        self.look_at_tail(lane, ring)?;
        if self.ended {
            // A fork ends every lane, and either process may drain it: what the other has read, or given back, is gone.
            let head = lane.head.head.load(Acquire);
            if lane.is_returned() {
                self.give_up(head)?;
            } else {
                self.follow(head)?;
            }
        }
        Ok((self.tail - self.head) as usize)
    }

    /// The same of a lane that has not ended. `None`: [`available`](Self::available) has to see to it.
    #[inline(always)]
    pub fn available_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring) -> Option<usize> {
        let known = self.known_at_once(lane)?;
        // With a flag it would be further than any ring is long.
        if known > ring.len() as u64 {
            return None;
        }
        self.tail = self.head + known;
        Some(known as usize)
    }

    /// How far the sender's cursor is from this one. L5: as below.
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
                // L5: the sender's cursor only moves forward, and never further than the ring is long.
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

    /// The tail says that bytes are in the spill. The sender leaves it only when the lane is empty,
    /// so as long as there are bytes the border is that of this tail.
    #[cold]
    fn look_at_spill(&mut self, lane: &LaneHeader, ring: &impl Ring, tail: u64) -> Result<(), Misbehaved> {
        let at = lane.sender.spilled_at.load(Relaxed);
        // L5: as for the ring alone; and no part has more than fits there.
        let in_ring = at.saturating_sub(self.head);
        let in_spill = tail.wrapping_sub(at.max(self.head));
        let fits = in_ring <= ring.len() as u64 && in_spill <= ring.spill_len() as u64;
        if tail < self.tail || tail > self.head && !fits || ring.spill_len() == 0 {
            return Err(Misbehaved);
        }
        self.spilled_at = Some(at);
        Ok(())
    }

    /// How many of the bytes behind the cursor are in the same part of the lane.
    #[inline]
    fn to_border(&self) -> usize {
        let border = self.spilled_at.filter(|at| *at > self.head);
        border.map_or(usize::MAX, |at| (at - self.head) as usize)
    }

    /// The same, but no more than are known of if those are `enough`: the line of the sender's cursor stays with the sender.
    #[inline]
    fn known_or_available(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        enough: usize,
    ) -> Result<usize, Misbehaved> {
        let known = self.known();
        // Of an ended lane somebody else may read too.
        if known >= enough && lane.receiver.over.load(Relaxed) == 0 {
            return Ok(known);
        }
        self.available(lane, ring)
    }

    /// Whether the lane has ended and everything in it has been read. Asked after [`available`](Self::available).
    #[inline]
    pub fn is_finished(&self) -> bool {
        self.ended && self.head == self.tail
    }

    /// Reads what is there into `sink` and returns how many bytes that were.
    #[inline]
    pub fn read(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
    ) -> Result<usize, ReadError> {
        let mut total = 0;
        while sink.remaining() > 0 {
            match self.read_block(lane, ring, sink) {
                Ok(0) => break,
                Ok(count) => total += count,
                // What was copied before is the caller's; the next read says it again.
                Err(_) if total > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(total)
    }

    #[inline]
    fn read_block(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
    ) -> Result<usize, ReadError> {
        // Ever less at a time as long as another process is faster, so that one that reads byte after byte is.
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

    /// Reads `count` bytes, at least one, which there are, at once; or nothing, if another process has read meanwhile.
    #[inline(always)]
    fn read_piece(
        &mut self,
        lane: &LaneHeader,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
        count: usize,
    ) -> Result<usize, ReadError> {
        let mut ahead = *sink;
        ring.drain(self.position(lane)?, count, &mut ahead)?;
        if !self.advance(lane, ring, count)? {
            return Ok(0);
        }
        *sink = ahead;
        Ok(count)
    }

    /// How many of the next `wanted` bytes there are, of a lane that has not ended: as far as is known, if those are enough. They are to be
    /// [taken](Self::take) once they have been copied from their [place](Self::place). `None`: there are none, or
    /// [`read`](Self::read) has to see to it.
    #[inline(always)]
    pub fn look_at_once(&mut self, lane: &LaneHeader, ring: &impl Ring, wanted: usize) -> Option<usize> {
        if self.known() >= wanted {
            // Of an ended lane somebody else may read too.
            let is_open = !self.is_slow && lane.receiver.over.load(Relaxed) == 0;
            return (is_open && wanted > 0).then_some(wanted);
        }
        let known = self.known_at_once(lane)?;
        // As in `available_at_once`, or there are none.
        if known.wrapping_sub(1) > ring.mask() as u64 {
            return None;
        }
        self.tail = self.head + known;
        Some(wanted.min(known as usize))
    }

    /// So many of them have been copied, and are this reader's now. `Err`: they are not, since the cursor has been moved to there.
    #[inline(always)]
    pub fn take(&mut self, lane: &LaneHeader, count: usize) -> Result<(), u64> {
        let next = self.head + count as u64;
        // With acquire and a fence, because `tx_wants` is read next and the sender does the reverse.
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

    /// The same of the bytes that are [`known`](Self::known): the line of the sender's cursor stays with the sender.
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

    /// Throws `count` bytes away, no more than are available.
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

    /// Where in the ring the next byte is. Asked when there is one: the tail, read with acquire, brought the base along.
    #[inline]
    fn position(&self, lane: &LaneHeader) -> Result<u64, Misbehaved> {
        if let Some(at) = self.spilled_at
            && at <= self.head
        {
            return Ok(SPILL + (self.head - at));
        }
        // L5: the base was the tail of an empty lane, so nothing before it is unread.
        self.head.checked_sub(lane.sender.base.load(Relaxed)).ok_or(Misbehaved)
    }

    /// The same in a ring, where any place is one. A sender that lies says no more than which of its bytes are read.
    #[inline(always)]
    pub fn place(&self, lane: &LaneHeader) -> u64 {
        self.head.wrapping_sub(lane.sender.base.load(Relaxed))
    }

    /// Moves the cursor, so that these bytes are this reader's. `false`: somebody else has moved it, and it is where that was.
    #[inline]
    fn advance(&mut self, lane: &LaneHeader, ring: &impl Ring, count: usize) -> Result<bool, Misbehaved> {
        match self.take(lane, count) {
            Ok(()) => Ok(true),
            Err(found) => self.fall_behind(lane, ring, found).map(|()| false),
        }
    }

    /// The cursor has been moved. L5: nobody does that but to a lane that has ended, and then the end is final: so each time leaves
    /// fewer bytes, and however fast somebody is, this reader is done after as many times as the ring has bytes.
    #[cold]
    fn fall_behind(&mut self, lane: &LaneHeader, ring: &impl Ring, found: u64) -> Result<(), Misbehaved> {
        self.look_at_tail(lane, ring)?;
        if self.ended { self.follow(found) } else { Err(Misbehaved) }
    }

    /// Another process has moved the cursor, or the sender has taken the rest back.
    #[cold]
    fn follow(&mut self, found: u64) -> Result<(), Misbehaved> {
        if found & TAKEN != 0 {
            return self.give_up(found);
        }
        // L5: it only moves forward, and never past what was published.
        if !(self.head..=self.tail).contains(&found) {
            return Err(Misbehaved);
        }
        self.head = found;
        Ok(())
    }

    /// What has not been read by `found` is the sender's again.
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
