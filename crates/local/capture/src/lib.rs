//! Captures connections on shared memory, which tcpdump cannot see, and writes them as packets for
//! Wireshark (docs/adr/0030).
//!
//! The programs do not wait for a capture; it costs them only the processor time and memory that it
//! uses. The capture trusts nothing that programs write into a link.
//!
//! Modules: `feed` is the connection to the broker, which reports the connections. `lane` reads one
//! direction, within the limits of `window`. `packet` builds packets, and `pcapng` writes them.
//! `filter` selects connections, and `session` puts everything together.

#![forbid(unsafe_code)]

mod feed;
mod filter;
mod lane;
mod packet;
mod pcapng;
mod session;
mod window;

pub use feed::FeedError;
pub use filter::Filter;
pub use lane::{Ended, Lane, Look, Memory};
pub use session::{CaptureError, Limits, Session, Summary};
