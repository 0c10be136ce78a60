//! The interface between an engine and a service: where a message ends, what to do with it, and how
//! to answer it if it cannot be served.

mod btf;
pub mod builtin;
pub mod contents;
pub mod file;
pub(crate) mod layout;
#[allow(unsafe_code)]
pub(crate) mod native;
pub mod store;
pub mod trial;
pub mod verifier;
mod watched;

pub use native::{Native, NativeError};
pub use watched::{Watched, watch};

use std::ops::Range;
use std::sync::Arc;

use contents::{Stored, Table};
use store::Session;

/// Parses messages and decides about them. The result depends on the bytes and on the service's state
/// only.
pub trait Service: Send + Sync {
    /// Returns the name, for people and metrics.
    fn name(&self) -> &str;

    /// Returns the properties that hold for every message.
    fn properties(&self) -> Properties;

    /// Measures the message at the beginning of `bytes`.
    fn parse(&self, bytes: &[u8]) -> Parse;

    /// Measures the next message of the connection with this state.
    fn parse_in(&self, _session: &Session, bytes: &[u8]) -> Parse {
        self.parse(bytes)
    }

    /// Measures a backend's reply at the beginning of `bytes`.
    fn parse_reply(&self, bytes: &[u8]) -> Parse;

    /// Decides about a message of the connection with this state. If `message` is only its
    /// beginning, the result may be [`Verdict::More`].
    fn decide_in(&self, session: &mut Session, message: &[u8]) -> Verdict;

    /// Returns the answer to a message that cannot be served. `head` is its beginning.
    fn refuse_in(&self, session: &mut Session, head: &[u8], why: Refusal) -> Answer;

    /// Returns the greeting of a client that has just connected.
    fn accepted_in(&self, session: &mut Session) -> Answer;

    /// Is called when a timer of the connection is due. Returns what to send to its client, and
    /// whether to close it.
    fn timer_in(&self, _session: &mut Session, _context: u64) -> Answer {
        Answer::Nothing
    }

    /// Is called when a timer of the service is due. It has no client, so only effects matter.
    fn service_timer(&self, _context: u64) -> Answer {
        Answer::Nothing
    }

    /// Is called when a connection with this state has ended. Only effects matter.
    fn closed_in(&self, _session: &mut Session) -> Answer {
        self.closed();
        Answer::Nothing
    }

    /// Is called once before the first client. Only effects matter.
    fn started(&self) -> Answer {
        Answer::Nothing
    }

    /// Is called with a backend's reply and the beginning of the message that it answers, if
    /// [`Properties::sees_replies`]. Only effects matter.
    fn replied_in(&self, _session: &mut Session, _message: &[u8], _reply: &[u8]) -> Answer {
        Answer::Nothing
    }

    /// Copies an answer from a content store.
    fn stored(&self, stored: Stored) -> Vec<u8> {
        stored.head
    }

    /// Stores a content for a key, or deletes it if it is `None`. Returns false if it does not fit.
    fn put(&self, _table: &Table, _key: &[u8], _content: Option<&[u8]>) -> bool {
        false
    }

    /// Is called when a connection has ended.
    fn closed(&self) {}

    /// Returns the service's own measures: a name, a value, and whether it only grows.
    fn measures(&self) -> Vec<(&'static str, u64, bool)> {
        Vec::new()
    }

    /// Decides about a message as the first of a connection.
    fn decide(&self, message: &[u8]) -> Verdict {
        self.decide_in(&mut Session::default(), message)
    }

    /// Returns the greeting of a connection without looking at its state.
    fn accepted(&self) -> Answer {
        self.accepted_in(&mut Session::default())
    }

    /// Returns the answer to the first message of a connection that cannot be served.
    fn refuse(&self, head: &[u8], why: Refusal) -> Answer {
        self.refuse_in(&mut Session::default(), head, why)
    }

    /// Returns the next part of a split message, which [`Service::decide`] then forwards, or `None`
    /// after the last.
    fn part(&self, message: &[u8], share: &mut Share) -> Option<Vec<u8>>;

    /// Transforms the answer to a part into bytes for the client. The engine calls this in the
    /// order of the parts, once all have an answer.
    fn join(&self, answer: &[u8], share: &mut Share) -> Joined;
}

/// The position in a split message. `struct shunt_share` in service.h has the same layout.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Share {
    /// The index of the part, counted from 0.
    pub index: u32,
    /// The number of parts. Known only when they are joined.
    pub count: u32,
    /// State of the service, from one part to the next.
    pub state: u64,
}

/// The client's share of the answer to a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The bytes for the client.
    pub bytes: Vec<u8>,
    /// These bytes alone are the answer to the whole message; the other parts are ignored.
    pub is_alone: bool,
}

/// Properties that hold for every message of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    /// The most bytes of a message or a reply. Longer ones are refused.
    pub max_message: usize,
    /// Backends send one reply to each message, in the order of the messages.
    pub replies: bool,
    /// A message may be sent to another backend when its own died before it answered.
    pub retry: bool,
    /// The kernel engine sends the service's own answers itself.
    pub answers: bool,
    /// [`Service::replied_in`] gets the replies of backends.
    pub sees_replies: bool,
}

