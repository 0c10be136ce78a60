//! A connection whose lane has grown and that then moves nothing for a while goes back to TCP: once both ends have left its lanes
//! the broker gives their memory back. It is offered again when it is used.
//!
//! There is no thread of ours to see to that. Whoever is about to sleep looks, and if there are such lanes, wakes up for
//! the next look.

use std::sync::atomic::{AtomicU64, Ordering::*};

use shunt_abi::reason::Reason;

use crate::endpoint::{self, Endpoint};
use crate::{attach, process};

/// A connection that has moved nothing between two looks is idle.
const BETWEEN_NANOS: u64 = 15_000_000_000;
/// A lane with little under way has so much memory, and keeps it.
const FIRST_PAGE: usize = 4096;

/// When the next look is due; 0: no lane has grown.
static NEXT_LOOK: AtomicU64 = AtomicU64::new(0);

/// A lane has so much memory now.
pub(crate) fn note_backed(bytes: usize) {
    if bytes > FIRST_PAGE && NEXT_LOOK.load(Relaxed) == 0 {
        NEXT_LOOK.store(process::now() + BETWEEN_NANOS, Relaxed);
    }
}

/// How long a sleep that begins `now` may last, so that the next look is not missed; `None`: for ever.
#[inline]
pub(crate) fn patience(now: u64) -> Option<u64> {
    match NEXT_LOOK.load(Relaxed) {
        0 => None,
        next => Some(next.saturating_sub(now)),
    }
}

/// Looks, if that is due. Outside all locks, before a sleep is announced.
#[inline]
pub(crate) fn look() {
    let due = NEXT_LOOK.load(Relaxed);
    if due != 0 && process::now() >= due {
        look_at_all(due);
    }
}

#[cold]
fn look_at_all(due: u64) {
    // One thread does.
    if NEXT_LOOK.compare_exchange(due, due + BETWEEN_NANOS, AcqRel, Relaxed).is_err() {
        return;
    }
    let mut grown = 0;
    for endpoint in endpoint::all().filter(|endpoint| endpoint.is_attached()) {
        match state(endpoint) {
            State::Small => {}
            State::Busy => grown += 1,
            State::Idle => attach::give_back(endpoint, Reason::Unused),
        }
    }
    // One that grows meanwhile may find that a look is due, and then is in that.
    let next = if grown > 0 { process::now() + BETWEEN_NANOS } else { 0 };
    NEXT_LOOK.store(next, Relaxed);
}

enum State {
    /// On TCP, or with no more than its first page.
    Small,
    Busy,
    Idle,
}

fn state(endpoint: &Endpoint) -> State {
    let mut tx = endpoint.tx.lock();
    let mut rx = endpoint.rx.lock();
    let Some(at) = tx.at.filter(|_| tx.seen.backed.get() > FIRST_PAGE) else { return State::Small };
    let (lane, ring) = at.incoming();
    let moved = tx.tx.lane_total() + rx.rx.lane_total();
    let was = tx.seen.moved.replace(moved);
    let is_empty = tx.tx.unread(at.outgoing().0) == 0 && rx.rx.unread(lane, &ring) == 0;
    if is_empty && was == Some(moved) { State::Idle } else { State::Busy }
}
