//! One direction of one connection: a byte ring with a beginning and an end in the stream.
//!
//! The sender's end is a [`Producer`], the receiver's a [`Consumer`]. Each keeps its own cursor in
//! private memory. It loads the other's from shared memory, and checks it at every load (L5).
//! Either end may end the lane: see *Switch back* in `docs/local-path.md`.
//!
//! A lane may have a *spill*, a second ring. The sender uses it while the receiver reads nothing:
//!
//! ```text
//!                         spilled_at
//!            head             |               tail
//!   stream: ..|###############|################|
//!             `---- ring -----'---- spill -----'
//! ```
//!
//! Bytes from `spilled_at` on are in the spill, which is a ring as well. The flag [`SPILLED`] of
//! `tail` reports that; while it is set, the receiver's fast paths find nothing. The sender leaves
//! the spill when the lane is empty, so at any time at most one border lies among the unread bytes.
//!
//! Example: the ring holds 256 KiB, and the sender writes 300,000 bytes. The ring takes 262,144.
//! After a while the sender [spills](Producer::spill): `spilled_at` is 262,144, and the rest goes
//! to the beginning of the spill. Once the receiver has read everything, the next byte goes to the
//! beginning of the ring again.

use std::ops::Range;

use shunt_abi::reason::Reason;

use crate::bytes::{Ring, SPILL};
use crate::copy::{self, Chooser, Method, Sampler};
use crate::sync::{AtomicU32, AtomicU64, Ordering::*, full_fence_after_rmw};
use crate::user::{Fault, Sink, Source};

/// The bit of `tail` that ends a lane.
const CLOSED: u64 = 1 << 63;
/// The bit of `tail`, set together with [`CLOSED`], by which the receiver returns its unread bytes
/// to the sender.
const RETURNED: u64 = 1 << 62;
/// The bit of `tail`, set together with [`CLOSED`], by which the sender announces that it continues
/// on TCP. From then on the receiver can return nothing.
const LEFT: u64 = 1 << 61;
/// The bit of `tail` by which the sender announces that bytes from `spilled_at` on are in the
/// spill.
const SPILLED: u64 = 1 << 60;
const FLAGS: u64 = CLOSED | RETURNED | LEFT | SPILLED;
/// The bit of `head` by which the sender reclaims the returned bytes. After a fork, two processes
/// may read the lane; neither can read a byte that was unread when this bit was set.
const TAKEN: u64 = 1 << 63;
/// The most bytes that one call writes or reads. Either all of them are in valid memory of the
/// program, or the call touches none of them.
pub(crate) const BLOCK: usize = 64 * 1024;
/// A message up to this long is published, and read, as a whole.
pub(crate) const WHOLE: usize = 32 * 1024;
/// A longer message goes in pieces of this size. Both ends then copy at the same time, and a piece
/// that one has just copied is still in the nearest cache when the other copies it.
pub(crate) const PIECE: usize = 8 * 1024;
/// When a sender is about to leave the page that it writes to, and the lane is empty, it returns to
/// the first page. A lane that is never full so stays in the cache, and takes no memory but that
/// page.
pub(crate) const PAGE: u64 = if cfg!(loom) { 2 } else { 4096 };

