//! The unread timeout: bytes that lie in a lane without being read (L9).
//!
//! A receiver that announces "watching" must check the lane before it sleeps. A receiver that
//! sleeps by system calls past the shim does not, and nothing that it sleeps on reports a lane. So
//! the sender checks its lanes at its later calls that wait. It reclaims the bytes that have not
//! been read in time, and sends them by TCP.
//!
//! ```text
//! send on a lane:   set the endpoint's bit in SENT
//! call that waits:  sleep for at most 20 ms while any bit is set, and check before each sleep:
//!                     nothing unread, or not reclaimable ---> clear the bit
//!                     the receiver has made progress -------> begin the time anew
//!                     no progress for 40 ms, or 1 s --------> reclaim, and fall back to TCP
//!                     bytes that TCP has yet to take -------> offer them to TCP again
//! ```
//!
//! Example: a server waits for its requests by a system call that the shim does not see. A client
//! sends a request by a lane. The client finds it unread when it starts to wait for the response,
//! and again after 20 ms. After 40 ms it reclaims the request and sends it by TCP, which wakes the
//! server.
//!
//! See *A receiver that never comes by* in docs/local-path.md.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

use shunt_abi::reason::Reason;

use crate::base::lock::Lock;
use crate::base::rank;
use crate::life::{attach, ending, returning};
use crate::socket::endpoint::{self, Endpoint, Seen, TxSide};
use crate::socket::links::Attachment;
use crate::socket::outgoing;

/// The time between two checks.
const LOOK_NANOS: u64 = 20_000_000;
/// The time after which bytes are overdue in a lane of which nothing has ever been read. It counts
/// from the first check that finds them unread.
const FRESH_NANOS: u64 = 40_000_000;
/// The time for a receiver that is known to check its lane. It has read from the lane, or waits for
/// it by an epoll instance, or has yet to read TCP bytes before the lane, which wake it. But it may
/// be busy, or wait for a processor.
const KNOWN_NANOS: u64 = 1_000_000_000;

const WORD: usize = u64::BITS as usize;
/// A bit for each endpoint, by its index, that is set when bytes are sent on its lane.
static SENT: [AtomicU64; endpoint::MOST / WORD] = [const { AtomicU64::new(0) }; endpoint::MOST / WORD];
/// Set if there is such a bit.
static ANY: AtomicBool = AtomicBool::new(false);
/// When the next check is due.
static NEXT: AtomicU64 = AtomicU64::new(0);
/// Held by the thread that checks.
static LOOKING: Lock<(), { rank::UNREAD }> = Lock::new(());

/// The result of a check of a lane.
#[derive(PartialEq, Eq)]
enum Found {
    /// Nothing is unread, or nothing could be reclaimed.
    Nothing,
    /// The receiver may still read in time.
    Early,
    /// The receiver should have read.
    Overdue,
    /// TCP has yet to take bytes that were in the lane.
    Returning,
}

/// Notes that bytes were published. The caller holds the lock of the direction, which a check takes
/// as well.
#[inline(always)]
pub(crate) fn note_sent(endpoint: &Endpoint, seen: &Seen) {
    if !seen.is_listed.get() {
        list(endpoint, seen);
    }
}

#[cold]
fn list(endpoint: &Endpoint, seen: &Seen) {
    seen.is_listed.set(true);
    look_again_at(endpoint);
}

/// Includes this connection in the next check.
pub(crate) fn look_again_at(endpoint: &Endpoint) {
    let (word, bit) = place(endpoint);
    word.fetch_or(bit, SeqCst);
    ANY.store(true, SeqCst);
}

/// Returns the longest sleep that the pending checks allow.
#[inline]
pub(crate) fn patience() -> Option<u64> {
    ANY.load(Relaxed).then_some(LOOK_NANOS)
}

/// Checks the lanes if it is time according to `clock`. Called before a sleep, without locks.
#[inline]
pub(crate) fn check_if_due(clock: impl FnOnce() -> u64) {
    if ANY.load(Relaxed) {
        let now = clock();
        if now >= NEXT.load(Relaxed) {
            look(now);
        }
    }
}

