//! A lane in two files: each end writes one, and only reads the other. `shunt-channel` uses it.
//!
//! A process that maps a memfd for writing before the memfd is sealed keeps its mapping. No process
//! can punch a hole into the memfd afterwards (see `shunt_sys::memfd`). So every word has one
//! writer, and lies in the file that this writer made:
//!
//! ```text
//! sender's file                               receiver's file
//! 0      tail                                 0      head, report on the receiver's copies
//! 64     number of the sender's sleep, base,  64     number of the receiver's sleep
//!        number of the first message that
//!        is not revoked
//! 4096   the ring                             1024   for each lent slot: its last use that is over
//! ```
//!
//! `tail`, `base` and `head` are those of [`crate::lane`]: bytes published, bytes published when
//! the ring began anew at its first byte, and bytes read. No word ends such a lane: the channel's
//! socket does.
//!
//! **Sleeping.** A *sleep number* is 0 while its end is awake. An end that is about to sleep writes
//! a number that it has never written before, passes a full fence, and checks the cursors once
//! more. The other end publishes, passes a full fence, and loads the number. If that is neither 0
//! nor the number that it has notified last, it notifies. It keeps the number to itself, and
//! notifies each sleep once.
//!
//! ```text
//! receiver                          sender
//! number = 7, fence
//! tail has not moved: sleeps
//!                                   tail = 100, fence
//!                                   number is 7, notified was 6: notified = 7, doorbell
//!                                   tail = 200, fence
//!                                   number is 7, notified is 7: nothing
//! wakes, number = 0, reads 200
//! ```
//!
//! **Lent slots** ([`pages`]) are memory of the sender in further files. Each use of a slot has the
//! next number. The receiver writes the number into the slot's word when that use is over, passes a
//! full fence, and notifies a sender that sleeps. A slot is free when its word is its last use.
//!
//! **A publisher's slots** are shown to several receivers, and it waits for none of them. It writes a
//! slot again although a receiver has it, and before that it *revokes* the message: it raises a number
//! in the receiver's lane, passes a full fence, and writes. A receiver reads, passes a fence, and loads
//! the number: if the number has not reached the message, all that was read is of that message.

use crate::bytes::Ring;
use crate::copy::{self, Chooser, Sampler};
use crate::lane::{BLOCK, Misbehaved, PAGE, PIECE, Published, ReadError, WHOLE, read_blocks};
use crate::sync::{AtomicU64, Ordering::*, fence, full_fence_after_rmw};
use crate::user::{Sink, Source};

#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
pub mod pages;
#[cfg(not(loom))]
pub use memory::{MAX_SLOTS, RECEIVER_BYTES, ReceiveMemory, SendMemory, sender_bytes};

/// The words that the sender writes. The other end loads the cursor's line whenever it has moved,
/// and the second line with every message.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct SenderWords {
    tail: AtomicU64,
    rare: RareOfSender,
}

#[derive(Debug, Default)]
#[repr(C, align(64))]
struct RareOfSender {
    sleep: AtomicU64,
    /// Value of `tail` at the first byte of the ring.
    base: AtomicU64,
    /// Messages with a lower number are revoked.
    revoked: AtomicU64,
}

/// The words that the receiver writes, in two lines as the sender's.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct ReceiverWords {
    head: AtomicU64,
    /// The receiver's last [report](Sampler::report) on its copies.
    copied: AtomicU64,
    rare: RareOfReceiver,
}

#[derive(Debug, Default)]
#[repr(C, align(64))]
struct RareOfReceiver {
    sleep: AtomicU64,
}

impl SenderWords {
    /// Revokes the messages before this number. Memory of them may be written after this.
    pub fn revoke_before(&self, number: u64) {
        self.rare.revoked.swap(number, AcqRel);
        // The memory is written after this.
        full_fence_after_rmw();
    }

    /// Returns the number of the first message that is not revoked. Bytes that were
    /// read from the memory of this message or a later one before this call are of that message.
    #[inline]
    pub fn revoked_before(&self) -> u64 {
        fence(Acquire);
        self.rare.revoked.load(Relaxed)
    }
}

/// The words of both ends, as either of them sees them.
#[derive(Clone, Copy, Debug)]
pub struct Words<'a> {
    /// The sender's.
    pub sender: &'a SenderWords,
    /// The receiver's.
    pub receiver: &'a ReceiverWords,
}

impl ReceiverWords {
    /// Returns the words of a receiver that has read nothing, and is awake.
    #[cfg(not(loom))]
    pub const fn new() -> ReceiverWords {
        let (head, copied) = (AtomicU64::new(0), AtomicU64::new(0));
        ReceiverWords { head, copied, rare: RareOfReceiver { sleep: AtomicU64::new(0) } }
    }
}

/// The receiver's word of a lent slot.
#[derive(Clone, Copy, Debug)]
pub struct SlotWord<'a>(&'a AtomicU64);