/// The shared words of a lane. Each end has one cache line for the cursor that it moves all the
/// time, and one for words that it writes rarely and the other end reads all the time.
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
    /// Set by the broker while a capture reads the lane. The capture needs the newest bytes to stay
    /// in place for a while.
    followed: AtomicU32,
    /// The value of `tail` that corresponds to the beginning of the ring.
    base: AtomicU64,
    /// See [`Stamp`].
    marked_at: AtomicU64,
    behind: AtomicU64,
    /// While [`SPILLED`] is set: the value of `tail` that corresponds to the beginning of the
    /// spill.
    spilled_at: AtomicU64,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct HeadLine {
    head: AtomicU64,
    /// After a fork: 1 + the number of bytes that the processes sharing the receiver's socket have
    /// read from TCP.
    read: AtomicU64,
    /// The number of bytes that the receiver had read from TCP when it set `watching`, or when it
    /// last read some.
    reached: AtomicU64,
    /// The receiver's last [report](Sampler::report) on its copies.
    copied: AtomicU64,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct ReceiverLine {
    watching: AtomicU32,
    rx_waiter: AtomicU32,
    /// Set by the side that ends the lane, before the flag in `tail`. A receiver that already knows
    /// of enough bytes does not load `tail`, but it checks this word.
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

/// The peer wrote an impossible value; the caller must leave the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misbehaved;

/// Reads block by block until `sink` is full or there is nothing more. Returns how many bytes there
/// were.
#[inline(always)]
pub(crate) fn read_blocks(
    sink: &mut Sink<'_>,
    mut read_block: impl FnMut(&mut Sink<'_>) -> Result<usize, ReadError>,
) -> Result<usize, ReadError> {
    let mut total = 0;
    while sink.remaining() > 0 {
        match read_block(sink) {
            Ok(0) => break,
            Ok(count) => total += count,
            // The caller has the bytes that were copied before; the next read returns the error
            // again.
            Err(_) if total > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

/// The reason why a lane could not be read.
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

/// How the sender of a lane ended its direction. A hint about the event that TCP is about to
/// report, never a substitute for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum End {
    /// The sender has not ended it.
    Open = 0,
    /// The sender has shut the direction down by a call.
    ShutDown = 1,
    /// The sender has closed the socket by a call.
    Closed = 2,
    /// The sender's process has ended. The broker sets this.
    Died = 4,
}

/// A flag of `rx_waiter`, next to the slot: the waiter is lasting (see
/// [`LaneHeader::set_lasting_rx_waiter`]).
const LASTING: u32 = 1 << 31;

/// A flag next to an [`End`]: the sender's end of the connection has been reset, and a call has
/// reported the reset.
const RESET_TOLD: u32 = 8;

/// A flag next to an [`End`]: the sender has shared its socket with a process that it has forked.
const SHARED: u32 = 16;

/// A flag next to [`End::Died`]: none of the processes that shared the socket holds it any more.
/// The broker sets this.
const ABANDONED: u32 = 32;

/// A flag next to an [`End`]: the lane contains every byte that the sender has sent since the lane
/// began, and the sender has ended the stream.
const COMPLETE: u32 = 64;

/// Times that the sender notes when it sets a lane's ready bit for a waiter whose bit was clear.
/// The receiver trusts them only for the order in which it reports events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// The time at which the sender set the bit.
    pub at: u64,
    /// The time at which the sender's process had last sent bytes by TCP, on any connection.
    pub behind: u64,
}

/// The state of the spill of a full lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spill {
    /// There is no spill, or bytes must stay in the ring because a capture reads the lane.
    None,
    /// The spill has room, but the sender does not use it yet, or holds it.
    Closed,
    /// The spill has no room.
    Full,
}

/// The outcome of a [`Producer::write`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// This number of bytes, at least one, is in the lane.
    Bytes(usize),
    /// There is no room.
    Full,
    /// The lane has ended. The sender must [leave](LaneHeader::leave) it, or
    /// [reclaim](LaneHeader::take_back) the bytes that were published and not read. All bytes that
    /// were not published before are sent by TCP.
    Closed,
    /// The lane has ended, and the unread bytes among those published are sent by TCP too: see
    /// [`Producer::unread_ranges`].
    Returned,
    /// Nothing was written: see [`Fault`].
    Fault,
    /// Nothing was written: see [`Ring::back`].
    NoMemory(Reason),
}

impl LaneHeader {
    /// Returns an unused lane. Only the model checker and tests make one; a link's headers begin as
    /// zeroed memory.
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
            head: HeadLine {
                head: AtomicU64::new(0),
                read: AtomicU64::new(0),
                reached: AtomicU64::new(0),
                copied: AtomicU64::new(0),
            },
            receiver: ReceiverLine {
                watching: AtomicU32::new(0),
                rx_waiter: AtomicU32::new(0),
                over: AtomicU32::new(0),
            },
        }
    }

    /// Ends the lane after the bytes published so far. Either end may call this; a second call
    /// changes nothing.
    pub fn close(&self) {
        self.note_end();
        self.tail.fetch_or(CLOSED, AcqRel);
        full_fence_after_rmw();
    }

    /// Ends the lane on behalf of the sender, which continues on TCP. If the receiver has returned
    /// bytes before, the sender sends those first.
    pub fn leave(&self) {
        self.note_end();
        self.tail.fetch_or(CLOSED | LEFT, AcqRel);
        full_fence_after_rmw();
    }

    /// Ends the lane on behalf of the receiver, and returns its unread bytes: the sender sends them
    /// again, by TCP, before anything else. Returns `false` if the sender has already continued on
    /// TCP.
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

    /// Ends the lane on behalf of the sender, and reclaims the bytes that the receiver has not
    /// read, as if the receiver had returned them.
    pub fn take_back(&self) {
        self.note_end();
        self.tail.fetch_or(CLOSED | RETURNED, AcqRel);
        full_fence_after_rmw();
    }

    fn note_end(&self) {
        self.receiver.over.store(1, Relaxed);
    }

    /// Returns whether the receiver has returned its unread bytes.
    #[inline]
    pub fn is_returned(&self) -> bool {
        self.tail.load(Acquire) & RETURNED != 0
    }

    /// Returns whether the receiver has ever read anything.
    pub fn has_been_read(&self) -> bool {
        self.head.head.load(Relaxed) & !TAKEN > 0
    }

    /// Returns whether the sender has reclaimed the returned bytes.
    pub fn is_taken(&self) -> bool {
        self.head.head.load(Acquire) & TAKEN != 0
    }

    /// Returns whether the lane has ended.
    pub fn is_closed(&self) -> bool {
        self.tail.load(Acquire) & CLOSED != 0
    }

    /// Returns whether the lane looks empty, by both cursors as they are in shared memory. This is
    /// a hint.
    pub fn looks_empty(&self) -> bool {
        self.tail.load(Relaxed) & !FLAGS == self.head.head.load(Relaxed) & !TAKEN
    }

    /// L4, receiver: announces that the receiver checks this lane before every sleep from now on.
    pub fn watch(&self) {
        self.receiver.watching.store(1, Release);
    }

    /// L4, sender: returns whether the sender may begin the lane.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.receiver.watching.load(Acquire) != 0
    }

    /// Begins the lane at stream offset `offset`. The sender calls this before it publishes
    /// anything.
    pub fn begin(&self, offset: u64) {
        self.sender.start.store(offset + 1, Release);
    }

    /// Returns the stream offset at which the lane begins, once it has begun.
    #[inline]
    pub fn beginning(&self) -> Option<u64> {
        self.sender.start.load(Acquire).checked_sub(1)
    }

    /// Records how the sender's direction ends, before the call that ends it. Earlier records stay.
    pub fn set_end(&self, end: End) {
        self.sender.end.fetch_or(end as u32, AcqRel);
    }

    /// Returns how the sender's direction ended: the strongest of the recorded ends.
    #[inline]
    pub fn end(&self) -> End {
        match self.sender.end.load(Acquire) & !(RESET_TOLD | SHARED | ABANDONED | COMPLETE) {
            0 => End::Open,
            word if word & End::Died as u32 != 0 => End::Died,
            word if word & End::Closed as u32 != 0 => End::Closed,
            _ => End::ShutDown,
        }
    }

    /// Returns whether the direction ended by a close or with its process: [`End::Closed`] or
    /// [`End::Died`].
    #[inline]
    pub fn is_left(&self) -> bool {
        self.sender.end.load(Acquire) & (End::Closed as u32 | End::Died as u32) != 0
    }

    /// Returns whether the sender had shut the direction down by a call, whatever happened to it
    /// later.
    pub fn was_shut_down(&self) -> bool {
        self.sender.end.load(Acquire) & End::ShutDown as u32 != 0
    }

    /// Records that a call has reported a reset to the sender, or to a process that shares its
    /// socket.
    pub fn note_reset_told(&self) {
        self.sender.end.fetch_or(RESET_TOLD, AcqRel);
    }

    /// Returns whether a call has reported a reset to one of them: there is no second reset.
    pub fn is_reset_told(&self) -> bool {
        self.sender.end.load(Acquire) & RESET_TOLD != 0
    }

    /// Records that the sender is about to share its socket with a child. The child may still hold
    /// the socket when the sender's process has ended.
    pub fn note_shared(&self) {
        self.sender.end.fetch_or(SHARED, AcqRel);
    }

    /// Returns whether the sender has ever shared its socket.
    pub fn was_shared(&self) -> bool {
        self.sender.end.load(Acquire) & SHARED != 0
    }

    /// Records whether the lane is complete. The sender sets this before it ends a stream of which,
    /// since the lane began, nothing went by TCP; it may withdraw it.
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

    /// Returns whether the sender has continued on TCP.
    pub fn has_left(&self) -> bool {
        self.tail.load(Acquire) & LEFT != 0
    }

    /// Returns whether the last holder of the sender's socket has ended too.
    pub fn was_abandoned(&self) -> bool {
        self.sender.end.load(Acquire) & ABANDONED != 0
    }

    /// Begins the shared count of bytes read from TCP. The receiver calls this before it shares its
    /// socket; `read` is its own count.
    pub fn share_read(&self, read: u64) {
        // Only the first process that forks is the only reader, so that its own count is the total.
        let _ = self.head.read.compare_exchange(0, read + 1, AcqRel, Relaxed);
    }

    /// Returns the number of bytes that all processes sharing the socket have read from TCP, if it
    /// is shared.
    pub fn shared_read(&self) -> Option<u64> {
        self.head.read.load(Acquire).checked_sub(1)
    }

    /// Adds `count` bytes that the receiver has read from TCP to the shared count, if there is one.
    pub fn note_read(&self, count: usize) {
        if self.shared_read().is_some() {
            self.head.read.fetch_add(count as u64, AcqRel);
        }
    }

    /// Records the number of bytes that the receiver has read from TCP.
    pub fn note_reached(&self, read: u64) {
        self.head.reached.store(read, Relaxed);
    }

    /// Returns how many bytes the receiver has yet to read from TCP before the lane, as far as it
    /// has recorded that. A sender uses this only to decide how long it waits for the receiver.
    pub fn ahead(&self) -> u64 {
        self.beginning().map_or(0, |beginning| beginning.saturating_sub(self.head.reached.load(Relaxed)))
    }

    /// Sets the waiter to notify. The receiver calls this before it announces its sleep.
    #[inline]
    pub fn set_rx_waiter(&self, slot: Option<usize>) {
        let word = slot.map_or(0, |slot| slot as u32 + 1);
        if self.receiver.rx_waiter.load(Relaxed) != word {
            self.receiver.rx_waiter.store(word, Release);
        }
    }

    /// Sets an epoll instance as the waiter to notify. It will check its lanes sooner or later,
    /// even if it does not sleep now.
    #[inline]
    pub fn set_lasting_rx_waiter(&self, slot: usize) {
        let word = (slot as u32 + 1) | LASTING;
        if self.receiver.rx_waiter.load(Relaxed) != word {
            self.receiver.rx_waiter.store(word, Release);
        }
    }

    /// Returns whether the last waiter was set by
    /// [`set_lasting_rx_waiter`](Self::set_lasting_rx_waiter).
    pub fn has_lasting_rx_waiter(&self) -> bool {
        self.receiver.rx_waiter.load(Relaxed) & LASTING != 0
    }

    /// Returns the waiter to notify of new bytes. The sender has just passed a full fence.
    #[inline]
    pub fn rx_waiter(&self) -> Option<usize> {
        checked_slot(self.receiver.rx_waiter.load(Relaxed))
    }

    /// Stores the sender's stamp. The sender calls this before it sets the lane's ready bit.
    #[inline]
    pub fn stamp(&self, stamp: Stamp) {
        self.sender.marked_at.store(stamp.at, Relaxed);
        self.sender.behind.store(stamp.behind, Relaxed);
    }

    /// Returns the sender's stamp. The receiver calls this after it has taken the ready bit.
    #[inline]
    pub fn stamped(&self) -> Stamp {
        Stamp { at: self.sender.marked_at.load(Relaxed), behind: self.sender.behind.load(Relaxed) }
    }

    /// Returns whether a capture reads the lane. The sender then uses the whole ring, as it does
    /// with a lane that is never empty.
    #[inline]
    fn is_followed(&self) -> bool {
        self.sender.followed.load(Relaxed) != 0
    }

    /// Requests a notification of space through `slot`. The sender must check for space once more
    /// afterwards.
    ///
    /// A request is answered once. A waiter that requests before it announces its sleep must check
    /// its ready word before it sleeps: the notification may have come between the two, for space
    /// that it has used since.
    pub fn want_space(&self, slot: usize) {
        self.sender.tx_waiter.store(slot as u32 + 1, Relaxed);
        self.sender.tx_wants.swap(1, AcqRel);
        full_fence_after_rmw();
    }

    /// Returns whether the sender waits for space. The receiver calls this after
    /// [`Consumer::read`].
    #[inline]
    pub fn is_space_wanted(&self) -> bool {
        self.sender.tx_wants.load(Relaxed) != 0
    }

    /// Returns the waiter to notify of space, if the sender waits for some. The receiver calls this
    /// after [`Consumer::read`].
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
    // 0 means no waiter.
    let slot = ((word & !LASTING) as usize).wrapping_sub(1);
    (slot < shunt_abi::geometry::WAITERS).then_some(slot)
}

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
