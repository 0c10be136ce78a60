//! What a lane takes, as readiness sees it, and what has become of what it has taken.

use crate::base::process;
use crate::base::waiter::Slot;
use crate::socket::endpoint::{Endpoint, TxSide};
use crate::socket::links::Attachment;

/// A receiver that sleeps and has not read for this long is not going to: TCP takes more than a ring does.
pub(crate) const STALL_NANOS: u64 = 20_000_000;
/// One that is awake may only be busy, and is given this long.
const BUSY_STALL_NANOS: u64 = 1_000_000_000;

/// The peer said, or the broker did, that nobody reads at the other end any more. What TCP then answers is TCP's.
#[inline]
pub(crate) fn peer_has_left(at: &Attachment) -> bool {
    at.incoming().0.is_left()
}

/// Whether the receiver has stood still for too long. Under the send lock, when the lane is full.
pub(crate) fn is_stalled(side: &mut TxSide, at: &Attachment) -> bool {
    let (unread, now) = (side.tx.unread(at.outgoing().0), process::now());
    match side.seen.full_since {
        Some((since, then)) if then == unread => {
            // A receiver may also wait for us to read what it has sent; then it is we who are slow.
            let idle = at.receiver_sleeps() && at.incoming().0.looks_empty();
            let patience = if idle { STALL_NANOS } else { BUSY_STALL_NANOS };
            now - since >= patience
        }
        _ => {
            side.seen.full_since = Some((now, unread));
            false
        }
    }
}

/// The same question from outside: for waiters that slept on a full lane.
pub(crate) fn has_stalled(endpoint: &Endpoint) -> bool {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at.filter(|_| side.seen.full_since.is_some()) else { return false };
    let (lane, ring) = at.outgoing();
    side.tx.is_writable(lane, &ring) == Some(false) && (is_stalled(&mut side, &at) || peer_has_left(&at))
}

/// Whether a send on the lane would make progress; `None`: ask TCP. If not, `slot` is told when it would.
pub(crate) fn writability(endpoint: &Endpoint, slot: Option<Slot>) -> Option<bool> {
    room(endpoint, slot).0
}

/// The same, and whether nobody reads at the other end any more.
pub(crate) fn room(endpoint: &Endpoint, slot: Option<Slot>) -> (Option<bool>, bool) {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return (None, false) };
    let (lane, ring) = at.outgoing();
    let left = peer_has_left(&at);
    if left || lane.is_closed() {
        // A send finds that out and goes to TCP; what TCP says to it is the next thing to wait for.
        return (side.tx.on_lane().then_some(true), left);
    }
    let Some(writable) = side.tx.is_writable(lane, &ring) else { return (None, false) };
    if writable {
        side.seen.full_since = None;
        return (Some(true), false);
    }
    is_stalled(&mut side, &at);
    if let Some(slot) = slot {
        lane.want_space(slot.0);
    }
    (side.tx.is_writable(lane, &ring), false)
}

/// Whether a send on the lane would make progress, if that is all there is to be seen there, as it mostly is. `false`: [`room`] finds out
/// what else.
#[inline]
pub(crate) fn has_room_at_once(endpoint: &Endpoint) -> bool {
    let mut side = endpoint.tx.briefly();
    let has_room = has_room_on_lane(side.value());
    side.end();
    has_room
}

#[inline(always)]
fn has_room_on_lane(TxSide { tx, at, seen, .. }: &mut TxSide) -> bool {
    let Some(at) = at else { return false };
    let (lane, ring) = at.outgoing();
    let has_room = !peer_has_left(at) && tx.is_writable(lane, &ring) == Some(true);
    if has_room {
        seen.full_since = None;
    }
    has_room
}

/// Whether the receiver at the other end has given bytes back. Every waiter asks when it looks, because the sender may
/// have nothing to say for a long time.
#[inline]
pub(crate) fn is_returned(endpoint: &Endpoint) -> bool {
    let at = endpoint.rx.lock().at;
    // The flag stays in the lane; that it has been dealt with, only the sending direction knows.
    at.is_some_and(|at| at.outgoing().0.is_returned()) && endpoint.tx.lock().tx.on_lane()
}
