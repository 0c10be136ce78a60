//! The shield: while it is up, the program's signal handlers wait.
//!
//! It costs two moves to memory of the thread's own when it goes up and two when it comes down, and no system call: the
//! kernel still delivers signals, but to `deliver::trampoline`, which sees the shield and puts them off.

use std::hint::black_box;
use std::sync::atomic::{Ordering::*, compiler_fence};

use super::{announced, cancel, deliver};
use crate::base::journal::Held;
#[cfg(doc)]
use crate::base::process;
use crate::base::thread::{self, Thread};

/// Up until dropped. Raised by every hook before it touches what the shim knows of the program's descriptors.
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
        // The handler that looks at it runs on this very thread, so only the compiler must keep the order.
        compiler_fence(SeqCst);
        Shield { thread, below }
    }

    /// Stays up beyond this scope, until [`Shield::take_over`].
    pub(crate) fn stay_up(self) {
        std::mem::forget(self);
    }

    /// The shield that [`Shield::stay_up`] left behind.
    #[inline]
    pub(crate) fn take_over() -> Shield {
        let thread = thread::this();
        Shield { thread, below: thread.shields.load(Relaxed) - 1 }
    }
}

/// The same for something that waits for nothing and ends by returning, until [`Brief::lower`]: without a destructor, which takes instructions
/// also where nothing unwinds.
pub(crate) struct Brief(&'static Thread);

impl Brief {
    /// `None`: one is up already. What is known of handlers stays: nobody asks for it. No thread may be cancelled anywhere, since the
    /// [gate](process::is_gate_open) is open.
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

    /// The one that is up, which whoever raised it has left to others to lower.
    #[inline(always)]
    pub(crate) fn take_over() -> Brief {
        Brief(thread::this())
    }

    /// Returns `answer`, so that whoever has nothing else to do can leave the rest to what this calls.
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
    // Unknown to a caller, which would otherwise keep it over the call, in a register that it had to save before.
    black_box(answer)
}

impl Drop for Shield {
    #[inline]
    fn drop(&mut self) {
        lower(self.thread, self.below);
    }
}

/// An absolute number, not one less: unwinding may have left an [`open`] by way of which this is the outermost.
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

/// Makes a call that may block with the shield down: handlers run, the thread may be cancelled, and either may leave for
/// good. No lock is held here. What the thread has announced is in `held`: it is undone if nobody comes back, and the
/// caller's to undo otherwise.
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

/// Whether a handler waits, or one has run since the present call began and nobody has asked for it.
pub(crate) fn is_due() -> bool {
    has_deferred() || thread::this().ran.load(Relaxed) != 0
}

/// Whether a handler waits: whoever spins must give way.
#[inline]
pub(crate) fn has_deferred() -> bool {
    thread::this().deferred.load(Relaxed) != 0
}