/// The result of parsing the beginning of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parse {
    /// A message of this many bytes, some of which may not have arrived yet.
    Message(usize),
    /// More bytes are needed to find the length.
    More,
    /// The bytes cannot be served. The beginning of the next message is unknown.
    Refused(Refusal),
}

/// A service's decision about a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Forget it.
    Drop,
    /// Send it back.
    Echo,
    /// Send it to the backend of this key.
    Forward {
        /// The key that selects the backend.
        key: Key,
        /// The backend does not answer this message.
        one_way: bool,
    },
    /// Answer with these bytes.
    Reply(Vec<u8>),
    /// Answer with these bytes, if any, and close the connection.
    Close(Vec<u8>),
    /// Refuse it: [`Service::refuse`] makes the answer, and may close the connection.
    Refuse(Refusal),
    /// The whole message is needed for a decision.
    More,
    /// Split it among several backends: [`Service::part`] makes a message for each.
    Split,
    /// Keep the place of the answer, which comes later ([`Effect::Send`]).
    Defer,
    /// Carry out these effects, and then the verdict.
    With(Vec<Effect>, Box<Verdict>),
    /// Answer with a content of the state.
    Stored(Stored),
}

impl Verdict {
    /// Makes a verdict about a longer message than one of this many bytes a refusal as malformed.
    pub(crate) fn within(self, message: usize) -> Verdict {
        match self {
            Verdict::Forward { key: Key::Bytes(range), .. } if range.end > message => {
                Verdict::Refuse(Refusal::Malformed)
            }
            Verdict::With(effects, verdict) => Verdict::With(effects, Box::new(verdict.within(message))),
            verdict => verdict,
        }
    }

    /// Replaces an answer from a content store by its bytes.
    pub(crate) fn copied(self, copy: &dyn Fn(Stored) -> Vec<u8>) -> Verdict {
        match self {
            Verdict::Stored(stored) => Verdict::Reply(copy(stored)),
            Verdict::With(effects, verdict) => Verdict::With(effects, Box::new(verdict.copied(copy))),
            verdict => verdict,
        }
    }
}

/// A key that selects a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// A number.
    Number(u64),
    /// These bytes of the message.
    Bytes(Range<usize>),
    /// The index of the backend, which the service has chosen.
    Backend(u64),
}

/// An answer that a service gives instead of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing, and the connection goes on.
    Nothing,
    /// These bytes, and the connection goes on.
    Reply(Vec<u8>),
    /// These bytes, if any, and then the connection is closed.
    Close(Vec<u8>),
    /// Carry out these effects, and then the answer.
    With(Vec<Effect>, Box<Answer>),
}

/// Something that a service does to others than the client, or to its own timers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The connection gets the bytes that are published for this topic.
    Subscribe(u64),
    /// It does not any more.
    Unsubscribe(u64),
    /// The subscribers of a topic get these bytes.
    Publish {
        /// The topic.
        topic: u64,
        /// The bytes.
        bytes: Arc<[u8]>,
    },
    /// Another connection gets these bytes.
    Send {
        /// The handle of the connection.
        to: u64,
        /// The bytes.
        bytes: Arc<[u8]>,
        /// They are the answer to its oldest deferred message.
        is_answer: bool,
    },
    /// A backend is added, if the operator permits that.
    Register {
        /// ADDRESS:PORT, as the service has written it.
        address: Arc<[u8]>,
        /// Its weight, for ketama.
        weight: u32,
    },
    /// A backend is removed.
    Unregister {
        /// ADDRESS:PORT, as the service has written it.
        address: Arc<[u8]>,
    },
    /// A timer of the service is armed, or stopped with `after` 0.
    Arm {
        /// The timer's number.
        timer: usize,
        /// Milliseconds until the first call.
        after: u32,
        /// Milliseconds between later calls, or 0.
        every: u32,
        /// The argument of the call.
        context: u64,
    },
}

/// The reason why a message cannot be served. `enum shunt_refusal` in service.h has the same codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Refusal {
    /// Not of this protocol.
    Malformed = 1,
    /// Longer than the service takes.
    TooLong,
    /// The protocol's version is unknown.
    UnknownVersion,
    /// The field that the service decides by is missing.
    MissingField,
    /// A command that the service does not serve.
    UnknownCommand,
    /// Nested too deeply, or of too many parts.
    TooComplex,
    /// There is no backend for it.
    NoBackend,
    /// It was pending at a backend whose connection broke.
    BackendGone,
    /// Its backend has not answered within `reply-timeout`.
    NoReply,
    /// The client sends more messages than `--rate` allows.
    TooMany,
}

impl Refusal {
    /// All reasons, in the order of their codes.
    pub const ALL: [Refusal; 10] = [
        Refusal::Malformed,
        Refusal::TooLong,
        Refusal::UnknownVersion,
        Refusal::MissingField,
        Refusal::UnknownCommand,
        Refusal::TooComplex,
        Refusal::NoBackend,
        Refusal::BackendGone,
        Refusal::NoReply,
        Refusal::TooMany,
    ];

    /// Returns the label in metrics and status.
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
            Refusal::TooMany => "too-many",
        }
    }

    /// Returns the reason with this code in C. Unknown codes, from a faulty service, are malformed.
    pub fn from_code(code: u32) -> Refusal {
        *Refusal::ALL.get((code as usize).wrapping_sub(1)).unwrap_or(&Refusal::Malformed)
    }
}
