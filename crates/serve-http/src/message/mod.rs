//! Parses, checks and rewrites HTTP/1.1 messages (RFC 9110, RFC 9112).
//!
//! The rule against request smuggling: a message is either refused, or forwarded in one canonical
//! form. Its head is written again from the parsed parts, and its framing (one Content-Length, one
//! `Transfer-Encoding: chunked`, or none) is the one that the proxy itself has used. So a backend
//! cannot see other boundaries, however lenient its parser is.
//!
//! ```text
//! bytes --request::parse--> Request --write_request--> head for the backend
//!                              |
//!                              +-- Framing --> Body::pass: which of the next bytes are its body
//! ```

pub mod body;
mod chunked;
pub(crate) mod fields;
pub mod reply;
pub mod request;
pub mod target;

pub use body::{BadBody, Body};
pub use fields::{Framing, MAX_FIELDS, Slots, Version, no_fields};
pub use reply::{BadReply, Reply};
pub use request::{Refusal, Request};

/// The result of parsing bytes that may not be complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed<T> {
    /// More bytes are needed.
    Incomplete,
    /// A message's head.
    Complete(T),
}
