//! The waiter that the peer notifies of bytes.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};

use super::{Endpoint, RxSide};
use crate::base::waiter::Slot;

/// What the peer notifies of bytes for one endpoint. The fields that a wait reads for each ready bit
/// come first.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Notified {
    /// The index of the record in the epoll instance that gets this endpoint's ready bits. The
    /// registration may be gone.
    record: AtomicUsize,
    /// The waiter that the peer notifies of bytes: its slot + 1, or 0 for none. An epoll instance
    /// owns this field as long as the socket is registered; a thread owns it while it sleeps.
    owner: AtomicU32,
}

impl Notified {
    /// Claims the ownership for `slot`. An error contains the owner.
    fn claim(&self, slot: Slot) -> Result<(), Slot> {
        let owner = self.owner.compare_exchange(0, slot.0 as u32 + 1, AcqRel, Acquire);
        owner.map(|_| ()).map_err(|word| Slot(word as usize - 1))
    }

    /// Gives up the ownership if `slot` has it.
    #[inline]
    fn unclaim(&self, slot: Slot) {
        let _ = self.owner.compare_exchange(slot.0 as u32 + 1, 0, AcqRel, Relaxed);
    }

    #[inline]
    fn owner(&self) -> Option<Slot> {
        self.owner.load(Acquire).checked_sub(1).map(|slot| Slot(slot as usize))
    }

    /// Forgets the waiter of the parent, in a forked child.
    pub(super) fn reset_in_child(&self) {
        self.owner.store(0, Relaxed);
    }

    pub(super) fn reset(&self) {
        let Notified { record, owner } = self;
        record.store(0, Relaxed);
        owner.store(0, Relaxed);
    }

    /// Sets each field to a value that no new endpoint has.
    #[cfg(test)]
    pub(super) fn use_up(&self) {
        self.record.store(3, Relaxed);
        self.owner.store(1, Relaxed);
    }
}

impl Endpoint {
    /// Makes `slot` the waiter that the peer notifies of bytes, unless another waiter is, and
    /// writes it to the lane. Returns whether `slot` has become the owner. The lock is needed
    /// because the lane may be another connection's once the endpoint has left it.
    pub(crate) fn wait_on(&self, side: &RxSide, slot: Slot) -> bool {
        let Some(at) = side.at else { return false };
        let owner = self.notified.claim(slot);
        if owner.is_ok() || owner == Err(slot) {
            at.incoming().0.set_rx_waiter(Some(slot.0));
        }
        owner.is_ok()
    }

    /// Makes `slot`, the waiter of an epoll instance, the one that the peer notifies of bytes. It
    /// stays so until it is withdrawn, and checks its lanes later even if it does not sleep now. A
    /// ready bit left by an earlier connection is cleared first, because it would give this one a
    /// wrong place in the order of events.
    pub(crate) fn wait_on_in_a_set(&self, side: &RxSide, slot: Slot) -> bool {
        let Some(at) = side.at else { return false };
        let owner = self.notified.claim(slot);
        if owner.is_ok() {
            at.link.view().waiter(at.link.side, slot.0).take_mark(at.conn);
        }
        if owner.is_ok() || owner == Err(slot) {
            at.incoming().0.set_lasting_rx_waiter(slot.0);
        }
        owner.is_ok()
    }

    /// Gives up the ownership if `slot` has it.
    #[inline]
    pub(crate) fn unclaim(&self, slot: Slot) {
        self.notified.unclaim(slot);
    }

    /// Returns the waiter that the peer notifies of bytes.
    #[inline]
    pub(crate) fn owner(&self) -> Option<Slot> {
        self.notified.owner()
    }

    /// Returns the index of the record in the epoll instance that gets the endpoint's ready bits.
    /// The registration may be gone.
    #[inline(always)]
    pub(crate) fn record(&self) -> usize {
        self.notified.record.load(Relaxed)
    }

    pub(crate) fn set_record(&self, index: usize) {
        self.notified.record.store(index, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_waiter_is_the_owner_until_it_gives_up() {
        let notified = Notified::default();
        assert_eq!(notified.owner(), None);
        assert_eq!((notified.claim(Slot(0)), notified.claim(Slot(5))), (Ok(()), Err(Slot(0))));
        notified.unclaim(Slot(5));
        assert_eq!(notified.owner(), Some(Slot(0)));
        notified.unclaim(Slot(0));
        assert_eq!((notified.owner(), notified.claim(Slot(5))), (None, Ok(())));
        notified.reset_in_child();
        assert_eq!(notified.owner(), None);
    }
}
