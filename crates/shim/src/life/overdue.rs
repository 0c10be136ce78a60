//! L9: bytes that lie in a lane and that nobody comes for. A receiver that says "watching" is to look at the lane before it
//! sleeps; one that sleeps by system calls of its own does not, and nothing that it sleeps on tells of a lane. So what is sent
//! is looked at again by the sender, in whatever call of ours it waits next: what has not been read by then is taken back, and goes
//! by TCP.
//!
//! A sender notes only that the connection is to be looked at: a bit, which the next look clears. As long as there is one, no
//! sleep lasts longer than until the next look. See *A receiver that never comes by* in docs/local-path.md.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

use shunt_abi::reason::Reason;

use crate::base::lock::Lock;
use crate::life::{attach, ending};
use crate::socket::endpoint::{self, Endpoint, Seen, TxSide};
use crate::socket::links::Attachment;

/// Between two looks.
const LOOK_NANOS: u64 = 20_000_000;
/// What is unread for as long as this, as looks find it, is overdue in a lane of which nothing has ever been read.
const FRESH_NANOS: u64 = 40_000_000;
/// A receiver that has read from the lane, that an epoll instance waits for, or that has not yet read what TCP has before the lane, which
/// wakes it, comes by as far as is known. But it may be busy, or wait for a processor that others want.
const KNOWN_NANOS: u64 = 1_000_000_000;

const WORD: usize = u64::BITS as usize;
/// A bit for each endpoint, by its index: something was sent on its lane.
static SENT: [AtomicU64; endpoint::MOST / WORD] = [const { AtomicU64::new(0) }; endpoint::MOST / WORD];
/// There is such a bit.
static ANY: AtomicBool = AtomicBool::new(false);
/// When the next look is due.
static NEXT: AtomicU64 = AtomicU64::new(0);
/// Held by whoever looks.
static LOOKING: Lock<()> = Lock::new(());

/// What a look has found of a lane.
#[derive(PartialEq, Eq)]
enum Found {
    /// There is nothing unread, or nothing that could be taken back.
    Nothing,
    /// The receiver may come yet.
    Early,
    /// It should have come.
    Overdue,
}

/// Bytes were published. Under the lock of their direction, which a look takes, too.
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

/// Has the next look look at this connection.
pub(crate) fn look_again_at(endpoint: &Endpoint) {
    let (word, bit) = place(endpoint);
    word.fetch_or(bit, SeqCst);
    ANY.store(true, SeqCst);
}

/// How long a sleep may last because of that.
#[inline]
pub(crate) fn patience() -> Option<u64> {
    ANY.load(Relaxed).then_some(LOOK_NANOS)
}

/// Looks if it is time, which `clock` tells. Called before a sleep, outside all locks.
#[inline]
pub(crate) fn look_if_due(clock: impl FnOnce() -> u64) {
    if ANY.load(Relaxed) {
        let now = clock();
        if now >= NEXT.load(Relaxed) {
            look(now);
        }
    }
}

#[cold]
fn look(now: u64) {
    // Another thread that looks does so for all.
    let Some(_one) = LOOKING.try_lock() else { return };
    NEXT.store(now + LOOK_NANOS, Relaxed);
    ANY.store(false, SeqCst);
    for (index, word) in SENT[..endpoint::made().div_ceil(WORD)].iter().enumerate() {
        // Cleared first: whoever sends once it has been looked at sets it again.
        let mut bits = if word.load(Relaxed) == 0 { 0 } else { word.swap(0, SeqCst) };
        while bits != 0 {
            let bit = bits.trailing_zeros() as usize;
            bits &= bits - 1;
            let Some(endpoint) = endpoint::at((index * WORD + bit) as u32) else { continue };
            if ending::look(endpoint, now) {
                look_again_at(endpoint);
            }
            if find(endpoint, now) == Found::Overdue {
                attach::take_back(endpoint, Reason::Unread);
            }
        }
    }
}

/// What is to be looked at again is listed again.
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
    let unread = if tx.on_lane() { tx.unread(at.outgoing().0) } else { 0 };
    if unread == 0 || !attach::could_take_back(endpoint, at) {
        seen.unread_since = None;
        return Found::Nothing;
    }
    // Of a lane that moves somebody takes care.
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

/// Whether a lane has ever ended a wait of this process: then it waits where it can be seen.
static HAS_WAITED: AtomicBool = AtomicBool::new(false);
/// Lanes of this process's that were taken back before one had.
static TAKEN_BACK: AtomicU64 = AtomicU64::new(0);
/// So many of them say that none will.
const ENOUGH: u64 = 2;

/// A doorbell has ended a sleep of this process's, or what came by a lane has kept it from one.
#[inline]
pub(crate) fn note_waited() {
    if !HAS_WAITED.load(Relaxed) {
        HAS_WAITED.store(true, Relaxed);
    }
}

/// A peer has taken back what this process had not read.
pub(crate) fn note_taken_back() {
    if !HAS_WAITED.load(Relaxed) {
        TAKEN_BACK.fetch_add(1, Relaxed);
    }
}

/// Whether this process seems never to wait where lanes wake it. Then it is to stay on TCP, so that not each of its connections
/// must find that out anew.
pub(crate) fn is_unseen() -> bool {
    TAKEN_BACK.load(Relaxed) >= ENOUGH
}

/// In a forked child, which has none of its parent's lanes to send on.
///
/// # Safety
/// This must be the only thread of the process.
pub(crate) unsafe fn after_fork_in_child() {
    // SAFETY: the caller's promise.
    unsafe { LOOKING.reset() };
}
