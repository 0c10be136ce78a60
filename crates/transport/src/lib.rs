//! The two directions of an endpoint: when each is on TCP, when on a lane, and the way between (L2, L4).
//!
//! [`Tx`] and [`Rx`] are the state machines of `docs/local-path.md`. They never sleep, and reach the kernel's
//! socket only through [`Kernel`], so that the same code runs in the shim, against an oracle in the property
//! tests, and under the model checker. The caller holds one lock per direction around every call.

#![forbid(unsafe_code)]

pub mod rx;
pub mod tx;

pub use rx::{Received, Rx};
pub use tx::{Sent, Tx};

use shunt_ring::Sink;

/// What a direction needs of the TCP socket beneath.
pub trait Kernel {
    /// Bytes ever given to TCP for sending, or `None` if the kernel's counts do not settle.
    fn sent(&self) -> Option<u64>;
    /// Bytes ever read from TCP.
    fn read(&self) -> Option<u64>;
    /// How many bytes a receive would find now, taking none of them: `Ok(0)` at end of file, `Err(EAGAIN)` if there
    /// are none. On Linux: `recv(fd, null, huge, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT)`, which copies nothing.
    fn waiting(&self) -> Result<usize, i32>;
    /// Whether the next byte of TCP is behind urgent data, where a receive that has bytes already must stop.
    fn at_mark(&self) -> bool {
        false
    }
    /// Receives without blocking into `sink` and advances it. `Ok(0)` is end of file; `Err` an errno.
    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32>;
}

/// `EFAULT`, for memory that the program must not touch.
pub const EFAULT: i32 = 14;
/// `EAGAIN`, as a kernel's receive reports an empty socket.
pub const EAGAIN: i32 = 11;
/// `ECONNRESET`, for a connection of which not even the kernel knows how far it has been read.
pub const ECONNRESET: i32 = 104;
