//! Lanes and waiters: the shared-memory half of the local path, without any system call.
//!
//! A [`Producer`] and a [`Consumer`] are the two ends of one lane; a [`WaiterLine`] is where a sleeping
//! process is found. Both ends distrust what the other writes (L5). The protocol is written down in
//! `docs/local-path.md` and checked under loom in `tests/loom.rs`. The shim uses it. The lanes of
//! `crates/channel` are [`split`]: each end writes a separate file.

pub mod bytes;
pub mod lane;
#[cfg(not(loom))]
pub mod link;
pub mod split;
mod sync;
pub mod user;
pub mod waiter;

pub use lane::{Consumer, LaneHeader, Misbehaved, Producer, Published, ReadError, Spill};
pub use user::{Fault, Sink, Source};
pub use waiter::WaiterLine;
