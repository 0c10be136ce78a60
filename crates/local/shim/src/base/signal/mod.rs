//! Signals, and everything else that can end a call in the middle. See
//! `docs/adr/0008-handlers-wait-for-the-shim.md`.
//!
//! Three guarantees hold:
//!
//! - No handler of the program runs while this thread is in the shim's own code. It waits for
//!   microseconds, until the [`Shield`] is down.
//! - A call that sleeps does so in [`open`], where handlers run as they would in the kernel and the
//!   thread holds no lock. A longjmp, an exception, pthread_exit or pthread_cancel may leave the
//!   call from there. The thread's [`UndoLog`](crate::base::undo_log::UndoLog) has what must be
//!   undone then.
//! - An interrupted call knows which kind of handler ran ([`Ran`]), so it ends or continues as the
//!   kernel's call would.

mod action;
mod announced;
mod cancel;
mod deliver;
mod shield;

#[cfg(target_arch = "x86_64")]
pub(crate) use action::set_entrance;
pub(crate) use action::{
    across_fork, adopt_handlers, after_fork_in_child, give_back, kernel_sigaction, sigaction,
    unseen_handlers_restart,
};
pub(crate) use announced::{announce, calls_on, count_own_calls, has_announced, undo_left, withdraw};
pub(crate) use cancel::{cancel, point, set_type, without};
#[cfg(target_arch = "x86_64")]
pub(crate) use deliver::trampoline as handler;
pub(crate) use deliver::{Ran, handlers, ring_bell_on_signal, take_ran};
pub(crate) use shield::{Brief, Shield, has_deferred, is_due, open};

/// Signals that a thread raises by its own instructions. They are never deferred, since the code
/// that raised them cannot go on, and the trampoline does not handle them.
pub(crate) const FAULTS: [std::ffi::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
