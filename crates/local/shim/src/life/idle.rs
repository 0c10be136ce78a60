//! Idle connections: if a lane has grown and its connection then moves nothing for a while, the
//! connection falls back to TCP. Once both ends have left the lanes, the broker frees their memory.
//! The connection is offered again when it is used.
//!
//! The shim has no thread for this. A thread that is about to sleep checks the connections, and
//! wakes up for the next check if there are grown lanes.

use std::sync::atomic::Ordering::*;

use shunt_abi::reason::Reason;

use crate::base::process;
use crate::life::attach;
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::links::{EMPTY_AT, GROWN_AT};

/// A connection that has moved nothing between two checks is idle.
const BETWEEN_NANOS: u64 = 15_000_000_000;

/// After a link has been left, the broker removes it within this time. The memory is free once it
/// is unmapped.
const UNLINKED_NANOS: u64 = 6_000_000_000;
/// How often a sleeping thread checks for that.
const UNLINKED_STEP_NANOS: u64 = 1_000_000_000;

/// Returns how long a sleep that begins at `now` may last, so that the next check is not missed.
/// `None` means without a limit.
#[inline]
pub(crate) fn patience(now: u64) -> Option<u64> {
    let grown = match GROWN_AT.load(Relaxed) {
        0 => None,
        at => Some((at + BETWEEN_NANOS).saturating_sub(now)),
    };
    let emptied = awaits_unlink(|| now).then_some(UNLINKED_STEP_NANOS);
    [grown, emptied].into_iter().flatten().min()
}

/// Returns whether a link was left so recently that the broker may soon remove it. A sleep then has
/// several steps, because the memory is not free as long as this process has it mapped.
#[inline(always)]
pub(crate) fn awaits_unlink(clock: impl FnOnce() -> u64) -> bool {
    let at = EMPTY_AT.load(Relaxed);
    at != 0 && is_recent(at, clock())
}

#[cold]
fn is_recent(at: u64, now: u64) -> bool {
    let is_recent = now < at + UNLINKED_NANOS;
    if !is_recent {
        let _ = EMPTY_AT.compare_exchange(at, 0, Relaxed, Relaxed);
    }
    is_recent
}

/// Checks the connections if it is time according to `clock`. Called without locks, before a sleep
/// is announced.
#[inline]
pub(crate) fn check_if_due(clock: impl FnOnce() -> u64) {
    let grown_at = GROWN_AT.load(Relaxed);
    if grown_at != 0 && clock() >= grown_at + BETWEEN_NANOS {
        look_at_all(grown_at);
    }
}

#[cold]
fn look_at_all(grown_at: u64) {
    // Only one thread checks.
    if GROWN_AT.compare_exchange(grown_at, process::now(), AcqRel, Relaxed).is_err() {
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
    // A lane that grows meanwhile may find that a check is due, which then includes it.
    GROWN_AT.store(if grown > 0 { process::now() } else { 0 }, Relaxed);
}

enum State {
    /// On TCP, or without more memory than the first page.
    Small,
    Busy,
    Idle,
}

fn state(endpoint: &Endpoint) -> State {
    let mut tx = endpoint.tx.lock();
    let mut rx = endpoint.rx.lock();
    let Some(at) = tx.at.filter(|_| tx.seen.has_grown()) else { return State::Small };
    let (lane, ring) = at.incoming();
    let moved = tx.tx.lane_total() + rx.rx.lane_total();
    let was = tx.seen.moved.replace(moved);
    let is_empty = tx.tx.unread(at.outgoing().0) == 0 && rx.rx.unread(lane, &ring) == 0;
    if is_empty && was == Some(moved) { State::Idle } else { State::Busy }
}
