//! Messages with descriptors between processes of one host: 0 B to 64 MiB with 0 to 253 descriptors, whole, in order for
//! each sender, many senders to one receiver, never EMSGSIZE.
//!
//! A [`Receiver`] listens at a path, or is made together with its only sender by [`pair`]. A [`Sender`] connects. Bytes go
//! through a ring in memory that the two share, descriptors and doorbells over a Unix socket beside it. Neither end trusts
//! the other: see `docs/channel.md` for how it is used, and `docs/channel-protocol.md` for what is on the wire.
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

mod error;
mod frame;
mod incoming;
mod message;
mod notice;
mod receiver;
mod sender;
mod wait;

pub use error::{Cause, OpenError, ReceiveError, SendError};
pub use frame::{MAX_DESCRIPTORS, MAX_MESSAGE};
pub use message::Message;
pub use receiver::{Event, Options, Receiver, SenderId};
pub use sender::Sender;
pub use shunt_sys::seqpacket::Credentials;
pub use wait::Wait;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// The Rust of the documentation, for the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/channel.md")]
struct Documentation;

/// A sender and a receiver of each other only.
pub fn pair() -> Result<(Sender, Receiver), OpenError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|error| OpenError::of("making a pair of sockets", error))?;
    let mut receiver = Receiver::new(Options::default())?;
    receiver.adopt(theirs)?;
    Ok((Sender::over(ours)?, receiver))
}
