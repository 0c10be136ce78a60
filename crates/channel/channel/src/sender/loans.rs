//! Memory that a sender lends: the program writes a message where the receiver reads it.
//!
//! ```text
//!         loan                    commit
//! free ──────────> held by the ───────────> with the ── the receiver's word = this use ──> free
//!   ^              program                  receiver
//!   └── dropped ──────┘
//! ```
//!
//! A slot has a length of a power of two, its *class*. Slots of one file are passed to the receiver
//! once, when a class has none that is free. A class has as many as [`FILE`] bytes have, and at
//! least [`DEPTH`], so that the program writes one while the receiver reads another.

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::event::{EventfdFlags, epoll, eventfd};
use shunt_ring::split::pages::{self, OwnSlot};
use shunt_ring::split::{MAX_SLOTS, SendMemory};
use thiserror::Error;

use super::{Awaited, Sender};
use crate::error::SendError;
use crate::frame::{FIRST, Frame, HEADER, LAST, LENT, MAX_MESSAGE, USE, Use};
use crate::notice;
use crate::wait::Wait;

/// Bytes of the shortest slot.
pub(crate) const LEAST: usize = 4096;
/// Bytes of a file of short slots. Longer slots have files of one slot.
pub(crate) const FILE: usize = 256 * 1024;
/// The least number of slots of a class once there is memory for them.
const DEPTH: usize = 4;
/// The number of classes: from [`LEAST`] to [`MAX_MESSAGE`].
pub(crate) const CLASSES: usize = (MAX_MESSAGE / LEAST).ilog2() as usize + 1;

/// Memory for one message. The program fills it, and [`Sender::commit`] sends it. When it is
/// dropped, the sender has it back.
///
/// It has the bytes of an earlier message. **The receiver can read it before it is sent**: do not
/// write anything into it that the receiver may not know.
#[derive(Debug)]
pub struct Loan {
    /// Empty only while the loan is consumed.
    memory: Option<OwnSlot>,
    slot: usize,
    len: usize,
    returned: Arc<Returned>,
}

/// Loans that were dropped, on the way back to their sender, from any thread.
#[derive(Debug, Default)]
pub(crate) struct Returned {
    state: Mutex<ReturnedState>,
    /// Readable once a loan has come back that the sender waits for.
    eventfd: OnceLock<OwnedFd>,
}

#[derive(Debug, Default)]
struct ReturnedState {
    loans: Vec<(usize, OwnSlot)>,
    /// Whether the next loan writes the eventfd.
    is_awaited: bool,
}

impl Returned {
    fn state(&self) -> MutexGuard<'_, ReturnedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, slot: usize, memory: OwnSlot) {
        let is_awaited = {
            let mut state = self.state();
            state.loans.push((slot, memory));
            std::mem::take(&mut state.is_awaited)
        };
        if let Some(fd) = self.eventfd.get()
            && is_awaited
        {
            // It fails only if the counter is full, and then it is readable.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// Calls `each` with the loans that have come back. Returns whether there were any.
    pub(crate) fn take(&self, mut each: impl FnMut(usize, OwnSlot)) -> bool {
        let mut state = self.state();
        let some = !state.loans.is_empty();
        state.loans.drain(..).for_each(|(slot, memory)| each(slot, memory));
        some
    }

    /// Empties the eventfd, and has the next loan write it if the caller waits for one. The caller then
    /// takes those that have come back before.
    fn expect(&self, is_awaited: bool) {
        if let Some(fd) = self.eventfd.get() {
            let _ = rustix::io::read(fd, &mut [0; 8]);
            if is_awaited {
                self.state().is_awaited = true;
            }
        }
    }
}

impl Loan {
    pub(crate) fn of(memory: OwnSlot, slot: usize, len: usize, returned: &Arc<Returned>) -> Loan {
        Loan { memory: Some(memory), slot, len, returned: returned.clone() }
    }

    /// Takes the memory and the number of its slot, if the loan is from the owner of `returned`.
    pub(crate) fn take(&mut self, returned: &Arc<Returned>) -> Option<(usize, OwnSlot)> {
        let is_lent = Arc::ptr_eq(&self.returned, returned);
        if is_lent { Some((self.slot, self.memory.take()?)) } else { None }
    }

