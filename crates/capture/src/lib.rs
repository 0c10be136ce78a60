//! What tcpdump can no longer see: reads connections along that are on shared memory, and writes them down as packets that Wireshark
//! understands (docs/adr/0030). Nobody is slowed down for it but by the processor time and the memory that it takes, and nothing that
//! programs write into a link is believed.
//!
//! Inner shape: `feed` is the conversation with the broker, which says what there is to see; `lane` reads one direction along, as far as
//! `window` lets it; `packet` makes a packet of what was read, `pcapng` writes it down; `session` puts them together, `filter` says what
//! is wanted.

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
