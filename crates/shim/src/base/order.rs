//! In which order what comes by lanes and what comes by TCP is told to one who waits for both.
//!
//! The kernel tells of events in the order in which they came. What a program sends by TCP and what it sends by a lane come
//! by two roads, and no word of the kernel's says when a segment has come. So a sender stamps a lane, when it marks it for the
//! receiver, with the time and with the time of the last that its process has sent by TCP. The first gives the order between lanes. The
//! second tells a receiver that has not asked the kernel since that it must do so first. See *Order* in docs/local-path.md.

use std::sync::atomic::{AtomicU64, Ordering::*};

use crate::base::arch;

/// When this process last made a system call that a peer on this host may be told of.
static BY_TCP: AtomicU64 = AtomicU64::new(0);

/// A number that grows with time, for all processes of the host alike. What it counts does not matter.
#[inline]
pub(crate) fn now() -> u64 {
    arch::ticks()
}

/// The kernel may have something to tell a peer on this host.
#[inline]
pub(crate) fn note_by_tcp() {
    BY_TCP.store(now(), Relaxed);
}

/// When that was last so.
#[inline]
pub(crate) fn last_by_tcp() -> u64 {
    BY_TCP.load(Relaxed)
}
