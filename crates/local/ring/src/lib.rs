//! Lanes and waiters: the shared-memory half of the local path, without any system call.
//!
//! A [`Producer`] and a [`Consumer`] are the two ends of one lane; a [`WaiterLine`] is where a
//! sender finds a sleeping thread. Both ends distrust the values that the other writes (L5).
//! `docs/local-path.md` specifies the protocol, and `tests/loom.rs` checks it under loom. The shim
//! uses it. The lanes of `crates/channel/channel` are [`split`]: each end writes a separate file.

pub mod bytes;
pub mod copy;
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
