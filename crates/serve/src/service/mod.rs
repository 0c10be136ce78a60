//! A service as an engine sees it: how long is the message that begins here, what is to be done with it, and what is
//! answered when it cannot be served.

pub mod builtin;
pub mod file;
#[allow(unsafe_code)]
mod native;
pub mod trial;
pub mod verifier;

pub use native::{Native, NativeError};

use std::ops::Range;

/// What parses messages and decides about them. The same bytes always get the same answer: a service keeps no state.
pub trait Service: Send + Sync {
    /// For people and metrics.
    fn name(&self) -> &str;

    /// What does not depend on a message.
    fn properties(&self) -> Properties;

    /// The message at the beginning of `bytes`.
    fn parse(&self, bytes: &[u8]) -> Parse;

    /// The reply of a backend at the beginning of `bytes`.
    fn parse_reply(&self, bytes: &[u8]) -> Parse;

    /// What to do with a message. It may be given the first bytes only, and then say [`Verdict::More`].
    fn decide(&self, message: &[u8]) -> Verdict;

    /// What is answered to a message that cannot be served, of which these are the first bytes.
    fn refuse(&self, head: &[u8], why: Refusal) -> Answer;

    /// What a client is told that has just connected.
    fn accepted(&self) -> Answer;

    /// The next part of a message that is split: a message that [`Service::decide`] forwards. None: there are no more.
    fn part(&self, message: &[u8], share: &mut Share) -> Option<Vec<u8>>;

    /// What a client gets of the answer to a part. Asked when all parts are answered, in their order.
    fn join(&self, answer: &[u8], share: &mut Share) -> Joined;
}

/// Which part of a message. `struct shunt_share` in service.h.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Share {
    /// Counted from 0.
    pub index: u32,
    /// Of all parts; known when they are answered.
    pub count: u32,
    /// The service's own.
    pub state: u64,
}

/// What is left of the answer to a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// For the client.
    pub bytes: Vec<u8>,
    /// It is the answer to the whole message, and the others count for nothing.
    pub is_alone: bool,
}

/// What holds for every message of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Bytes of a message or a reply: one that is longer is refused.
    pub max_message: usize,
    /// Backends answer, each message with one reply, in the order of the messages.
    pub replies: bool,
    /// A message may be sent to another backend when its own died before it answered.
    pub retry: bool,
}

/// What is at the beginning of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parse {
    /// A message of so many bytes, of which some may not have arrived.
    Message(usize),
    /// That cannot be told from these bytes.
    More,
    /// Nothing that can be served. Nobody knows where the next message begins.
    Refused(Refusal),
}

/// What to do with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Forget it.
    Drop,
    /// Send it back.
    Echo,
    /// Send it to the backend of this key.
    Forward {
        /// Whose.
        key: Key,
        /// The backend does not answer this message.
        one_way: bool,
    },
    /// Answer with these bytes.
    Reply(Vec<u8>),
    /// Answer with these bytes, if any, and close the connection.
    Close(Vec<u8>),
    /// It cannot be served, but the next one may be: ask [`Service::refuse`] what to answer.
    Refuse(Refusal),
    /// Only the whole message tells.
    More,
    /// Several backends have a share in it: [`Service::part`] has the messages that they get.
    Split,
}

/// By what a backend is found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// By a number.
    Number(u64),
    /// By these bytes of the message.
    Bytes(Range<usize>),
    /// The service has chosen: this one, counted from 0.
    Backend(u64),
}

/// What is sent to a client that did not get what it asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing, and the connection goes on.
    Nothing,
    /// These bytes, and the connection goes on.
    Reply(Vec<u8>),
    /// These bytes, if any, and then the connection is closed.
    Close(Vec<u8>),
}

/// Why a message cannot be served. `enum shunt_refusal` in service.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Refusal {
    /// Not of this protocol.
    Malformed = 1,
    /// Longer than the service takes.
    TooLong,
    /// Of a version of the protocol that is not known.
    UnknownVersion,
    /// Without the field that the service decides by.
    MissingField,
    /// A command that the service does not serve.
    UnknownCommand,
    /// Nested too deeply, or of too many parts.
    TooComplex,
    /// There is no backend for it.
    NoBackend,
    /// It was under way to a backend that is gone.
    BackendGone,
    /// Its backend has not answered in the time that it has.
    NoReply,
}

impl Refusal {
    /// All, in the order of their codes.
    pub const ALL: [Refusal; 9] = [
        Refusal::Malformed,
        Refusal::TooLong,
        Refusal::UnknownVersion,
        Refusal::MissingField,
        Refusal::UnknownCommand,
        Refusal::TooComplex,
        Refusal::NoBackend,
        Refusal::BackendGone,
        Refusal::NoReply,
    ];

    /// For metrics and status.
    pub fn label(self) -> &'static str {
        match self {
            Refusal::Malformed => "malformed",
            Refusal::TooLong => "too-long",
            Refusal::UnknownVersion => "unknown-version",
            Refusal::MissingField => "missing-field",
            Refusal::UnknownCommand => "unknown-command",
            Refusal::TooComplex => "too-complex",
            Refusal::NoBackend => "no-backend",
            Refusal::BackendGone => "backend-gone",
            Refusal::NoReply => "no-reply",
        }
    }

    /// By its code in C. A code that is not known, as of a service that gives rubbish, is malformed.
    pub fn from_code(code: u32) -> Refusal {
        *Refusal::ALL.get((code as usize).wrapping_sub(1)).unwrap_or(&Refusal::Malformed)
    }
}
