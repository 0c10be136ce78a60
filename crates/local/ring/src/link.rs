//! A link as one of its two processes sees it: typed views into the mapped memfd.

use std::sync::atomic::{AtomicU64, Ordering::*};

use shunt_abi::geometry::{Geometry, KNOWN_OFFSET, SPILLS_MAPPED_OFFSET, Side, WAITERS};

use crate::bytes::MappedRing;
use crate::lane::LaneHeader;
use crate::waiter::WaiterLine;

/// Views into a mapped link. All of them are atomics or raw rings, so that a peer's writes are
/// never undefined behaviour.
#[derive(Clone, Copy, Debug)]
pub struct LinkView {
    base: *mut u8,
    geometry: Geometry,
    has_spills: bool,
}

// SAFETY: only atomics and raw rings are handed out.
unsafe impl Send for LinkView {}
// SAFETY: as above.
unsafe impl Sync for LinkView {}

impl LinkView {
    /// Views the mapping at `base`.
    ///
    /// # Safety
    /// `base` must be page aligned and mapped, shared, for reads and writes, for
    /// `geometry.link_bytes()` bytes, or without spills for `geometry.spills_offset()`, as long as
    /// the view or anything obtained from it is used.
    pub unsafe fn new(base: *mut u8, geometry: Geometry, has_spills: bool) -> LinkView {
        LinkView { base, geometry, has_spills }
    }

    /// Whether this mapping has the spills.
    pub fn has_spills(&self) -> bool {
        self.has_spills
    }

    /// The header of the lane that `sender` writes.
    #[inline]
    pub fn lane(&self, conn: usize, sender: Side) -> &LaneHeader {
        let offset = self.geometry.lane_offset(conn, sender);
        // SAFETY: the offset is inside the mapping and aligned to LANE_BYTES; the type is made of
        // atomics.
        unsafe { &*self.base.add(offset).cast() }
    }

    /// Returns the ring of that lane.
    #[inline]
    pub fn ring(&self, conn: usize, sender: Side) -> MappedRing {
        let offset = self.geometry.ring_offset(conn, sender);
        // SAFETY: the whole ring is inside the mapping, and its size is a power of two
        // (`Geometry::new`).
        let ring = unsafe { MappedRing::new(self.base.add(offset), self.geometry.ring_bytes()) };
        if !self.has_spills {
            return ring;
        }
        let spill = self.geometry.spill_offset(conn, sender);
        // SAFETY: as for the ring.
        unsafe { ring.with_spill(self.base.add(spill), self.geometry.spill_bytes()) }
    }

    /// Returns a waiter line of `side`.
    #[inline]
    pub fn waiter(&self, side: Side, slot: usize) -> &WaiterLine {
        let offset = self.geometry.waiter_offset(side, slot);
        // SAFETY: as in `lane`.
        unsafe { &*self.base.add(offset).cast() }
    }

    /// Returns all waiter lines of `side`, in the order of their slots.
    pub fn waiters(&self, side: Side) -> &[WaiterLine; WAITERS] {
        let first = std::ptr::from_ref(self.waiter(side, 0));
        // SAFETY: as in `lane`, and they lie one behind the other.
        unsafe { &*first.cast() }
    }

    /// Records that `side` holds the doorbell of its peer's waiter `slot`.
    pub fn set_known(&self, side: Side, slot: usize) {
        self.known(side).fetch_or(1 << slot, Release);
    }

    /// Returns whether `side` holds the doorbell of its peer's waiter `slot`.
    pub fn is_known(&self, side: Side, slot: usize) -> bool {
        self.known(side).load(Acquire) & 1 << slot != 0
    }

    /// Records that `side` has mapped the spills.
    pub fn set_maps_spills(&self, side: Side) {
        self.maps_spills_word(side).store(1, Release);
    }

    /// Returns whether `side` has mapped the spills.
    pub fn maps_spills(&self, side: Side) -> bool {
        self.maps_spills_word(side).load(Acquire) != 0
    }

    fn maps_spills_word(&self, side: Side) -> &AtomicU64 {
        // SAFETY: as in `known`.
        unsafe { &*self.base.add(SPILLS_MAPPED_OFFSET + side as usize * 8).cast() }
    }

    fn known(&self, side: Side) -> &AtomicU64 {
        // SAFETY: the header page is inside the mapping; two aligned words.
        unsafe { &*self.base.add(KNOWN_OFFSET + side as usize * 8).cast() }
    }
}
