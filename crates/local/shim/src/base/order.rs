//! The order in which a waiter reports events of lanes and events of TCP.
//!
//! The kernel reports events in the order in which they came. A program's bytes may travel by TCP
//! or by a lane, and the kernel does not report when a segment arrived. So a sender that notifies
//! the receiver of a lane writes two times into it: the current time, and the last time at which
//! its process sent something by TCP. The first gives the order between lanes. The second shows a
//! receiver that it must ask the kernel first, if it has not asked since then. See *Order* in
//! docs/local-path.md.

use std::sync::atomic::{AtomicU64, Ordering::*};

use crate::base::arch;

/// The time of the last system call of this process that may cause an event for a peer on this
/// host.
static BY_TCP: AtomicU64 = AtomicU64::new(0);

/// Returns a time stamp that grows on all processors and for all processes of the host alike. The
/// unit does not matter.
#[inline]
pub(crate) fn now() -> u64 {
    arch::ticks()
}

/// Records that the kernel may now have an event for a peer on this host.
#[inline]
pub(crate) fn note_by_tcp() {
    BY_TCP.store(now(), Relaxed);
}

/// Returns the time of the last such record.
#[inline]
pub(crate) fn last_by_tcp() -> u64 {
    BY_TCP.load(Relaxed)
}
