//! A received message, in memory that can be used again for the next one.

use std::os::fd::OwnedFd;

use shunt_sys::memfd::Final;

use crate::borrowed::Lent;

/// The last message received into it, or an empty one.
#[derive(Debug, Default)]
pub struct Message {
    /// May be longer than the message, if a longer one was received before.
    pub(crate) buffer: Vec<u8>,
    pub(crate) len: usize,
    /// The memory of the bytes, if they came in a memfd of their own.
    pub(crate) memory: Option<Final>,
    /// The slot of the bytes, if the sender lends them. Only a [`Borrowed`](crate::Borrowed) keeps
    /// it.
    pub(crate) lent: Option<Lent>,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// The number of a publisher's message.
    pub(crate) number: Option<u64>,
}

impl Message {
    /// Returns an empty message.
    pub fn new() -> Message {
        Message::default()
    }

    /// Returns the bytes of the message.
    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Some(memory) => memory,
            None => &self.buffer[..self.len],
        }
    }

    /// Returns whether the bytes are in the sender's memfd: nothing was copied, and no process can
    /// change them.
    pub fn is_in_place(&self) -> bool {
        self.memory.is_some()
    }

    /// Returns the descriptors of the message, close-on-exec. Those that are not taken are closed
    /// with the next message.
    pub fn descriptors(&self) -> &[OwnedFd] {
        &self.descriptors
    }

    /// Takes the descriptors of the message.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors)
    }

    /// Discards the message, and keeps its memory for the next.
    pub fn clear(&mut self) {
        self.len = 0;
        self.memory = None;
        self.lent = None;
        self.number = None;
        self.descriptors.clear();
    }

    /// Copies bytes that the sender lends, and returns them to it. Returns whether they are those of
    /// the message, and not of a later one.
    #[inline]
    pub(crate) fn settle(&mut self) -> bool {
        let Some(lent) = self.lent.take() else { return true };
        make_room(&mut self.buffer, lent.len());
        self.len = lent.copy(0, &mut self.buffer[..lent.len()]);
        lent.is_intact()
    }
}

/// Makes `buffer` at least `len` bytes long, and discards its content. Pages of a new buffer are
/// allocated at the first write, so a sender that announces more than it sends costs only address
/// space.
pub(crate) fn make_room(buffer: &mut Vec<u8>, len: usize) {
    if buffer.len() < len {
        *buffer = Vec::new();
        *buffer = vec![0; len.next_power_of_two()];
    }
}
