//! What this thread has announced for the time of its sleeps: see [`Journal`](crate::base::journal::Journal).

use crate::base::journal::Held;
use crate::base::thread::{self, Thread};

/// Announces something for a call whose frame is at `here`, until it is [withdrawn](withdraw). Under the shield.
pub(crate) fn announce(held: Held, here: usize) -> usize {
    enter_at(thread::this(), held, here)
}

/// The same for the call that asks.
#[inline]
pub(super) fn enter(thread: &Thread, held: Held) -> usize {
    let mark = 0u8;
    enter_at(thread, held, std::ptr::from_ref(&mark).addr())
}

#[inline]
fn enter_at(thread: &Thread, held: Held, here: usize) -> usize {
    thread.await_end();
    thread.journal.enter(held, here, |at| thread.apart.has(at))
}

/// Whether this thread has announced anything: perhaps for a call that was left.
#[inline]
pub(crate) fn has_announced() -> bool {
    !thread::this().journal.is_empty()
}

/// Undoes what calls that were left have announced. Under the shield.
pub(crate) fn undo_left() {
    let thread = thread::this();
    let place = enter(thread, Held::NOTHING);
    thread.journal.leave(place);
}

/// Ends that; undoing it is the caller's.
pub(crate) fn withdraw(place: usize) {
    thread::this().journal.leave(place);
}

/// How often what this thread has announced counts among the calls in progress on the endpoint at this address.
pub(crate) fn calls_on(endpoint: usize) -> u32 {
    thread::this().journal.all().map(|held| (held.kind.calls_on)(held.words, endpoint)).sum()
}

/// In a forked child, which has this thread alone, and whose endpoints have forgotten what was counted.
pub(crate) fn count_own_calls() {
    thread::this().journal.all().for_each(|held| (held.kind.count_again)(held.words));
}
