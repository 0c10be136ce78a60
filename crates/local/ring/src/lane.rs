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

use shunt_abi::reason::Reason;

use crate::sync::{AtomicU32, AtomicU64, Ordering::*, full_fence_after_rmw};
use crate::user::{Fault, Sink};

mod consumer;
mod producer;

pub use consumer::Consumer;
pub use producer::Producer;

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
    /// The number of bytes ever written, and the bits of [`FLAGS`], which both ends set. The sender
    /// moves it.
    tail: AtomicU64,
    sender: SenderLine,
    head: HeadLine,
    receiver: ReceiverLine,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct SenderLine {
    /// 1 + the offset in the stream at which the lane begins, or 0 if it has not begun.
    start: AtomicU64,
    /// How the sender ended ([`End`]). It is a hint, because TCP decides. The broker adds deaths.
    end: AtomicU32,
    /// Whether the sender wants a notification of room, by the waiter in `tx_waiter`.
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
    /// The number of bytes ever read, and [`TAKEN`], which the sender sets. The receiver moves it.
    head: AtomicU64,
    /// After a fork: 1 + the number of bytes that the processes sharing the receiver's socket have
    /// read from TCP.
    read: AtomicU64,
    /// The number of bytes that the receiver had read from TCP when it set `watching`, or when it
    /// last read some.
    reached: AtomicU64,
    /// The receiver's last [report](crate::copy::Sampler::report) on its copies.
    copied: AtomicU64,
}

#[derive(Debug)]
#[repr(C, align(64))]
struct ReceiverLine {
    /// Whether the receiver checks the lane before it sleeps.
    watching: AtomicU32,
    /// 1 + the waiter to notify of bytes, or 0; with the bit [`LASTING`].
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
    /// Nothing was written: see [`Ring::back`](crate::bytes::Ring::back).
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
