//! Messages over `shunt_channel`.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::{Result, bail, ensure};
use shunt_channel::{Borrowed, Event, Message, Options, Receiver, Sender, Wait};
use shunt_sys::memfd;

use super::{Receive, Send, pages};

pub(super) struct Sending(Sender);

impl Sending {
    pub(super) fn connect(path: &Path) -> Result<Sending> {
        Ok(Sending(Sender::connect(path, Wait::Forever)?))
    }
}

impl Send for Sending {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        Ok(self.0.send(bytes, fds, Wait::Forever)?)
    }
}

pub(super) struct Receiving {
    receiver: Receiver,
    message: Message,
    checked: bool,
}

impl Receiving {
    pub(super) fn listen(path: &Path) -> Result<Receiving> {
        let receiver = Receiver::listen(path, Options::default())?;
        Ok(Receiving { receiver, message: Message::new(), checked: false })
    }
}

impl Receive for Receiving {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        match self.receiver.receive(&mut self.message, Wait::Forever)? {
            Event::Message { .. } => {
                fds.append(&mut self.message.take_descriptors());
                let len = self.message.bytes().len();
                // A program uses the message in place, so only the first one is copied, to compare
                // it.
                if !self.checked {
                    self.checked = true;
                    buffer[..len].copy_from_slice(self.message.bytes());
                }
                Ok(len)
            }
            Event::Ended { cause, .. } => bail!("the sender has ended: {cause}"),
        }
    }
}

/// Loans, as a program uses them that makes its messages in place.
pub(super) struct Lending {
    sender: Sender,
    is_filled: bool,
    number: u64,
}

impl Lending {
    pub(super) fn connect(path: &Path, is_filled: bool) -> Result<Lending> {
        Ok(Lending { sender: Sender::connect(path, Wait::Forever)?, is_filled, number: 0 })
    }
}

impl Send for Lending {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut loan = self.sender.loan(bytes.len(), Wait::Forever)?;
        if self.is_filled || self.number == 0 {
            loan.copy_from_slice(bytes);
        }
        if !self.is_filled && self.number > 0 {
            pages::write(&mut loan, self.number);
        }
        self.number += 1;
        Ok(self.sender.commit(loan, fds, Wait::Forever)?)
    }
}

pub(super) struct Borrowing {
    receiver: Receiver,
    message: Borrowed,
    is_filled: bool,
    number: u64,
    part: Vec<u8>,
}

/// Bytes that are read together: they stay in the nearest cache.
const PART: usize = 16 * 1024;

impl Borrowing {
    pub(super) fn listen(path: &Path, is_filled: bool) -> Result<Borrowing> {
        let receiver = Receiver::listen(path, Options::default())?;
        Ok(Borrowing { receiver, message: Borrowed::new(), is_filled, number: 0, part: vec![0; PART] })
    }
}

impl Receive for Borrowing {
    fn receive(&mut self, buffer: &mut Vec<u8>, fds: &mut Vec<OwnedFd>) -> Result<usize> {
        let Event::Message { .. } = self.receiver.borrow(&mut self.message, Wait::Forever)? else {
            bail!("the sender has ended");
        };
        fds.append(&mut self.message.take_descriptors());
        let len = self.message.len();
        if self.number == 0 {
            self.message.copy_to(0, buffer);
        } else if self.is_filled {
            for at in (0..len).step_by(PART) {
                self.message.copy_to(at, &mut self.part);
            }
        } else {
            let read = |at: usize| {
                let mut word = [0; 8];
                (self.message.copy_to(at, &mut word) == 8).then(|| u64::from_ne_bytes(word))
            };
            ensure!(pages::are(len, self.number, read), "a message with other words");
        }
        self.number += 1;
        Ok(len)
    }
}

/// One sealed memfd, sent again and again.
pub(super) struct SendingMemory {
    sender: Sender,
    memory: Option<OwnedFd>,
}

impl SendingMemory {
    pub(super) fn connect(path: &Path) -> Result<SendingMemory> {
        Ok(SendingMemory { sender: Sender::connect(path, Wait::Forever)?, memory: None })
    }
}

impl Send for SendingMemory {
    fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let memory = match self.memory.take() {
            Some(memory) => memory,
            None => memfd::create_with("message", bytes)?,
        };
        let memory = self.memory.insert(memory);
        Ok(self.sender.send_memory(memory, fds, Wait::Forever)?)
    }
}
