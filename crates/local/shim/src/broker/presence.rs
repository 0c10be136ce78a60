//! Whether this process is registered with a broker, and when to check.
//!
//! A broker may be restarted, upgraded or killed at any time. Connections on shared memory go on
//! without it, but `shunt status` of the next broker shows only processes that have registered with
//! it. A process whose connections are all established would have no other reason to do so.
//!
//! ```text
//!             a broker is reached               the conversation ends
//! Unregistered ----------------> Registered ------------------------> Lost
//!                                    ^                                  |
//!                                    +------ the next one is reached ---+
//! ```
//!
//! - `Registered`: a thread that is about to sleep checks once a second whether the conversation
//!   has ended.
//! - `Lost`: a thread that is about to sleep tries to reach the next broker, and no sleep lasts
//!   longer than until the next attempt. The pauses grow from 0.1 to 30 s.
//!
//! The session itself has more states: see `broker/control/session.rs`.
//!
//! A broker that is stopped ends the conversation, changes the board and rings all doorbells. So a
//! process whose threads sleep for connections on shared memory wakes up and registers. After a
//! broker was killed, it does so when a thread wakes up. A process that sleeps in the kernel's own
//! calls, because all its connections are on TCP, does so at its next call.
//!
//! Example: an upgrade restarts the broker while a server sleeps in epoll_wait. The doorbell wakes
//! the server's thread, which finds the end of the conversation, and connects again. systemd has
//! kept the socket open, and the new broker accepts the connection when it runs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// The interval between two checks of a registered process.
const CHECK_NANOS: u64 = 1_000_000_000;

/// When the next check or attempt is due. [`NEVER`]: the process is unregistered.
static DUE_AT: AtomicU64 = AtomicU64::new(NEVER);
static IS_LOST: AtomicBool = AtomicBool::new(false);

const NEVER: u64 = u64::MAX;

/// Whether this process has tried to register at its first connection.
static IS_INTRODUCED: AtomicBool = AtomicBool::new(false);

/// Returns whether this process has tried to register at its first connection.
#[inline]
pub(crate) fn is_introduced() -> bool {
    IS_INTRODUCED.load(Relaxed)
}

/// Notes that this process tries to register at its first connection.
pub(crate) fn note_introduction() {
    IS_INTRODUCED.store(true, Relaxed);
}

/// Returns whether a check or an attempt is due.
#[inline]
pub(crate) fn is_due(now: u64) -> bool {
    now >= DUE_AT.load(Relaxed)
}

/// Returns whether this process has lost its broker and has not reached the next one.
pub(crate) fn is_lost() -> bool {
    IS_LOST.load(Relaxed)
}

/// Returns how long a sleep that begins at `now` may last, so that the next attempt is not missed.
/// `None` means without a limit.
#[inline]
pub(crate) fn patience(now: u64) -> Option<u64> {
    is_lost().then(|| DUE_AT.load(Relaxed).saturating_sub(now))
}

/// Notes that the broker was reached, or that its conversation is being checked.
pub(crate) fn note_there(now: u64) {
    IS_LOST.store(false, Relaxed);
    DUE_AT.store(now + CHECK_NANOS, Relaxed);
}

/// Notes that there is no broker, and when to try again.
pub(crate) fn note_lost(again_at: u64) {
    DUE_AT.store(again_at, Relaxed);
    IS_LOST.store(true, Relaxed);
}

/// Notes that this process is not registered: it is the child of a fork, or in a sandbox.
pub(crate) fn end() {
    IS_INTRODUCED.store(false, Relaxed);
    IS_LOST.store(false, Relaxed);
    DUE_AT.store(NEVER, Relaxed);
}
