//! The shield: while it is up, the program's signal handlers wait.
//!
//! Raising and lowering it cost two stores each to the thread's own memory, and no system call. The
//! kernel still delivers signals, but to `deliver::trampoline`, which sees the shield and defers
//! them.

use std::hint::black_box;
use std::sync::atomic::{Ordering::*, compiler_fence};

use super::{announced, cancel, deliver};
#[cfg(doc)]
use crate::base::process;
use crate::base::thread::{self, Thread};
use crate::base::undo_log::Held;

/// Keeps the shield up until dropped. Every hook raises it before it uses state of the program's
/// descriptors.
pub(crate) struct Shield {
    thread: &'static Thread,
    below: u32,
}

impl Shield {
    #[inline]
    pub(crate) fn raise() -> Shield {
        let thread = thread::this();
        let below = thread.shields.load(Relaxed);
        if below == 0 {
            if thread.cancelled_anywhere.get() {
                cancel::hold_off();
            }
            thread.ran.store(0, Relaxed);
            thread.bell.store(0, Relaxed);
        }
        thread.shields.store(below + 1, Relaxed);
        // The signal handler that reads it runs on this thread, so a compiler fence is enough.
        compiler_fence(SeqCst);
        Shield { thread, below }
    }

    /// Leaves the shield up beyond this scope, until [`Shield::take_over`].
    pub(crate) fn stay_up(self) {
        std::mem::forget(self);
    }

    /// Returns the shield that [`Shield::stay_up`] left up.
    #[inline]
    pub(crate) fn take_over() -> Shield {
        let thread = thread::this();
        Shield { thread, below: thread.shields.load(Relaxed) - 1 }
    }
}

/// A shield without a destructor, for code that never waits and returns without unwinding. A
/// destructor costs instructions even where nothing unwinds. [`Brief::lower`] ends it.
pub(crate) struct Brief(&'static Thread);

impl Brief {
    /// Raises the shield, or returns `None` if one is up already. Does not reset
    /// [`Ran`](super::Ran), which no caller of this reads. No thread has asynchronous cancellation,
    /// since the [gate](process::is_gate_open) is open.
    #[inline(always)]
    pub(crate) fn raise() -> Option<Brief> {
        let thread = thread::this();
        if thread.shields.load(Relaxed) != 0 {
            return None;
        }
        thread.shields.store(1, Relaxed);
        compiler_fence(SeqCst);
        Some(Brief(thread))
    }

    /// Returns the shield that another function has raised and left up.
    #[inline(always)]
    pub(crate) fn take_over() -> Brief {
        Brief(thread::this())
    }

    /// Lowers the shield and returns `answer`. A caller with nothing else to do can so end in a
    /// tail call.
    #[inline(always)]
    pub(crate) fn lower(self, answer: isize) -> isize {
        compiler_fence(SeqCst);
        self.0.shields.store(0, Relaxed);
        compiler_fence(SeqCst);
        match self.0.deferred.load(Relaxed) {
            0 => answer,
            _ => release_before(self.0, answer),
        }
    }
}

#[cold]
#[inline(never)]
fn release_before(thread: &'static Thread, answer: isize) -> isize {
    deliver::release(thread);
    // Hides the value from the compiler. A caller that knew it would keep it in a callee-saved
    // register, which it would have to save first.
    black_box(answer)
}

impl Drop for Shield {
    #[inline]
    fn drop(&mut self) {
        lower(self.thread, self.below);
    }
}

/// Sets the count to `to` rather than decrementing it: unwinding may have left an [`open`] that had
/// set it to 0.
#[inline]
fn lower(thread: &'static Thread, to: u32) {
    compiler_fence(SeqCst);
    thread.shields.store(to, Relaxed);
    compiler_fence(SeqCst);
    if to == 0 {
        if thread.deferred.load(Relaxed) != 0 {
            deliver::release(thread);
        }
        if thread.cancelled_anywhere.get() {
            cancel::let_in();
        }
    }
}

/// Makes a call that may block, with the shield down. Handlers run and the thread may be cancelled,
/// and either may abandon the call. No lock is held here. `held` is undone if the call is
/// abandoned. Otherwise, undoing it is the caller's task.
#[inline]
pub(crate) fn open<R>(held: Held, call: impl FnOnce() -> R) -> R {
    let thread = thread::this();
    let up = thread.shields.load(Relaxed);
    let place = announced::enter(thread, held);
    lower(thread, 0);
    let result = call();
    if thread.cancelled_anywhere.get() {
        cancel::hold_off();
    }
    thread.shields.store(up, Relaxed);
    compiler_fence(SeqCst);
    thread.journal.leave(place);
    result
}

/// Returns whether a signal is deferred, or a handler has run since the current call began and has
/// not been taken by `take_ran`.
pub(crate) fn is_due() -> bool {
    has_deferred() || thread::this().ran.load(Relaxed) != 0
}

/// Returns whether a signal is deferred. A spinning thread must then stop.
#[inline]
pub(crate) fn has_deferred() -> bool {
    thread::this().deferred.load(Relaxed) != 0
}