impl<'a> SlotWord<'a> {
    /// Returns the word in shared memory.
    pub fn of(word: &'a AtomicU64) -> SlotWord<'a> {
        SlotWord(word)
    }

    /// Returns the number of the slot's last use that is over. What the receiver has read of that
    /// use happens before anything that follows.
    #[inline]
    pub fn last_over(self) -> u64 {
        self.0.load(Acquire)
    }

    /// Ends a use. Returns the number of the sender's sleep if it sleeps, and must be notified. The
    /// end of a use that was revoked may come after that of a later one, and then changes nothing.
    #[inline]
    pub fn release(self, number: u64, words: Words<'_>) -> Option<u64> {
        self.0.fetch_max(number, AcqRel);
        // The sender's sleep number is loaded after this.
        full_fence_after_rmw();
        Some(words.sender.rare.sleep.load(Relaxed)).filter(|sleep| *sleep != 0)
    }
}

/// One end's sleeps, and those of the other end that it has notified.
#[derive(Debug, Default)]
struct Sleeps {
    own: u64,
    notified: u64,
}

impl Sleeps {
    fn announce(&mut self, number: &AtomicU64) {
        self.own += 1;
        number.swap(self.own, AcqRel);
        full_fence_after_rmw();
    }

    #[inline]
    fn end(number: &AtomicU64) {
        if number.load(Relaxed) != 0 {
            number.store(0, Relaxed);
        }
    }

    /// Returns the number of the other end's sleep, if it sleeps and has not been notified of it.
    #[inline]
    fn due(&self, number: &AtomicU64) -> Option<u64> {
        Some(number.load(Relaxed)).filter(|number| *number != 0 && *number != self.notified)
    }

    /// Returns whether there is such a sleep. From then on it counts as notified.
    #[inline]
    fn notify(&mut self, number: &AtomicU64) -> bool {
        let due = self.due(number);
        self.notified = due.unwrap_or(self.notified);
        due.is_some()
    }
}

/// The sender's end.
#[derive(Debug, Default)]
pub struct Producer {
    tail: u64,
    head: u64,
    base: u64,
    sleeps: Sleeps,
    copies: Chooser,
}

impl Producer {
    /// Returns a producer of an unused lane.
    pub fn new() -> Producer {
        Producer::default()
    }

    /// Publishes as much of `source` as fits, a block at the most, and advances `source` by it.
    #[inline]
    pub fn write(
        &mut self,
        words: Words<'_>,
        ring: &impl Ring,
        source: &mut Source<'_>,
    ) -> Result<Published, Misbehaved> {
        let wanted = source.remaining().min(BLOCK);
        let count = wanted.min(self.room(words, ring, wanted)?);
        // A message that is not short goes in pieces: both ends then copy at the same time.
        let piece = if count > WHOLE { PIECE } else { count };
        let mut done = 0;
        while done < count {
            let len = piece.min(count - done);
            let mut ahead = *source;
            let begun = self.copies.is_due(self.tail, len).then(copy::ticks);
            if ring.fill(self.position(), len, &mut ahead, self.copies.method(len)).is_err() {
                return Ok(if done > 0 { Published::Bytes(done) } else { Published::Fault });
            }
            *source = ahead;
            if let Some(begun) = begun {
                self.note_copy(words, ring, len, begun);
            }
            self.publish(words.sender, len);
            done += len;
        }
        Ok(if done > 0 { Published::Bytes(done) } else { Published::Full })
    }

    /// Records a copy that has been timed.
    #[cold]
    fn note_copy(&mut self, words: Words<'_>, ring: &impl Ring, len: usize, begun: u64) {
        let ticks = copy::ticks().wrapping_sub(begun);
        self.copies.note(self.tail, len, ticks, words.receiver.copied.load(Relaxed), ring.len());
    }

    #[inline]
    fn publish(&mut self, sender: &SenderWords, len: usize) {
        self.tail += len as u64;
        sender.tail.swap(self.tail, AcqRel);
        // The sleep number is loaded after this.
        full_fence_after_rmw();
    }

    /// Returns how many bytes there is room for. It loads the receiver's cursor only if `wanted`
    /// bytes do not fit otherwise, or not on the page that is being written to.
    #[inline]
    pub fn room(&mut self, words: Words<'_>, ring: &impl Ring, wanted: usize) -> Result<usize, Misbehaved> {
        let (size, wanted) = (ring.len() as u64, wanted as u64);
        if self.leaves_page(size, wanted) || size - (self.tail - self.head) < wanted {
            let head = words.receiver.head.load(Acquire);
            // L5: the receiver's cursor only moves forward, and never past the sender's.
            if head < self.head || head > self.tail {
                return Err(Misbehaved);
            }
            self.head = head;
            // An empty lane begins anew at its first byte, which is still in the cache. The
            // receiver loads the base only when it sees bytes to read, and the base stays while it
            // has any.
            if head == self.tail && self.position() > 0 {
                self.base = self.tail;
                words.sender.rare.base.store(self.base, Relaxed);
            }
        }
        Ok((size - (self.tail - self.head)) as usize)
    }

    fn position(&self) -> u64 {
        self.tail - self.base
    }

