//! The errors of the channel, one type for each operation.

use shunt_sys::Errno;
use thiserror::Error;

use crate::frame::{MAX_DESCRIPTORS, MAX_MESSAGE};
use crate::receiver::SenderId;

/// The reason why a sender or a receiver could not be made.
#[derive(Debug, Error)]
#[error("{doing} failed: {error}")]
pub struct OpenError {
    doing: &'static str,
    error: Errno,
}

impl OpenError {
    pub(crate) fn of(doing: &'static str, error: Errno) -> OpenError {
        OpenError { doing, error }
    }

    /// Returns the error number.
    pub fn errno(&self) -> Errno {
        self.error
    }
}

/// The reason why a message was not sent. The receiver gets nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SendError {
    /// There is no room now, and the caller does not wait. Poll the sender for input, then try
    /// again.
    #[error("there is no room for the message now: poll the sender for input, then try again")]
    WouldBlock,
    /// There was no room in time.
    #[error("the receiver made no room in time")]
    TimedOut,
    /// See [`MAX_MESSAGE`].
    #[error("a message has at most {MAX_MESSAGE} bytes, not {0}: send it in parts")]
    TooLong(usize),
    /// See [`MAX_DESCRIPTORS`].
    #[error(
        "a message has at most {MAX_DESCRIPTORS} descriptors, one less beside memory that is sent as it is, not {0}"
    )]
    TooManyDescriptors(usize),
    /// Memory that is sent in place must be a memfd that no process can change any more.
    #[error("the memory could still change: seal the memfd against shrinking, growing and writing")]
    NotFinal,
    /// The receiver has closed, has died, or does not accept this sender.
    #[error("the receiver has gone")]
    Gone,
    /// The receiver wrote a value into the shared memory that no correct receiver writes.
    #[error("the receiver broke the protocol; this sender is of no use any more")]
    Misbehaved,
    /// The receiver shared memory that it could still withdraw.
    #[error(
        "the receiver's memory is not sealed and whole, so it is not read; this sender is of no use any more"
    )]
    Unsealed,
    /// There is no memory for the message.
    #[error("there is no memory for the message")]
    NoMemory,
    /// All memory for loans of this length is in loans that this process holds.
    #[error("too many loans of this length are held: commit or drop one first")]
    TooManyLoans,
    /// The loan is from another sender.
    #[error("the loan is from another sender: commit it with that one")]
    NotLent,
    /// A system call failed unexpectedly.
    #[error("the message could not be sent: {0}")]
    System(Errno),
}

/// The reason why no message was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReceiveError {
    /// There is no message, and the caller does not wait. Poll the receiver for input, then try
    /// again.
    #[error("there is no message now: poll the receiver for input, then try again")]
    WouldBlock,
    /// No message arrived in time.
    #[error("there was no message in time")]
    TimedOut,
    /// All senders have gone, and the receiver does not listen for more.
    #[error("all senders have gone")]
    NoSenders,
    /// This process had no room for all descriptors of a message. The bytes have arrived and the
    /// descriptors have been closed; nothing else is lost.
    #[error(
        "{arrived} of {sent} descriptors of a message arrived, and were closed: raise the limit of open files \
         (ulimit -n), or close some"
    )]
    DescriptorsLost {
        /// The sender of the message.
        from: SenderId,
        /// How many descriptors the message has.
        sent: usize,
        /// How many of them the kernel could install.
        arrived: usize,
    },
    /// A system call failed unexpectedly.
    #[error("no message could be received: {0}")]
    System(Errno),
}

/// The reason why a sender has ended. All messages that it had sent before have been received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Cause {
    /// It has closed, or its process has ended.
    #[error("closed")]
    Closed,
    /// It has closed, or its process has ended, in the middle of a message, of which nothing is
    /// received.
    #[error("closed in the middle of a message")]
    Midway,
    /// It broke the protocol.
    #[error("broke the protocol: {0}")]
    Misbehaved(&'static str),
    /// It sent a message longer than this receiver accepts.
    #[error("sent {0} bytes, which is more than is taken here")]
    TooLong(usize),
    /// There was no memory for its message.
    #[error("no memory for what it sent")]
    NoMemory,
    /// Its socket failed.
    #[error("its socket failed: {0}")]
    Socket(Errno),
}
