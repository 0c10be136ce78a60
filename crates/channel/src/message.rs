//! A message as it is received, in memory that can be used again for the next.

use std::os::fd::OwnedFd;

use shunt_sys::memfd::Final;

/// Empty, or the last message received into it.
#[derive(Debug, Default)]
pub struct Message {
    /// Longer than the message, once a longer one was received.
    pub(crate) buffer: Vec<u8>,
    pub(crate) len: usize,
    /// Where the bytes are instead, if they came in memory of their own.
    pub(crate) memory: Option<Final>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Message {
    /// An empty one.
    pub fn new() -> Message {
        Message::default()
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Some(memory) => memory,
            None => &self.buffer[..self.len],
        }
    }

    /// Whether its bytes are where the sender wrote them: nothing was copied, and nobody can change them.
    pub fn is_in_place(&self) -> bool {
        self.memory.is_some()
    }

    /// Its descriptors, close-on-exec. What is not taken out is closed with the next message.
    pub fn descriptors(&self) -> &[OwnedFd] {
        &self.descriptors
    }

    /// Takes its descriptors out.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors)
    }

    /// Forgets the message, and keeps its memory for the next.
    pub fn clear(&mut self) {
        self.len = 0;
        self.memory = None;
        self.descriptors.clear();
    }
}

/// Makes `buffer` at least `len` bytes long. What was in it is lost, so that pages which nothing has been written to
/// need not be there: a sender that announces more than it sends costs address space.
pub(crate) fn make_room(buffer: &mut Vec<u8>, len: usize) {
    if buffer.len() < len {
        *buffer = Vec::new();
        *buffer = vec![0; len.next_power_of_two()];
    }
}
