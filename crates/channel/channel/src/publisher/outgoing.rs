//! One subscriber on the publisher's side: what it was sent, what it has, and what it lacks.

use std::os::fd::{BorrowedFd, OwnedFd};

use shunt_sys::seqpacket::{Credentials, peer_credentials};

use super::memory::Memory;
use super::{History, Kept, SubscriberId, SubscriberState, SubscriberStatus};
use crate::error::{OpenError, SendError};
use crate::frame::Use;
use crate::sender::Sender;

/// One subscriber.
#[derive(Debug)]
pub(super) struct Outgoing {
    id: SubscriberId,
    sender: Sender,
    credentials: Option<Credentials>,
    state: SubscriberState,
    /// The number of the next message for it.
    next: u64,
    /// The number that it gives to the next message, once it was sent one.
    expected: Option<u64>,
    missed: u64,
    revoked: u64,
    /// The long messages that it has.
    held: Vec<Held>,
    /// For each file of the publisher, the subscriber's index of the first slot, if it was passed.
    files: Vec<Option<usize>>,
    /// The number of the last use of each slot, by the subscriber's indexes.
    uses: Vec<u64>,
}

/// A long message that was sent and has not been given back.
#[derive(Clone, Copy, Debug)]
struct Held {
    message: u64,
    /// The publisher's index of the slot, and the subscriber's.
    slot: usize,
    index: usize,
    number: u64,
}

impl Outgoing {
    /// Greets a subscriber, whose first message is `next`.
    pub(super) fn new(
        id: SubscriberId,
        socket: OwnedFd,
        ring_bytes: usize,
        next: u64,
    ) -> Result<Outgoing, OpenError> {
        let credentials = peer_credentials(&socket).ok();
        Ok(Outgoing {
            id,
            sender: Sender::to_subscriber(socket, ring_bytes)?,
            credentials,
            state: SubscriberState::Current,
            next,
            expected: None,
            missed: 0,
            revoked: 0,
            held: Vec::new(),
            files: Vec::new(),
            uses: Vec::new(),
        })
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.sender.socket()
    }

    pub(super) fn state(&self) -> SubscriberState {
        self.state
    }

    /// Returns the status. The first message of the history is `first`.
    pub(super) fn status(&self, first: u64) -> SubscriberStatus {
        SubscriberStatus {
            id: self.id,
            state: self.state,
            missed: self.missed + first.saturating_sub(self.next),
            revoked: self.revoked,
            credentials: self.credentials,
        }
    }

    /// Returns whether a message may find room, without a system call.
    #[inline]
    pub(super) fn is_worth_trying(&mut self, memory: &mut Memory, limit: usize) -> bool {
        if self.state == SubscriberState::Current {
            return true;
        }
        // An error is found again by the try.
        let has_room = self.sender.may_have_room().unwrap_or(true);
        has_room
            && (self.held.len() < limit || self.take_what_is_over(memory).is_err() || self.held.len() < limit)
    }

    /// Sends what the subscriber lacks, as far as there is room.
    pub(super) fn deliver(
        &mut self,
        history: &History,
        memory: &mut Memory,
        limit: usize,
    ) -> Result<(), SendError> {
        loop {
            let first = history.first();
            if self.next < first {
                self.missed += first - self.next;
                self.next = first;
            }
            let Some(message) = history.message(self.next) else {
                if self.state == SubscriberState::Behind {
                    self.sender.stop_asking();
                    self.state = SubscriberState::Current;
                }
                return Ok(());
            };
            match self.send(message, memory, limit) {
                Ok(()) => {
                    self.next += 1;
                    self.expected = Some(self.next);
                }
                Err(SendError::WouldBlock) => {
                    self.state = SubscriberState::Behind;
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends the next message, or has the subscriber ring when there may be room for it.
    fn send(&mut self, message: &Kept, memory: &mut Memory, limit: usize) -> Result<(), SendError> {
        let number = (self.expected != Some(self.next)).then_some(self.next);
        let (slot, len) = match message {
            Kept::Copied(bytes) => return self.sender.publish_copied(number, bytes),
            Kept::Lent { slot, len } => (*slot, *len),
        };
        if self.held.len() >= limit {
            self.take_what_is_over(memory)?;
        }
        if self.held.len() >= limit {
            let held = &self.held;
            self.sender.ask_for_doorbell(|sender| {
                for held in held {
                    if held.is_over(sender)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            })?;
            self.take_what_is_over(memory)?;
        }
        let index = self.pass(slot, memory)?;
        let of = Use { slot: index as u32, number: self.uses[index] + 1 };
        self.sender.publish_lent(number, of, len as u32)?;
        self.uses[index] = of.number;
        self.held.push(Held { message: self.next, slot, index, number: of.number });
        memory.add_user(slot);
        Ok(())
    }

    /// Passes the file of a slot if it was not passed, and returns the subscriber's index of the slot.
    fn pass(&mut self, slot: usize, memory: &Memory) -> Result<usize, SendError> {
        let (number, file) = memory.file_of(slot);
        if self.files.len() <= number {
            self.files.resize(number + 1, None);
        }
        let first = match self.files[number] {
            Some(first) => first,
            None => {
                use std::os::fd::AsFd;
                self.sender.pass_slots(file.slots, file.bytes, file.fd.as_fd())?;
                let first = self.uses.len();
                self.files[number] = Some(first);
                self.uses.resize(first + file.slots, 0);
                first
            }
        };
        Ok(first + slot - file.first)
    }

    /// Takes the slots that the subscriber has given back.
    pub(super) fn take_what_is_over(&mut self, memory: &mut Memory) -> Result<(), SendError> {
        let mut at = 0;
        while at < self.held.len() {
            if self.held[at].is_over(&self.sender)? {
                memory.remove_user(self.held.swap_remove(at).slot);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Returns the oldest message that it has in a slot for `len` bytes.
    pub(super) fn oldest(&self, memory: &Memory, len: usize) -> Option<u64> {
        self.held.iter().filter(|held| memory.fits(held.slot, len)).map(|held| held.message).min()
    }

    /// Revokes a message, and those before it, if the subscriber has it.
    pub(super) fn revoke(&mut self, message: u64, memory: &mut Memory) {
        if !self.held.iter().any(|held| held.message == message) {
            return;
        }
        // Before any of its slots is written again.
        self.sender.revoke_before(message + 1);
        let before = self.held.len();
        self.held.retain(|held| {
            let stays = held.message > message;
            if !stays {
                memory.remove_user(held.slot);
            }
            stays
        });
        self.revoked += (before - self.held.len()) as u64;
    }

    /// Gives up everything that the subscriber has, because it has ended.
    pub(super) fn release_all(mut self, memory: &mut Memory) {
        self.held.drain(..).for_each(|held| memory.remove_user(held.slot));
    }

    /// Takes the subscriber's notices.
    pub(super) fn hear(&mut self) -> Result<(), SendError> {
        self.sender.hear()
    }
}

impl Held {
    /// Returns whether the subscriber has given it back.
    fn is_over(&self, sender: &Sender) -> Result<bool, SendError> {
        let over = sender.last_over(self.index);
        // Only the last use of a slot can be under way.
        if over > self.number { Err(SendError::Misbehaved) } else { Ok(over == self.number) }
    }
}
