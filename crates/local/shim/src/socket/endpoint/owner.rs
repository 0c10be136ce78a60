//! The waiter that the peer notifies of bytes: see [`Endpoint::owner`].

use std::sync::atomic::Ordering::*;

use super::{Endpoint, RxSide};
use crate::base::waiter::Slot;

impl Endpoint {
    /// Makes `slot` the waiter that the peer notifies of bytes, unless another waiter is, and
    /// writes it to the lane. Returns whether `slot` has become the owner. The lock is needed
    /// because the lane may be another connection's once the endpoint has left it.
    pub(crate) fn wait_on(&self, side: &RxSide, slot: Slot) -> bool {
        let Some(at) = side.at else { return false };
        let owner = self.claim(slot);
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
        let owner = self.claim(slot);
        if owner.is_ok() {
            at.link.view().waiter(at.link.side, slot.0).take_mark(at.conn);
        }
        if owner.is_ok() || owner == Err(slot) {
            at.incoming().0.set_lasting_rx_waiter(slot.0);
        }
        owner.is_ok()
    }

    /// Claims the ownership for `slot`. An error contains the owner.
    fn claim(&self, slot: Slot) -> Result<(), Slot> {
        let owner = self.owner.compare_exchange(0, slot.0 as u32 + 1, AcqRel, Acquire);
        owner.map(|_| ()).map_err(|word| Slot(word as usize - 1))
    }

    /// Gives up the ownership if `slot` has it.
    #[inline]
    pub(crate) fn unclaim(&self, slot: Slot) {
        let _ = self.owner.compare_exchange(slot.0 as u32 + 1, 0, AcqRel, Relaxed);
    }

    /// Returns the waiter that the peer notifies of bytes.
    #[inline]
    pub(crate) fn owner(&self) -> Option<Slot> {
        self.owner.load(Acquire).checked_sub(1).map(|slot| Slot(slot as usize))
    }
}
