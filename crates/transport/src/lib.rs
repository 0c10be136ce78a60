//! The two directions of an endpoint: when each is on TCP, when on a lane, and the way between (L2, L4).
//!
//! [`Tx`] and [`Rx`] are the state machines of `docs/local-path.md`. They never sleep, and reach the kernel's
//! socket only through [`Kernel`], so that the same code runs in the shim, against an oracle in the property
//! tests, and under the model checker. The caller holds one lock per direction around every call.

#![forbid(unsafe_code)]

pub mod rx;
pub mod tx;

pub use rx::{Received, Rx};
pub use shunt_ring::Spill;
pub use tx::{Sent, Tx};

use shunt_ring::Sink;

/// What a direction needs of the TCP socket beneath.
pub trait Kernel {
    /// Bytes ever given to TCP for sending, or `None` if the kernel's counts do not settle.
    fn sent(&self) -> Option<u64>;
    /// Bytes ever read from TCP. `None` after a reset: the kernel has lost count.
    fn read(&self) -> Option<u64>;
    /// Bytes that TCP has ever received, read or not; after a reset it may be one more.
    fn received(&self) -> u64;
    /// What a receive would find now, taking nothing: not even an error, which the kernel tells only once.
    fn waiting(&self) -> Waiting;
    /// Whether the next byte of TCP is behind urgent data, where a receive that has bytes already must stop.
    fn at_mark(&self) -> bool {
        false
    }
    /// Receives without blocking into `sink` and advances it. `Ok(0)` is end of file; `Err` an errno.
    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32>;
}

/// What a receive on TCP would find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing now.
    Nothing,
    /// The end.
    EndOfFile,
    /// An error.
    Error,
}

/// `EFAULT`, for memory that the program must not touch.
pub const EFAULT: i32 = 14;
/// `EAGAIN`, as a kernel's receive reports an empty socket.
pub const EAGAIN: i32 = 11;
/// `ECONNRESET`, for a connection of which not even the kernel knows how far it has been read.
pub const ECONNRESET: i32 = 104;
