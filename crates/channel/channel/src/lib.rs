//! Messages with descriptors between processes of one host: 0 B to 64 MiB with 0 to 253
//! descriptors. Messages arrive whole, and in order for each sender. Many senders may share one
//! receiver, and no send fails with EMSGSIZE.
//!
//! A [`Receiver`] listens at a path, or [`pair`] makes it together with its only sender. A
//! [`Sender`] connects. A [`Publisher`] sends each message to any number of [`Subscriber`]s, and a
//! [`Client`] sends requests to a [`Server`]. Bytes go through a ring in memory that the two share;
//! descriptors and doorbells go over a Unix socket. Neither end trusts the other. `docs/channel.md`
//! describes its use, and `docs/channel-protocol.md` the protocol. With the feature `tokio`, `Async`
//! has the ends for tasks of tokio.
//!
//! ```
//! use shunt_channel::{Event, Message, Wait, pair};
//!
//! let (mut sender, mut receiver) = pair()?;
//! sender.send(b"hello", &[], Wait::Forever)?;
//! let mut message = Message::new();
//! let event = receiver.receive(&mut message, Wait::Forever)?;
//! assert!(matches!(event, Event::Message { .. }));
//! assert_eq!(message.bytes(), b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

#[cfg(feature = "tokio")]
mod asynchronous;
mod borrowed;
mod call;
mod error;
mod frame;
mod incoming;
mod listener;
mod message;
mod notice;
mod publisher;
mod receiver;
mod sender;
mod subscriber;
mod wait;

#[cfg(feature = "tokio")]
pub use asynchronous::Async;
pub use borrowed::Borrowed;
pub use call::{CallError, CallOpenError, Client, Numbered, Server};
pub use error::{Cause, OpenError, ReceiveError, SendError};
pub use frame::{MAX_DESCRIPTORS, MAX_MESSAGE};
pub use message::Message;
pub use publisher::{Attended, Publisher, PublisherOptions, SubscriberId, SubscriberState, SubscriberStatus};
pub use receiver::{Event, Options, Receiver, SenderId};
pub use sender::{Loan, Sender, SenderOptions, Uncommitted};
pub use shunt_sys::seqpacket::Credentials;
pub use subscriber::{Publication, SubscribeError, Subscriber};
pub use wait::Wait;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// The Rust code in the documentation, as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../../docs/channel.md")]
struct Documentation;

/// Returns a sender and a receiver that are connected only to each other.
pub fn pair() -> Result<(Sender, Receiver), OpenError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|error| OpenError::of("making a pair of sockets", error))?;
    let mut receiver = Receiver::new(Options::default())?;
    receiver.adopt(theirs)?;
    Ok((Sender::over(ours)?, receiver))
}