    /// Returns whether so many bytes end behind the page that is being written to, if there is one.
    #[inline]
    fn leaves_page(&self, size: u64, wanted: u64) -> bool {
        // Both are powers of two.
        let (at, page) = (self.position(), PAGE.min(size));
        at > 0 && ((at - 1) & (page - 1)) + 1 + wanted > page
    }

    /// Returns whether the receiver must be notified of published bytes.
    #[inline]
    pub fn notify(&mut self, words: Words<'_>) -> bool {
        self.sleeps.notify(&words.receiver.rare.sleep)
    }

    /// Announces that the sender is about to sleep until there is room. It must check for room once
    /// more before it sleeps.
    pub fn announce_sleep(&mut self, words: Words<'_>) {
        self.sleeps.announce(&words.sender.rare.sleep);
    }

    /// Ends the sleep, or takes its announcement back.
    #[inline]
    pub fn awake(&self, words: Words<'_>) {
        Sleeps::end(&words.sender.rare.sleep);
    }
}

/// The receiver's end.
#[derive(Debug, Default)]
pub struct Consumer {
    head: u64,
    tail: u64,
    sleeps: Sleeps,
    copies: Sampler,
}

impl Consumer {
    /// Returns a consumer of an unused lane.
    pub fn new() -> Consumer {
        Consumer::default()
    }

    /// Returns how many bytes there are to read by the sender's cursor as it was loaded last.
    #[inline]
    pub fn known(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Returns how many bytes there are to read.
    #[inline]
    pub fn available(&mut self, words: Words<'_>, ring: &impl Ring) -> Result<usize, Misbehaved> {
        let tail = words.sender.tail.load(Acquire);
        // L5: the sender's cursor only moves forward, and never further than the ring is long.
        if tail < self.tail || tail - self.head > ring.len() as u64 {
            return Err(Misbehaved);
        }
        self.tail = tail;
        Ok(self.known())
    }

    /// Reads into `sink`, and returns how many bytes there were.
    #[inline]
    pub fn read(
        &mut self,
        words: Words<'_>,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
    ) -> Result<usize, ReadError> {
        read_blocks(sink, |sink| self.read_block(words, ring, sink))
    }

    #[inline]
    fn read_block(
        &mut self,
        words: Words<'_>,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
    ) -> Result<usize, ReadError> {
        if self.known() < sink.remaining() {
            self.available(words, ring)?;
        }
        let count = self.known().min(sink.remaining()).min(BLOCK);
        let piece = if count > WHOLE { PIECE } else { count };
        let mut done = 0;
        while done < count {
            let len = piece.min(count - done);
            let begun = self.copies.is_due(self.head, len).then(copy::ticks);
            self.copy(words, ring, len, sink)?;
            if let Some(begun) = begun {
                let ticks = copy::ticks().wrapping_sub(begun);
                words.receiver.copied.store(self.copies.report(self.head, len, ticks), Relaxed);
            }
            self.head += len as u64;
            words.receiver.head.swap(self.head, AcqRel);
            // The sender's sleep number is loaded after this.
            full_fence_after_rmw();
            done += len;
        }
        Ok(done)
    }

    /// Copies [`known`](Self::known) bytes without reading them, as far as `sink` has room.
    #[inline]
    pub fn peek_known(
        &self,
        words: Words<'_>,
        ring: &impl Ring,
        sink: &mut Sink<'_>,
    ) -> Result<usize, ReadError> {
        let count = self.known().min(sink.remaining());
        if count > 0 {
            self.copy(words, ring, count, sink)?;
        }
        Ok(count)
    }

    /// Copies `len` known bytes at the cursor. `tail`, loaded with acquire, brought `base` along.
    #[inline]
    fn copy(
        &self,
        words: Words<'_>,
        ring: &impl Ring,
        len: usize,
        sink: &mut Sink<'_>,
    ) -> Result<(), ReadError> {
        // L5: the base was the tail of an empty lane, so nothing before it is unread.
        let at = self.head.checked_sub(words.sender.rare.base.load(Relaxed)).ok_or(Misbehaved)?;
        Ok(ring.drain(at, len, sink)?)
    }

    /// Returns whether the sender must be notified of the room that was made.
    #[inline]
    pub fn notify(&mut self, words: Words<'_>) -> bool {
        self.sleeps.notify(&words.sender.rare.sleep)
    }

    /// Returns whether [`notify`](Self::notify) would be true now.
    #[inline]
    pub fn is_notification_due(&self, words: Words<'_>) -> bool {
        self.sleeps.due(&words.sender.rare.sleep).is_some()
    }

    /// Announces that the receiver is about to sleep until there are bytes. It must check for some
    /// once more before it sleeps.
    pub fn announce_sleep(&mut self, words: Words<'_>) {
        self.sleeps.announce(&words.receiver.rare.sleep);
    }

    /// Ends the sleep, or takes its announcement back.
    #[inline]
    pub fn awake(&self, words: Words<'_>) {
        Sleeps::end(&words.receiver.rare.sleep);
    }
}