    /// Shortens the message to `len` bytes. Has no effect if it is not longer.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Deref for Loan {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory[..self.len])
    }
}

impl DerefMut for Loan {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.as_mut().map_or(&mut [], |memory| &mut memory[..self.len])
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.returned.put(self.slot, memory);
        }
    }
}

/// The reason why a loan was not sent, and the loan, which can be committed again.
#[derive(Debug, Error)]
#[error("{error}")]
pub struct Uncommitted {
    /// The reason.
    pub error: SendError,
    /// The loan.
    pub loan: Loan,
}

impl From<Uncommitted> for SendError {
    fn from(failed: Uncommitted) -> SendError {
        failed.error
    }
}

#[derive(Debug)]
struct Slot {
    /// `None` while the program holds it.
    memory: Option<OwnSlot>,
    /// The number of its last use.
    number: u64,
}

/// The most bytes of slots, without those of the first file of each class: the other end maps no
/// more than 512 MiB.
pub(crate) const MOST: usize = 256 << 20;

/// The slots of a sender.
#[derive(Debug)]
pub(super) struct Pool {
    slots: Vec<Slot>,
    /// The slots of each class.
    classes: [Vec<usize>; CLASSES],
    /// Bytes of all slots.
    bytes: usize,
    /// The most bytes, without those of the first file of each class.
    most: usize,
    returned: Arc<Returned>,
}

/// The state of the slots from a class on.
enum Found {
    Free(usize),
    /// None is free, and the receiver has some.
    WithReceiver,
    /// The program holds all of them.
    Held,
}

/// Returns the class of slots for `len` bytes, at most [`MAX_MESSAGE`].
pub(crate) fn class_of(len: usize) -> usize {
    (len.max(LEAST).next_power_of_two() / LEAST).ilog2() as usize
}

impl Pool {
    pub(super) fn new(most: usize) -> Pool {
        let classes = std::array::from_fn(|_| Vec::new());
        Pool { slots: Vec::new(), classes, bytes: 0, most: most.min(MOST), returned: Arc::default() }
    }

    /// Returns a free slot of these classes.
    #[inline]
    fn find(
        &mut self,
        memory: &SendMemory,
        classes: impl Iterator<Item = usize> + Clone,
    ) -> Result<Found, SendError> {
        let found = self.find_known(memory, classes.clone())?;
        if matches!(found, Found::Free(_)) || !self.take_returned() {
            return Ok(found);
        }
        self.find_known(memory, classes)
    }

    #[inline]
    fn find_known(
        &self,
        memory: &SendMemory,
        classes: impl Iterator<Item = usize>,
    ) -> Result<Found, SendError> {
        let mut found = Found::Held;
        for index in classes.flat_map(|class| &self.classes[class]) {
            let slot = &self.slots[*index];
            if slot.memory.is_none() {
                continue;
            }
            // Before the receiver's answer, no use is over.
            let over = memory.slot(*index).map_or(0, |word| word.last_over());
            if over == slot.number {
                return Ok(Found::Free(*index));
            }
            // Only the last use can be under way.
            if over > slot.number {
                return Err(SendError::Misbehaved);
            }
            found = Found::WithReceiver;
        }
        Ok(found)
    }

    /// Takes the loans that the program has dropped. Returns whether there were any.
    fn take_returned(&mut self) -> bool {
        self.returned.take(|index, memory| self.slots[index].memory = Some(memory))
    }

    /// Empties the [`eventfd`](Self::eventfd), and has the next loan that is dropped write it if the sender
    /// waits for one.
    pub(super) fn expect_returned(&self, is_awaited: bool) {
        self.returned.expect(is_awaited);
    }

    /// Returns the descriptor that becomes readable then, once there have been loans.
    pub(super) fn eventfd(&self) -> Option<&OwnedFd> {
        self.returned.eventfd.get()
    }

