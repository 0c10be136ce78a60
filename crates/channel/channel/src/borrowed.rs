//! Messages in memory that their sender lends: the receiver reads them in place, and gives the
//! memory back when it drops them.
//!
//! ```text
//! unknown ── the sender passes pages ──> free ── a frame names the slot's next use ──> borrowed
//!                                         ^                                              │
//!                                         └── dropped: the receiver's word = that use <──┘
//! ```
//!
//! The sender can write the memory at any time, also while it is borrowed. So a [`Borrowed`] has no
//! slice of it: bytes are copied out once, and then checked and used.
//!
//! A publisher that needs the memory *revokes* a message while it is borrowed, and the next use of
//! the slot begins before the end of this one. [`Borrowed::is_intact`] shows that.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use shunt_ring::split::pages::{ShownPages, ShownSlot};
use shunt_ring::split::{MAX_SLOTS, ReceiveMemory};
use shunt_sys::memfd;

use crate::error::Cause;
use crate::frame::{MAX_MESSAGE, Use};
use crate::incoming::refusal;
use crate::message::Message;
use crate::notice;

/// The most bytes that a sender may lend in all, which the receiver maps.
const MOST: usize = 8 * MAX_MESSAGE;
/// The length of a slot is a multiple of this.
const UNIT: usize = 4096;

/// The slots that one sender lends.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    slots: Vec<Known>,
    bytes: usize,
}

#[derive(Debug)]
struct Known {
    home: Arc<Home>,
    /// The number of the last use that a frame has named.
    seen: u64,
    /// The number of its message, if a publisher has sent it.
    message: Option<u64>,
}

/// A slot, and the way back to its sender.
#[derive(Debug)]
struct Home {
    slot: ShownSlot,
    index: usize,
    lane: Arc<ReceiveMemory>,
    /// Gone once the sender has ended.
    socket: Weak<OwnedFd>,
}

impl Slots {
    /// Maps memory of `slots` slots. Checks everything before it touches the memory.
    pub(crate) fn add(
        &mut self,
        lane: &Arc<ReceiveMemory>,
        socket: &Arc<OwnedFd>,
        slots: u32,
        bytes: u64,
        memory: OwnedFd,
    ) -> Result<(), Cause> {
        let impossible = Cause::Misbehaved("it lends memory of an impossible size");
        let slots = slots as usize;
        let len = usize::try_from(bytes).map_err(|_| impossible)?;
        let each = len.checked_div(slots).ok_or(impossible)?;
        if each == 0 || each * slots != len || !each.is_multiple_of(UNIT) || each > MAX_MESSAGE {
            return Err(impossible);
        }
        if self.slots.len() + slots > MAX_SLOTS || len > MOST - self.bytes {
            return Err(Cause::Misbehaved("it lends more memory than any sender needs"));
        }
        memfd::verify_whole(&memory, len).map_err(|error| Cause::Misbehaved(refusal(error)))?;
        let pages = ShownPages::map(&memory, slots, len).ok_or(Cause::NoMemory)?;
        self.bytes += len;
        let first = self.slots.len();
        self.slots.extend((0..slots).filter_map(|at| pages.slot(at)).enumerate().map(|(at, slot)| Known {
            home: Arc::new(Home {
                slot,
                index: first + at,
                lane: lane.clone(),
                socket: Arc::downgrade(socket),
            }),
            seen: 0,
            message: None,
        }));
        Ok(())
    }

    /// Returns whether the memory of this use is known.
    pub(crate) fn has(&self, of: Use) -> bool {
        self.slots.len() > of.slot as usize
    }

    /// Begins a use that a frame has named: the slot's next one, after the end of the one before. A
    /// message of a publisher, which has a number, may have been revoked before its use has ended.
    pub(crate) fn take(&mut self, of: Use, len: usize, message: Option<u64>) -> Result<Lent, Cause> {
        let known = self.slots.get_mut(of.slot as usize);
        let known = known.ok_or(Cause::Misbehaved("a message in memory that it does not lend"))?;
        let home = &known.home;
        let word = home.lane.slot(home.index).ok_or(Cause::Misbehaved("a slot without a word"))?;
        let is_free = word.last_over() == known.seen || message.is_some() && known.is_revoked();
        if Some(of.number) != known.seen.checked_add(1) || !is_free {
            return Err(Cause::Misbehaved("a message in memory that is still borrowed"));
        }
        if len > home.slot.len() {
            return Err(Cause::Misbehaved("a message that is longer than its memory"));
        }
        known.seen = of.number;
        known.message = message;
        Ok(Lent { home: known.home.clone(), number: of.number, len, message })
    }
}

impl Known {
    /// Returns whether the message of the last use was revoked.
    fn is_revoked(&self) -> bool {
        self.message.is_some_and(|message| self.home.has_revoked(message))
    }
}

impl Home {
    /// Returns whether the publisher has revoked a message: its memory may have been written since.
    #[inline]
    fn has_revoked(&self, message: u64) -> bool {
        self.lane.words().sender.revoked_before() > message
    }
}

