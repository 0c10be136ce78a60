//! Where a sender finds out whether anybody must be woken.
//!
//! Each side of a link has one line for each of its waiters. A sender marks the connection's bit and rings the
//! waiter's doorbell only if it sleeps, so that a busy receiver costs no system call.

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
    /// An idle line; only the model checker and tests make one, a link's lines begin as zeroed memory.
    pub fn new() -> WaiterLine {
        WaiterLine { ready: AtomicU64::new(0), sleeping: AtomicU32::new(0) }
    }

    /// Marks connection `conn` and says whether the doorbell must be rung.
    ///
    /// The caller has just published with a read-modify-write on the lane, and passed a full fence.
    #[inline]
    pub fn notify(&self, conn: usize) -> bool {
        self.notify_after(1 << conn, || ())
    }

    /// The same of the connection with this bit, and does something first if it is not marked already.
    #[inline(always)]
    pub fn notify_after(&self, bit: u64, first: impl FnOnce()) -> bool {
        // The waiter takes the word with a swap, so a bit that is still set has not been looked at yet: it
        // will see what was published before this load, because of the fence after publishing.
        if self.ready.load(Relaxed) & bit == 0 {
            first();
            self.ready.fetch_or(bit, AcqRel);
            full_fence_after_rmw();
        }
        self.sleeping.load(Relaxed) != 0 && self.sleeping.swap(0, AcqRel) != 0
    }

    /// Whether a connection is marked already.
    #[inline]
    pub fn is_marked(&self, conn: usize) -> bool {
        self.ready.load(Relaxed) & 1 << conn != 0
    }

    /// Takes the mark of one connection, which may be one that was there before. Whoever has taken it looks at the connection.
    pub fn take_mark(&self, conn: usize) {
        if self.is_marked(conn) {
            self.ready.fetch_and(!(1 << conn), AcqRel);
            // As in `take_ready`.
            full_fence_after_rmw();
        }
    }

    /// Takes all marks.
    #[inline]
    pub fn take_ready(&self) -> u64 {
        if self.ready.load(Relaxed) == 0 {
            return 0;
        }
        let bits = self.ready.swap(0, AcqRel);
        // What was published before a bit was skipped as "still set" must be visible after this.
        full_fence_after_rmw();
        bits
    }

    /// Whether any mark is set, without taking it.
    #[inline]
    pub fn peek_ready(&self) -> u64 {
        self.ready.load(Relaxed)
    }

    /// Announces a sleep. The waiter must look at its lanes once more before it sleeps.
    #[inline]
    pub fn announce_sleep(&self) {
        self.sleeping.swap(1, AcqRel);
        full_fence_after_rmw();
    }

    /// Whether the waiter sleeps, as far as the other side can see.
    pub fn is_sleeping(&self) -> bool {
        self.sleeping.load(Relaxed) != 0
    }

    /// Ends a sleep, or gives up an announced one.
    #[inline]
    pub fn awake(&self) {
        if self.sleeping.load(Relaxed) != 0 {
            // A swap like every other write of this word: the model checker keeps only those in one order.
            self.sleeping.swap(0, AcqRel);
        }
    }
}

impl Default for WaiterLine {
    fn default() -> WaiterLine {
        WaiterLine::new()
    }
}
