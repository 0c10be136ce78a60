//! The two directions of an endpoint: when each is on TCP, when on a lane, and how it switches (L2,
//! L4).
//!
//! [`Tx`] and [`Rx`] are the two state machines; *A lane* in `docs/local-path.md` has the protocol.
//! They never sleep, and reach the kernel's socket only through [`Kernel`]. The same code so runs
//! in the shim, against an oracle in the property tests, and under the model checker. The caller
//! holds one lock per direction around every call.
//!
//! ```text
//! Tx:  Tcp -> Adopted -> Lane -> [Returning ->] Tcp
//! Rx:  Tcp -> Adopted -> Watching -> CatchingUp(offset) -> Lane -> Tcp
//! ```
//!
//! Example: both directions have a lane (`Adopted`), and 1,000 bytes have been sent by TCP. The
//! receiver announces that it watches the lane. The sender's next write finds that, records the
//! offset 1,000, and goes to the lane. The receiver reads TCP up to byte 1,000 (`CatchingUp`), and
//! from there on the lane.

#![forbid(unsafe_code)]

pub mod rx;
pub mod tx;

pub use rx::{Received, Rx};
pub use shunt_ring::Spill;
pub use tx::{Sent, Tx};

use shunt_ring::Sink;

/// The operations on the TCP socket that a direction needs.
pub trait Kernel {
    /// Returns the number of bytes ever passed to TCP for sending, or `None` if the kernel's counts
    /// do not settle.
    fn sent(&self) -> Option<u64>;
    /// Returns the number of bytes ever read from TCP, or `None` after a reset: the kernel has lost
    /// the count.
    fn read(&self) -> Option<u64>;
    /// Returns the number of bytes that TCP has ever received, read or not. After a reset it may be
    /// one more.
    fn received(&self) -> u64;
    /// Returns what a receive would find now, and takes nothing: not even an error, which the
    /// kernel reports only once.
    fn waiting(&self) -> Waiting;
    /// Returns whether the next byte of TCP is behind urgent data, where a receive that already has
    /// bytes must stop.
    fn at_mark(&self) -> bool {
        false
    }
    /// Receives without blocking into `sink`, and advances it. `Ok(0)` is the end of file; `Err`
    /// contains an errno.
    fn receive(&self, sink: &mut Sink<'_>) -> Result<usize, i32>;
}

/// The outcome that a receive on TCP would have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// This number of bytes, at least one.
    Bytes(usize),
    /// Nothing is there now.
    Nothing,
    /// The end of file.
    EndOfFile,
    /// An error.
    Error,
}

/// `EFAULT`, for memory that the program must not touch.
pub const EFAULT: i32 = 14;
/// `EAGAIN`, which a kernel receive returns for an empty socket.
pub const EAGAIN: i32 = 11;
/// `ECONNRESET`, for a reset connection of which even the kernel does not know how far it has been
/// read.
pub const ECONNRESET: i32 = 104;