/// One use of a slot; its end gives the slot back.
#[derive(Debug)]
pub(crate) struct Lent {
    home: Arc<Home>,
    number: u64,
    len: usize,
    /// The number of a publisher's message.
    message: Option<u64>,
}

impl Lent {
    /// Returns whether all that was read of the memory until now is of this message, if the sender
    /// is correct.
    #[inline]
    pub(crate) fn is_intact(&self) -> bool {
        !self.message.is_some_and(|message| self.home.has_revoked(message))
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Copies the bytes from `offset` on, as many as there are and as have room. Returns how many.
    #[inline]
    pub(crate) fn copy(&self, offset: usize, into: &mut [u8]) -> usize {
        let count = self.len.saturating_sub(offset).min(into.len());
        if self.home.slot.copy(offset, &mut into[..count]) { count } else { 0 }
    }
}

impl Drop for Lent {
    #[inline]
    fn drop(&mut self) {
        let Home { lane, index, socket, .. } = &*self.home;
        let Some(word) = lane.slot(*index) else { return };
        if word.release(self.number, lane.words()).is_some()
            && let Some(socket) = socket.upgrade()
        {
            // A sender that has gone needs none.
            let _ = notice::ring(&*socket);
        }
    }
}

/// A message that the receiver reads in place. Its memory goes back to the sender when this is
/// dropped, cleared, or used for the next message.
///
/// The sender is able to change lent bytes at any time, although a correct sender does not. So the
/// bytes are copied out before they are checked and used: [`copy_to`](Borrowed::copy_to),
/// [`to_vec`](Borrowed::to_vec), [`byte`](Borrowed::byte). Code that trusts the sender reads through
/// [`as_ptr`](Borrowed::as_ptr).
///
/// ```
/// use shunt_channel::{Borrowed, Wait, pair};
///
/// let (mut sender, mut receiver) = pair()?;
/// let mut loan = sender.loan(1 << 20, Wait::Forever)?;
/// loan.fill(7);
/// sender.commit(loan, &[], Wait::Forever)?;
/// let mut borrowed = Borrowed::new();
/// receiver.borrow(&mut borrowed, Wait::Forever)?;
/// assert!(borrowed.is_in_place() && borrowed.len() == 1 << 20);
/// let mut head = [0; 16];
/// assert_eq!(borrowed.copy_to(0, &mut head), 16);
/// assert_eq!(head, [7; 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Borrowed(Message);

impl Borrowed {
    /// Returns an empty one.
    pub fn new() -> Borrowed {
        Borrowed::default()
    }

    pub(crate) fn message(&mut self) -> &mut Message {
        &mut self.0
    }

    /// Returns the number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.lent.as_ref().map_or_else(|| self.0.bytes().len(), Lent::len)
    }

    /// Returns whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether the bytes are in the sender's memory: nothing was copied.
    pub fn is_in_place(&self) -> bool {
        self.0.lent.is_some() || self.0.is_in_place()
    }

    /// Returns whether the sender is able to change the bytes.
    pub fn may_change(&self) -> bool {
        self.0.lent.is_some()
    }

    /// Returns whether all that was read until now is of this message, if the sender is correct. A
    /// [publisher](crate::Publisher) takes memory back that it needs; then this is `false`, and what
    /// was computed from the bytes is discarded.
    #[inline]
    pub fn is_intact(&self) -> bool {
        self.0.lent.as_ref().is_none_or(Lent::is_intact)
    }

    /// Copies the bytes from `offset` on, as many as there are and as have room. Returns how many.
    #[inline]
    pub fn copy_to(&self, offset: usize, into: &mut [u8]) -> usize {
        match &self.0.lent {
            Some(lent) => lent.copy(offset, into),
            None => {
                let rest = self.0.bytes().get(offset..).unwrap_or_default();
                let count = rest.len().min(into.len());
                into[..count].copy_from_slice(&rest[..count]);
                count
            }
        }
    }

    /// Returns a copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(0, &mut bytes);
        bytes
    }

    /// Returns one byte as it is now. A later call may return another one.
    #[inline]
    pub fn byte(&self, index: usize) -> Option<u8> {
        match &self.0.lent {
            Some(lent) if index < lent.len => Some(lent.home.slot.bytes()[index].get()),
            Some(_) => None,
            None => self.0.bytes().get(index).copied(),
        }
    }

    /// Returns the address of the first byte. All bytes can be read there until this is dropped,
    /// cleared, or used for the next message. Another process may change them meanwhile if
    /// [`may_change`](Borrowed::may_change), so a slice of them relies on the sender.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.0.lent.as_ref().map_or_else(|| self.0.bytes().as_ptr(), |lent| lent.home.slot.as_ptr())
    }

    /// Returns the descriptors of the message, as [`Message::descriptors`] does.
    pub fn descriptors(&self) -> &[OwnedFd] {
        self.0.descriptors()
    }

    /// Takes the descriptors of the message.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        self.0.take_descriptors()
    }

    /// Gives the memory back to the sender, and closes the descriptors.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}
