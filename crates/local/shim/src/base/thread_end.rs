//! The end of a thread: returns the resources that it still has.

use crate::base::alloc;
use crate::base::signal::Shield;
use crate::base::thread;

/// Runs at the end of a thread, also after cancellation. The test of the stack's bound finds this
/// entry point by its name.
#[inline(never)]
pub(crate) fn ends() {
    over();
    thread::this().apart.give_back();
}

/// Returns what a thread has, except its separate stack: the thread still makes calls after this.
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