#[cold]
fn look(now: u64) {
    // One thread checks for all of them.
    let Some(_one) = LOOKING.try_lock() else { return };
    NEXT.store(now + LOOK_NANOS, Relaxed);
    ANY.store(false, SeqCst);
    for (index, word) in SENT[..endpoint::made().div_ceil(WORD)].iter().enumerate() {
        // The bits are cleared first. A send after the check of its endpoint sets the bit again.
        let mut bits = if word.load(Relaxed) == 0 { 0 } else { word.swap(0, SeqCst) };
        while bits != 0 {
            let bit = bits.trailing_zeros() as usize;
            bits &= bits - 1;
            let Some(endpoint) = endpoint::at((index * WORD + bit) as u32) else { continue };
            if ending::look(endpoint, now) {
                look_again_at(endpoint);
            }
            match find(endpoint, now) {
                Found::Overdue => attach::take_back(endpoint, Reason::Unread),
                Found::Returning => {
                    returning::send_again(endpoint, endpoint.fd());
                }
                Found::Nothing | Found::Early => {}
            }
        }
    }
}

/// Checks a lane, and lists it again if another check is needed.
fn find(endpoint: &Endpoint, now: u64) -> Found {
    let mut side = endpoint.tx.lock();
    side.seen.is_listed.set(false);
    let found = find_in(endpoint, &mut side, now);
    if found == Found::Early {
        list(endpoint, &side.seen);
    }
    found
}

fn find_in(endpoint: &Endpoint, side: &mut TxSide, now: u64) -> Found {
    let TxSide { tx, at: Some(at), seen, .. } = side else { return Found::Nothing };
    if tx.is_returning() {
        return Found::Returning;
    }
    let unread = if tx.on_lane() { tx.unread(at.outgoing().0) } else { 0 };
    if unread == 0 || !outgoing::could_take_back(endpoint, at) {
        seen.unread_since = None;
        return Found::Nothing;
    }
    // A lane with progress is not overdue.
    let reached = [tx.lane_total() - unread, at.outgoing().0.ahead()];
    match seen.unread_since {
        Some((since, then)) if then == reached => {
            let is_overdue = now - since >= allowed(at);
            if is_overdue { Found::Overdue } else { Found::Early }
        }
        _ => {
            seen.unread_since = Some((now, reached));
            Found::Early
        }
    }
}

fn allowed(at: &Attachment) -> u64 {
    let lane = at.outgoing().0;
    let is_known = lane.has_been_read() || lane.has_lasting_rx_waiter() || lane.ahead() > 0;
    if is_known { KNOWN_NANOS } else { FRESH_NANOS }
}

#[inline]
fn place(endpoint: &Endpoint) -> (&'static AtomicU64, u64) {
    let index = endpoint.index() as usize;
    (&SENT[index / WORD], 1 << (index % WORD))
}

/// Set once a lane has ended a wait of this process. Its waits are then visible to the shim.
static HAS_WAITED: AtomicBool = AtomicBool::new(false);
/// Receiving lanes of this process that were reclaimed by the peer before a lane had ended a wait.
static TAKEN_BACK: AtomicU64 = AtomicU64::new(0);
/// The number of reclaimed lanes after which this process is regarded as one whose waits the shim
/// does not see.
const ENOUGH: u64 = 2;

/// Notes that a doorbell has ended a sleep of this process, or that bytes in a lane have prevented
/// one.
#[inline]
pub(crate) fn note_waited() {
    if !HAS_WAITED.load(Relaxed) {
        HAS_WAITED.store(true, Relaxed);
    }
}

/// Notes that a peer has reclaimed bytes that this process had not read.
pub(crate) fn note_taken_back() {
    if !HAS_WAITED.load(Relaxed) {
        TAKEN_BACK.fetch_add(1, Relaxed);
    }
}

/// Returns whether this process seems never to wait where lanes can wake it. It then stays on TCP.
/// Otherwise each of its connections would have to find this out anew.
pub(crate) fn is_unseen() -> bool {
    TAKEN_BACK.load(Relaxed) >= ENOUGH
}

/// Frees the lock of the checks in a forked child, which sends on none of its parent's lanes.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn after_fork_in_child() {
    // SAFETY: the caller's promise.
    unsafe { LOOKING.reset() };
}
