//! The readiness of an endpoint to send, as far as its lane determines it, and the state of the
//! bytes that it has sent.
//!
//! TCP is ready once it has room for more than a few bytes. A blocking send of a few bytes does not
//! wait then, and programs rely on that. So an endpoint is not ready as long as bytes of its lane
//! must go to TCP first, because the receiver has ended the lane or has returned them:
//!
//! ```text
//!   Some | None ---> Ended ---> Returning ---> OfTcp
//!                      |  the bytes are unread     ^  TCP has taken all of them
//!                      +---------------------------+
//!                         nothing is unread
//! ```
//!
//! Each call that waits offers the bytes of `Returning` to TCP again, as does a check every 20 ms
//! while a thread sleeps (`life/unread_timeout.rs`).
//!
//! Example: a peer has stopped reading, and falls back with 4 MiB unread. A program waits for
//! POLLOUT. The wait finds `Ended`, reclaims the bytes, and TCP takes 3 MiB. The wait goes on. Once
//! the peer has read them, TCP takes the rest, and the kernel reports POLLOUT.

use shunt_abi::reason::Reason;
use shunt_ring::lane::End;
use shunt_transport::Spill;

use crate::base::waiter::Slot;
use crate::base::{kernel, process};
use crate::socket::custody;
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

/// The room for a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// The lane has room, or a send finds the end of the connection.
    Some,
    /// The lane is full.
    None,
    /// The receiver has ended the lane. The caller leaves it by [`leave_ended`].
    Ended,
    /// TCP has yet to take bytes that were in the lane.
    Returning,
    /// TCP has to be polled.
    OfTcp,
}

/// Returns whether the lane is full. The peer then notifies `slot` when it is not.
pub(crate) fn is_full(endpoint: &Endpoint, slot: Option<Slot>) -> bool {
    room(endpoint, slot).0 == Room::None
}

/// Returns the room for a send, and whether the receiver has left. If the lane is full, the peer
/// notifies `slot` when it is not.
pub(crate) fn room(endpoint: &Endpoint, slot: Option<Slot>) -> (Room, bool) {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return (Room::OfTcp, false) };
    let (lane, ring) = at.outgoing();
    let left = peer_has_left(&at);
    let room = match side.tx.is_writable(lane, &ring) {
        _ if side.tx.is_returning() => Room::Returning,
        // A send finds this and goes to TCP. The result from TCP is the next event to wait for.
        _ if left && side.tx.on_lane() => Room::Some,
        _ if lane.is_closed() && side.tx.on_lane() => Room::Ended,
        None => Room::OfTcp,
        Some(true) => {
            end_wait(&mut side.seen);
            Room::Some
        }
        Some(false) => {
            look(&mut side, &at);
            if let Some(slot) = slot {
                lane.want_space(slot.0);
            }
            match side.tx.is_writable(lane, &ring) {
                Some(true) => Room::Some,
                Some(false) => Room::None,
                None if lane.is_closed() => Room::Ended,
                None => Room::OfTcp,
            }
        }
    };
    (room, left)
}

/// Returns whether reclaimed bytes would arrive by TCP. The peer's kernel answers them by a reset
/// once the peer has shut down both directions. This end's kernel sends nothing after its own FIN.
pub(crate) fn could_take_back(endpoint: &Endpoint, at: &Attachment) -> bool {
    !matches!(at.incoming().0.end(), End::Closed | End::Died) && !endpoint.has_shut_writing()
}

/// Leaves a lane that the receiver has ended, to go on in TCP. L9: the receiver may wait there in a
/// way that notices nothing else. So the bytes that it has not read go there too.
#[cold]
pub(crate) fn leave_ended_lane(endpoint: &Endpoint, side: &mut TxSide, at: &Attachment) {
    let lane = at.outgoing().0;
    if could_take_back(endpoint, at) {
        side.tx.take_back(lane, Reason::PeerWentBack);
    } else {
        side.tx.close(lane, Reason::PeerWentBack);
    }
}

/// Leaves the lane if the receiver has [ended](Room::Ended) it, and offers the unread bytes to TCP.
/// Returns whether it did. The caller completes that by `returning::send_again`.
#[cold]
pub(crate) fn leave_ended(endpoint: &Endpoint, fd: i32) -> bool {
    let mut side = endpoint.tx.lock();
    let Some(at) = side.at else { return false };
    let has_ended = side.tx.on_lane() && !side.tx.is_returning() && at.outgoing().0.is_closed();
    if !has_ended || peer_has_left(&at) {
        return false;
    }
    leave_ended_lane(endpoint, &mut side, &at);
    offer_returned(endpoint, &mut side, &at, fd);
    true
}

/// Sends by TCP the bytes that were in the lane, without waiting, or notes how many of them the broker
/// has sent. Returns `false` if TCP does not have all of them.
pub(crate) fn offer_returned(endpoint: &Endpoint, side: &mut TxSide, at: &Attachment, fd: i32) -> bool {
    if side.custody.is_handed() {
        return custody::follow(endpoint, side, fd);
    }
    let ring = at.outgoing().1;
    while let Some(range) = side.tx.returning() {
        let (base, len) = ring.run(range.start, (range.end - range.start) as usize);
        // A send would take the error, which the program has to get.
        if kernel::has_error(fd) {
            side.tx.returned(len);
            continue;
        }
        // SAFETY: a run of the mapped ring. The kernel copies it, whatever the peer does to it
        // meanwhile.
        match unsafe { kernel::send_now(fd, base, len) } {
            Ok(count) => {
                endpoint.count_sent(count);
                side.tx.returned(count);
            }
            Err(libc::EAGAIN) => return false,
            // The connection is over, and its bytes will not be read.
            Err(_) => side.tx.returned(len),
        }
    }
    true
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

/// Returns whether the receiver has returned bytes, and the sender has not noticed it. No wait may
/// begin before it has.
pub(crate) fn has_unseen_return(endpoint: &Endpoint) -> bool {
    is_returned(endpoint) && !endpoint.tx.lock().tx.is_returning()
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
