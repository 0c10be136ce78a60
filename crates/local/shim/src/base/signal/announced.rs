//! The undo log of this thread for the time of its sleeps, see
//! [`UndoLog`](crate::base::undo_log::UndoLog).

use crate::base::thread::{self, Thread};
use crate::base::undo_log::Held;

/// Adds an entry for a call whose frame is at `here`, until [`withdraw`]. Returns its place. The
/// caller has raised the shield.
pub(crate) fn announce(held: Held, here: usize) -> usize {
    enter_at(thread::this(), held, here)
}

/// Adds an entry for the calling function.
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

/// Returns whether this thread has entries, possibly of an abandoned call.
#[inline]
pub(crate) fn has_announced() -> bool {
    !thread::this().journal.is_empty()
}

/// Undoes the entries of abandoned calls. The caller has raised the shield.
pub(crate) fn undo_left() {
    let thread = thread::this();
    let place = enter(thread, Held::NOTHING);
    thread.journal.leave(place);
}

/// Removes an entry without undoing it: that is the caller's task.
pub(crate) fn withdraw(place: usize) {
    thread::this().journal.leave(place);
}

/// Returns how often this thread's entries count as calls in progress on the endpoint at this
/// address.
pub(crate) fn calls_on(endpoint: usize) -> u32 {
    thread::this().journal.all().map(|held| (held.kind.calls_on)(held.words, endpoint)).sum()
}

/// Counts this thread's entries again, in a forked child. The child has only this thread, and its
/// endpoints have reset their counts.
pub(crate) fn count_own_calls() {
    thread::this().journal.all().for_each(|held| (held.kind.count_again)(held.words));
}
