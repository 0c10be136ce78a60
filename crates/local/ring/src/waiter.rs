//! Waiter lines: a sender finds out here whether it must wake a thread of the peer.
//!
//! Each side of a link has one line for each of its waiters. A sender sets the connection's ready
//! bit, and notifies the waiter by its doorbell only if the waiter sleeps. A busy receiver so costs
//! no system call.

use crate::sync::{AtomicU32, AtomicU64, Ordering::*, full_fence_after_rmw};

/// One waiter of one side of a link: a cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct WaiterLine {
    /// One bit per connection that may have become readable or writable.
    ready: AtomicU64,
    /// 1 while the waiter sleeps, or is about to.
    sleeping: AtomicU32,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<WaiterLine>() == shunt_abi::geometry::WAITER_BYTES);
    assert!(std::mem::offset_of!(WaiterLine, ready) == shunt_abi::geometry::WAITER_READY_OFFSET);
    assert!(std::mem::offset_of!(WaiterLine, sleeping) == shunt_abi::geometry::WAITER_SLEEPING_OFFSET);
};

impl WaiterLine {
    /// Returns an idle line. Only the model checker and tests make one; a link's lines begin as
    /// zeroed memory.
    pub fn new() -> WaiterLine {
        WaiterLine { ready: AtomicU64::new(0), sleeping: AtomicU32::new(0) }
    }

    /// Sets the ready bit of connection `conn`, and returns whether the caller must notify the
    /// waiter by its doorbell.
    ///
    /// The caller has just published with a read-modify-write on the lane, and passed a full fence.
    #[inline]
    pub fn notify(&self, conn: usize) -> bool {
        self.notify_after(1 << conn, || ())
    }

    /// Sets the ready bit `bit`, and calls `first` before that if the bit is clear. Returns whether
    /// the caller must notify the waiter by its doorbell.
    #[inline(always)]
    pub fn notify_after(&self, bit: u64, first: impl FnOnce()) -> bool {
        // The waiter takes the word with a swap, so it has not checked a bit that is still set. It
        // will see everything that was published before this load, because of the fence after
        // publishing.
        if self.ready.load(Relaxed) & bit == 0 {
            first();
            self.ready.fetch_or(bit, AcqRel);
            full_fence_after_rmw();
        }
        self.sleeping.load(Relaxed) != 0 && self.sleeping.swap(0, AcqRel) != 0
    }

    /// Returns whether the ready bit of a connection is set.
    #[inline]
    pub fn is_marked(&self, conn: usize) -> bool {
        self.ready.load(Relaxed) & 1 << conn != 0
    }

    /// Clears the ready bit of one connection; an earlier connection may have set it. The caller
    /// checks the connection afterwards.
    pub fn take_mark(&self, conn: usize) {
        if self.is_marked(conn) {
            self.ready.fetch_and(!(1 << conn), AcqRel);
            // As in `take_ready`.
            full_fence_after_rmw();
        }
    }

    /// Returns all ready bits and clears them.
    #[inline]
    pub fn take_ready(&self) -> u64 {
        if self.ready.load(Relaxed) == 0 {
            return 0;
        }
        let bits = self.ready.swap(0, AcqRel);
        // Bytes that were published before their sender found the bit "still set" must be visible
        // after this.
        full_fence_after_rmw();
        bits
    }

    /// Returns the ready bits without clearing them.
    #[inline]
    pub fn peek_ready(&self) -> u64 {
        self.ready.load(Relaxed)
    }

    /// Announces a sleep. The waiter must check its lanes once more before it sleeps.
    #[inline]
    pub fn announce_sleep(&self) {
        self.sleeping.swap(1, AcqRel);
        full_fence_after_rmw();
    }

    /// Returns whether the waiter sleeps, as far as the other side can see.
    pub fn is_sleeping(&self) -> bool {
        self.sleeping.load(Relaxed) != 0
    }

    /// Ends a sleep, or cancels an announced one.
    #[inline]
    pub fn awake(&self) {
        if self.sleeping.load(Relaxed) != 0 {
            // A swap, as every other write of this word is: the model checker keeps a total order
            // only of swaps.
            self.sleeping.swap(0, AcqRel);
        }
    }
}

impl Default for WaiterLine {
    fn default() -> WaiterLine {
        WaiterLine::new()
    }
}
