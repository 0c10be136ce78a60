//! Signals, and everything else that can end a call in the middle: see `docs/adr/0008`.
//!
//! Three promises. No handler of the program's runs while this thread is inside the shim's own code: it waits for
//! the microseconds until the [`Shield`] is down. A call that sleeps does so in [`open`], where handlers run as they
//! would in the kernel, and where the thread holds no lock: it may be left for good from there, by longjmp, an
//! exception, pthread_exit or pthread_cancel, and what it had announced is in its
//! [`Journal`](crate::base::journal::Journal). And a call that was
//! interrupted knows by what kind of handler ([`Ran`]), so that it ends or goes on as the kernel's would.

mod action;
mod announced;
mod cancel;
mod deliver;
mod shield;

#[cfg(target_arch = "x86_64")]
pub(crate) use action::set_entrance;
pub(crate) use action::{
    after_fork_in_child, give_back, hold_lock, kernel_sigaction, release_lock, reset_lock, sigaction,
    unseen_handlers_restart,
};
pub(crate) use announced::{announce, calls_on, count_own_calls, has_announced, undo_left, withdraw};
pub(crate) use cancel::{cancel, point, set_type, without};
#[cfg(target_arch = "x86_64")]
pub(crate) use deliver::trampoline as handler;
pub(crate) use deliver::{Ran, ring_bell_on_signal, take_ran};
pub(crate) use shield::{Brief, Shield, has_deferred, is_due, open};

/// What a thread does to itself. These are never put off, since the code that made them cannot go on, and never pass
/// through us.
pub(crate) const FAULTS: [std::ffi::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
