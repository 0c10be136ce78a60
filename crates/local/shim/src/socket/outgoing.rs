//! The readiness of an endpoint to send, as far as its lane determines it, and the state of the
//! bytes that it has sent.

use shunt_transport::Spill;

use crate::base::process;
use crate::base::waiter::Slot;
use crate::socket::endpoint::{Endpoint, Seen, TxSide};
use crate::socket::links::Attachment;
use crate::socket::stall::{self, Look, Verdict};

/// Returns whether the receiver has left the connection, as the peer or the broker has published. A
/// send then goes to TCP, whose answer is the result.
#[inline]
pub(crate) fn peer_has_left(at: &Attachment) -> bool {
    at.incoming().0.is_left()
}

/// Decides what the sender does about a full lane. If the decision is to spill, the lane spills,
/// and then has room. The caller holds the send lock.
#[cold]
pub(crate) fn look(side: &mut TxSide, at: &Attachment) -> Verdict {
    let (lane, ring) = at.outgoing();
    let unread = side.tx.unread(lane);
    let verdict = side.seen.backlog.look(Look {
        now: process::now(),
        read: side.tx.lane_total().wrapping_sub(unread),
        // If the receiver waits for this end to read, this end is the slow one.
        is_asleep: at.receiver_sleeps() && at.incoming().0.looks_empty(),
        spill: if at.can_spill() { side.tx.spill_of(lane, &ring) } else { Spill::None },
    });
    match verdict {
        Verdict::Spill => {
            side.tx.spill(lane, &ring);
            at.announce_own_space();
        }
        Verdict::HoldSpill(_) => side.tx.hold_spill(),
        Verdict::Wait(_) | Verdict::FallBack => {}
    }
    verdict
}

/// Returns the decision for a waiter that sleeps on a full lane. Returns `None` if the lane is not
/// full, or if the sender is not on it.
fn look_again(endpoint: &Endpoint) -> Option<Verdict> {
    let mut side = endpoint.tx.lock();
    let at = side.at.filter(|_| side.seen.backlog.is_waiting())?;
    let (lane, ring) = at.outgoing();
    if side.tx.is_writable(lane, &ring) != Some(false) {
        // Other epoll instances with the connection see that the wait has ended, and report room.
        end_wait(&mut side.seen);
        return None;
    }
    Some(if peer_has_left(&at) { Verdict::FallBack } else { look(&mut side, &at) })
}

/// Returns whether a sender has waited for room for too long.
pub(crate) fn has_stalled(endpoint: &Endpoint) -> bool {
    look_again(endpoint) == Some(Verdict::FallBack)
}

/// Returns the longest sleep of a waiter that waits for room in a lane, in nanoseconds.
pub(crate) fn longest_sleep(endpoint: &Endpoint) -> u64 {
    match look_again(endpoint) {
        Some(Verdict::HoldSpill(nanos) | Verdict::Wait(nanos)) => nanos,
        // There is room, or TCP has to be polled.
        Some(Verdict::Spill | Verdict::FallBack) => 0,
        None => stall::LOOK_NANOS,
    }
}

/// Returns whether a send on the lane would make progress. If not, the peer notifies `slot` when it
/// would. Returns `None` if TCP has to be polled.
pub(crate) fn writability(endpoint: &Endpoint, slot: Option<Slot>) -> Option<bool> {
    room(endpoint, slot).0
}

/// Returns the result of [`writability`], and whether the receiver has left.
pub(crate) fn room(endpoint: &Endpoint, slot: Option<Slot>) -> (Option<bool>, bool) {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return (None, false) };
    let (lane, ring) = at.outgoing();
    let left = peer_has_left(&at);
    if left || lane.is_closed() {
        // A send finds this and goes to TCP. The result from TCP is the next event to wait for.
        return (side.tx.on_lane().then_some(true), left);
    }
    let Some(writable) = side.tx.is_writable(lane, &ring) else { return (None, false) };
    if writable {
        end_wait(&mut side.seen);
        return (Some(true), false);
    }
    look(&mut side, &at);
    if let Some(slot) = slot {
        lane.want_space(slot.0);
    }
    (side.tx.is_writable(lane, &ring), false)
}

/// Returns whether a send on the lane would make progress, on the fast path. If `false`, the caller
/// uses [`room`].
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
        end_wait(seen);
    }
    has_room
}

/// Notes that a wait for room has ended, if there was one.
pub(crate) fn end_wait(seen: &mut Seen) {
    if seen.backlog.is_waiting() {
        seen.backlog.end_wait(process::now());
    }
}

/// Returns whether the receiver has returned bytes. Each waiter checks this, because the sender may
/// not send for a long time.
#[inline]
pub(crate) fn is_returned(endpoint: &Endpoint) -> bool {
    let at = endpoint.rx.lock().at;
    // The flag stays set in the lane. Only the sending direction knows whether it has handled the
    // return.
    at.is_some_and(|at| at.outgoing().0.is_returned()) && endpoint.tx.lock().tx.on_lane()
}
