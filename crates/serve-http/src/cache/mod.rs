//! A cache of static content for routes that ask for one (RFC 9111), as a shared cache.
//!
//! - `key`: the keys of targets. Pure functions.
//! - [`policy`]: which requests may be answered from the cache, which replies are stored, and for how
//!   long they are fresh. Pure functions.
//! - `directives`: Cache-Control, and what replaces it.
//! - [`entry`]: a stored reply, the answers that are made of it, and its validation.
//! - `held`: the bytes of bodies in memory.
//! - `range`: the part of a stored reply that a request asks for. Pure functions.
//! - `recall`: the requests that a thread need not parse again.
//! - [`store`]: the replies of one route, bounded in bytes, and the requests that wait for one.
//!
//! ```text
//!   request ── not for the cache ──────────────────────────► backend, as without a cache
//!      │
//!      ├── a fresh reply is stored ────────────────────────► answer
//!      │
//!      ├── a stale one, and none under way ────────────────► backend, with conditions: after a 304 the
//!      │                                                     updated reply is stored, and the answer
//!      ├── none, and no request for it is under way ───────► backend; the reply is stored if it may be
//!      │                                                         │
//!      └── none, and one is under way ──► waits for that one ◄───┘ then looks again
//! ```
//!
//! In doubt a reply is not stored: a reply with Set-Cookie, or with neither a lifetime nor a validator.
//! A request whose fields change the meaning of its target for some backends passes the cache.

mod directives;
pub mod entry;
pub(crate) mod held;
pub(crate) mod key;
pub mod policy;
mod range;
pub(crate) mod recall;
pub mod store;

pub use entry::Entry;
pub use held::StoredBody;
pub(crate) use range::part;
pub use store::{End, Flight, Follower, Mail, Store, Woken};
