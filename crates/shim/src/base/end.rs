//! The end of a thread: what it has left comes back.

use crate::base::alloc;
use crate::base::signal::Shield;
use crate::base::thread;

/// At its end, also by cancellation. A way into the library, which the test of the stack's bound finds by this name.
#[inline(never)]
pub(crate) fn ends() {
    over();
    thread::this().apart.give_back();
}

/// The same while it still makes calls.
pub(crate) fn over() {
    let thread = thread::this();
    let _shield = Shield::raise();
    thread.end_is_awaited.set(false);
    thread.is_lent.set(false);
    thread.journal.undo_all();
    if let Some(slot) = thread.take_slot() {
        slot.give_back();
    }
    alloc::give_back(&thread.kept);
}
