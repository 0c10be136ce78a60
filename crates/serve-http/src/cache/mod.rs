//! A cache of static content for routes that ask for one (RFC 9111), as a shared cache.
//!
//! - [`policy`]: which requests may be answered from the cache, which replies are stored, and for how
//!   long they are fresh. Pure functions.
//! - [`entry`]: a stored reply, and the answers that are made of it.
//! - [`store`]: the replies of one route, bounded in bytes, and the requests that wait for one.
//!
//! ```text
//!   request ── not for the cache ──────────────────────────► backend, as without a cache
//!      │
//!      ├── a fresh reply is stored ────────────────────────► answer
//!      │
//!      ├── none, and no request for it is under way ───────► backend; the reply is stored if it may be
//!      │                                                         │
//!      └── none, and one is under way ──► waits for that one ◄───┘ then looks again
//! ```
//!
//! In doubt a reply is not stored: a reply with Set-Cookie, without an explicit lifetime (unless the
//! route has one for such replies), with `no-cache` or with malformed directives. A stale reply is not
//! validated but fetched again.

pub mod entry;
pub mod policy;
pub mod store;

pub use entry::Entry;
pub use store::{Flight, Follower, Mail, Store, Woken};