    /// Returns the number of slots and the bytes of each in a further file for a class, if the class
    /// may have one.
    fn next_file(&self, class: usize) -> Option<(usize, usize)> {
        let (each, has) = (LEAST << class, self.classes[class].len());
        let count = (FILE / each).max(1);
        let is_within = self.bytes + count * each <= self.most;
        let may_grow = has == 0 || has < DEPTH && is_within;
        (may_grow && self.slots.len() + count <= MAX_SLOTS).then_some((count, each))
    }

    fn add(&mut self, class: usize, slots: Vec<OwnSlot>) {
        for memory in slots {
            self.bytes += memory.len();
            self.classes[class].push(self.slots.len());
            self.slots.push(Slot { memory: Some(memory), number: 0 });
        }
    }

    fn lend(&mut self, slot: usize, len: usize) -> Loan {
        Loan { memory: self.slots[slot].memory.take(), slot, len, returned: self.returned.clone() }
    }
}

impl Sender {
    /// Returns memory for a message of `len` bytes, which [`commit`](Sender::commit) sends: neither
    /// end copies it. Waits while the receiver has all memory for this length; see
    /// [`SenderOptions::lent_bytes`](super::SenderOptions::lent_bytes). Several loans may be held at
    /// a time.
    pub fn loan(&mut self, len: usize, wait: Wait) -> Result<Loan, SendError> {
        let result = self.check(len, 0).and_then(|()| self.try_loan(len, wait));
        self.note(result)
    }

    fn try_loan(&mut self, len: usize, wait: Wait) -> Result<Loan, SendError> {
        let class = class_of(len);
        self.make_eventfd()?;
        if let Found::Free(slot) = self.pool.find(&self.memory, class..class + 1)? {
            return Ok(self.pool.lend(slot, len));
        }
        if let Some((count, each)) = self.pool.next_file(class) {
            let (file, slots) = pages::create(count, each).map_err(|_| SendError::NoMemory)?;
            self.hand_over(|socket| notice::lend(socket, count, count * each, file.as_fd()), wait)?;
            self.pool.add(class, slots);
        }
        let slot = self.wait_for(Awaited::Loan, wait, |sender| {
            match sender.pool.find(&sender.memory, class..CLASSES)? {
                Found::Free(slot) => Ok(Some(slot)),
                Found::WithReceiver => Ok(None),
                Found::Held => Err(SendError::TooManyLoans),
            }
        })?;
        Ok(self.pool.lend(slot, len))
    }

    /// Makes the descriptor by which another thread wakes this sender when it drops a loan.
    #[inline]
    fn make_eventfd(&mut self) -> Result<(), SendError> {
        if self.pool.eventfd().is_some() {
            return Ok(());
        }
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(SendError::System)?;
        if let Some(ready) = &self.ready {
            let data = epoll::EventData::new_u64(1);
            epoll::add(ready, &fd, data, epoll::EventFlags::IN).map_err(SendError::System)?;
        }
        let _ = self.pool.returned.eventfd.set(fd);
        Ok(())
    }

    /// Sends a loan as a message, with copies of the descriptors. The receiver gets all of it, or
    /// nothing after an error.
    pub fn commit(
        &mut self,
        mut loan: Loan,
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), Uncommitted> {
        let result = self.check(loan.len(), descriptors.len());
        let result = result.and_then(|()| self.try_commit(&mut loan, descriptors, wait));
        self.note(result).map_err(|error| Uncommitted { error, loan })
    }

    fn try_commit(
        &mut self,
        loan: &mut Loan,
        descriptors: &[BorrowedFd<'_>],
        wait: Wait,
    ) -> Result<(), SendError> {
        if !Arc::ptr_eq(&loan.returned, &self.pool.returned) {
            return Err(SendError::NotLent);
        }
        self.abort(wait)?;
        self.make_room(HEADER + USE, wait)?;
        self.pass(descriptors, wait)?;
        let slot = &mut self.pool.slots[loan.slot];
        slot.number += 1;
        slot.memory = loan.memory.take();
        let of = Use { slot: loan.slot as u32, number: slot.number };
        let (total, count) = (loan.len as u32, descriptors.len() as u32);
        let frame = Frame { flags: FIRST | LAST | LENT, len: USE as u32, total, descriptors: count };
        self.put(frame, &of.bytes())
    }
}
