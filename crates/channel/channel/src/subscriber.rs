//! The end that receives from a publisher.
//!
//! It is a receiver of one sender, whose messages are numbered. A message that the publisher has
//! revoked before it was read counts as missed, as one that was never sent.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use shunt_sys::Errno;
use shunt_sys::seqpacket::{self, Credentials, peer_credentials};
use thiserror::Error;

use crate::borrowed::Borrowed;
use crate::error::{Cause, OpenError, ReceiveError};
use crate::frame::MAX_MESSAGE;
use crate::message::Message;
use crate::notice;
use crate::receiver::{Event, Options, Receiver};
use crate::wait::{PAUSE, Wait};

/// Messages that were revoked, after which the time-out of a call applies.
const ASIDE: u32 = 64;

/// A message of a publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Publication {
    /// The number of the message, from 0 on.
    pub number: u64,
    /// How many messages between the last one that was received and this one were missed. 0 for the
    /// first one.
    pub missed: u64,
}

/// The reason why a subscriber has no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SubscribeError {
    /// There is no message now, or none in time.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// The publisher has closed or has died, or does not accept this subscriber.
    #[error("the publisher has gone")]
    Gone,
    /// The publisher broke the protocol or the limit of this subscriber.
    #[error("the publisher {0}")]
    Misbehaved(Cause),
}

/// The end that receives from a [`Publisher`](crate::Publisher).
#[derive(Debug)]
pub struct Subscriber {
    receiver: Receiver,
    publisher: Option<Credentials>,
    /// The number of the last message that was received.
    last: Option<u64>,
    missed: u64,
    /// Why the publisher has ended.
    ended: Option<SubscribeError>,
}

impl Subscriber {
    /// Connects to the publisher that listens at `path`. Waits while its queue of new subscribers is
    /// full.
    pub fn connect(path: impl AsRef<Path>, wait: Wait) -> Result<Subscriber, OpenError> {
        Subscriber::connect_with(path, MAX_MESSAGE, wait)
    }

    /// Connects as [`connect`](Subscriber::connect) does, and accepts messages of at most
    /// `max_message` bytes.
    pub fn connect_with(
        path: impl AsRef<Path>,
        max_message: usize,
        wait: Wait,
    ) -> Result<Subscriber, OpenError> {
        let path = path.as_ref().as_os_str().as_bytes();
        loop {
            match seqpacket::connect(path) {
                Ok(socket) => return Subscriber::over_with(socket, max_message),
                Err(Errno::AGAIN) if !wait.is_over() => std::thread::sleep(PAUSE),
                Err(error) => return Err(OpenError::of("connecting to the publisher", error)),
            }
        }
    }

    /// Returns a subscriber over a SOCK_SEQPACKET socket whose other end a publisher has, or will
    /// have.
    pub fn over(socket: impl Into<OwnedFd>) -> Result<Subscriber, OpenError> {
        Subscriber::over_with(socket, MAX_MESSAGE)
    }

    fn over_with(socket: impl Into<OwnedFd>, max_message: usize) -> Result<Subscriber, OpenError> {
        let socket = socket.into();
        notice::subscribe(&socket).map_err(|error| OpenError::of("subscribing", error))?;
        let publisher = peer_credentials(&socket).ok();
        let mut receiver = Receiver::new(Options { max_senders: 1, max_message, ..Options::default() })?;
        receiver.adopt_publisher(socket)?;
        Ok(Subscriber { receiver, publisher, last: None, missed: 0, ended: None })
    }

    /// Receives the next message into `message`, whose memory is reused. All of its bytes are of this
    /// message.
    pub fn receive(&mut self, message: &mut Message, wait: Wait) -> Result<Publication, SubscribeError> {
        self.next(message, wait, Message::settle)
    }

    /// Receives as [`receive`](Subscriber::receive) does, and does not copy a long message. The
    /// publisher may take its memory back: see [`Borrowed::is_intact`]. Otherwise it goes back with
    /// the next borrow into `borrowed`, or when `borrowed` is cleared or dropped.
    pub fn borrow(&mut self, borrowed: &mut Borrowed, wait: Wait) -> Result<Publication, SubscribeError> {
        borrowed.clear();
        let is_intact = |message: &mut Message| message.lent.as_ref().is_none_or(|lent| lent.is_intact());
        self.next(borrowed.message(), wait, is_intact)
    }

    /// Returns the next message that `accept` accepts: it was not revoked.
    fn next(
        &mut self,
        message: &mut Message,
        wait: Wait,
        accept: impl Fn(&mut Message) -> bool,
    ) -> Result<Publication, SubscribeError> {
        for aside in 0.. {
            if let Some(ended) = self.ended {
                message.clear();
                return Err(ended);
            }
            if aside >= ASIDE && wait.is_over() {
                self.receiver.nudge()?;
                let is_never = wait == Wait::Never;
                return Err(if is_never { ReceiveError::WouldBlock } else { ReceiveError::TimedOut }.into());
            }
            match self.receiver.take_next(message, wait) {
                Ok(Event::Message { .. }) => {}
                Ok(Event::Ended { cause: Cause::Closed | Cause::Midway, .. })
                | Err(ReceiveError::NoSenders) => {
                    self.ended = Some(SubscribeError::Gone);
                    continue;
                }
                Ok(Event::Ended { cause, .. }) => {
                    self.ended = Some(SubscribeError::Misbehaved(cause));
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            let number = message.number.unwrap_or_default();
            if accept(message) {
                let missed = self.last.map_or(0, |last| number - last - 1);
                self.missed += missed;
                self.last = Some(number);
                return Ok(Publication { number, missed });
            }
            message.clear();
        }
        unreachable!("the loop has no end")
    }

    /// Returns how many messages were missed so far, without those before the first that was received.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// Returns the credentials of the publisher, as the kernel recorded them when it began to listen.
    pub fn publisher(&self) -> Option<Credentials> {
        self.publisher
    }
}

impl AsFd for Subscriber {
    /// Returns a descriptor for poll. It becomes readable when a [`receive`](Subscriber::receive) that
    /// returned [`ReceiveError::WouldBlock`] should be tried again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }
}
