//! The handler that the kernel calls in place of the program's handlers. It runs the program's
//! handler, or defers the signal while the shield is up.
//!
//! The kernel blocks all signals while the trampoline runs. After a deferral, the trampoline leaves
//! them blocked until that signal has been released. So a thread defers at most one signal at a
//! time.
//!
//! ```text
//! thread, in the shim's code               kernel, on the same thread
//!   shield up
//!                                          SIGALRM: trampoline() sees the shield
//!                                            defer(): keep siginfo and mask, block all signals
//!   shield down: release()
//!     send SIGALRM again, restore the mask
//!                                          SIGALRM: trampoline() runs the program's handler
//! ```

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering::*};

use libc::{siginfo_t, ucontext_t};

use super::{FAULTS, action};
use crate::base::thread::{self, Deferred, Thread};
use crate::base::waiter::Slot;
use crate::base::{errno, real};

/// The kind of handler that has run since the current call began. If several have run, the first
/// counts, as in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Ran {
    /// No handler ran.
    Nothing = 0,
    /// A handler with SA_RESTART.
    Restarting = 1,
    /// A handler without SA_RESTART.
    Interrupting = 2,
}

/// Returns and resets the kind of handler that has run on this thread, since the current call began
/// or this was last called.
pub(crate) fn take_ran() -> Ran {
    match thread::this().ran.swap(0, Relaxed) {
        0 => Ran::Nothing,
        1 => Ran::Restarting,
        _ => Ran::Interrupting,
    }
}

/// Makes each handler ring the doorbell of `waiter`, so that the next sleep ends. That covers a
/// handler that runs between the last [`take_ran`] and the sleep in the kernel.
pub(crate) fn ring_bell_on_signal(waiter: Option<Slot>) {
    thread::this().bell.store(waiter.map_or(0, |slot| slot.0 as u32 + 1), Relaxed);
}

/// The handlers that run on any thread: how many have begun in the upper half, and how many run in
/// the lower. One that is left by longjmp counts as running for good.
static HANDLERS: AtomicU64 = AtomicU64::new(0);
const BEGUN: u64 = 1 << 32;

/// The handlers that have begun, and those that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handlers(u64);

/// Returns the present count of handlers.
pub(crate) fn handlers() -> Handlers {
    Handlers(HANDLERS.load(SeqCst))
}

impl Handlers {
    /// Returns whether no handler has run from this count to a later one.
    pub(crate) fn none_has_run(self, until: Handlers) -> bool {
        self == until && self.0.is_multiple_of(BEGUN)
    }
}

/// A handler of the program, with all arguments that the kernel may pass.
type Handler = unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void);

/// The handler that the kernel calls.
pub(crate) unsafe extern "C-unwind" fn trampoline(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let thread = thread::this();
    // SAFETY: the kernel's arguments, valid and unaliased while the handler runs.
    let (info, context) = unsafe { (&mut *info, &mut *context.cast::<ucontext_t>()) };
    if thread.shields.load(Relaxed) == 0 {
        run(thread, signal, info, context);
    } else {
        defer(thread, signal, info, context);
    }
}

/// Runs the program's handler as the kernel would have.
fn run(thread: &Thread, signal: c_int, info: &mut siginfo_t, context: &mut ucontext_t) {
    let (ran, bell) = (thread.ran.load(Relaxed), thread.bell.load(Relaxed));
    let stack = &context.uc_stack;
    thread.journal.alternate.set((stack.ss_sp.addr(), stack.ss_sp.addr() + stack.ss_size));
    let action = action::begin(signal);
    let itself = if action.flags & libc::SA_NODEFER == 0 { bit(signal) } else { 0 };
    set_mask(*mask_of(context) | action.mask | itself);
    HANDLERS.fetch_add(BEGUN + 1, SeqCst);
    // SAFETY: the program's handler. A handler that takes only the signal number ignores the other
    // arguments.
    unsafe {
        let handler: Handler = std::mem::transmute(action.handler);
        handler(signal, info, std::ptr::from_mut(context).cast());
    }
    HANDLERS.fetch_sub(1, SeqCst);
    let kind = if action.flags & libc::SA_RESTART != 0 { Ran::Restarting } else { Ran::Interrupting };
    // Calls in the handler have overwritten these two fields.
    thread.ran.store(if ran == Ran::Nothing as u32 { kind as u32 } else { ran }, Relaxed);
    thread.bell.store(bell, Relaxed);
    if let Some(slot) = bell.checked_sub(1) {
        Slot(slot as usize).ring();
    }
}

/// Defers the signal, and blocks all others until it is released.
fn defer(thread: &Thread, signal: c_int, info: &siginfo_t, context: &mut ucontext_t) {
    let mask = mask_of(context);
    // SAFETY: no other code of this thread runs while its signals are blocked.
    unsafe { *thread.deferral.get() = Deferred { info: *info, mask: *mask } };
    thread.deferred.store(signal, Relaxed);
    *mask |= !FAULTS.iter().fold(0, |bits, fault| bits | bit(*fault));
}

/// Sends the deferred signal to this thread again, with its original `siginfo_t`. Called when the
/// shield is down. The kernel delivers it as soon as the mask is restored, before the last system
/// call here returns.
#[cold]
pub(super) fn release(thread: &Thread) {
    let before = errno::get();
    let signal = thread.deferred.swap(0, Relaxed);
    // SAFETY: written before `deferred` was set, and all signals are still blocked.
    let (mut info, mask) = unsafe { ((*thread.deferral.get()).info, (*thread.deferral.get()).mask) };
    if !queue_first(signal, &info) {
        // The user's queue of signals is full, so the handler runs here, with the context of this
        // call.
        // SAFETY: zeroes are a valid context. The call below fills it in, if libc has that
        // function.
        let mut context: ucontext_t = unsafe { std::mem::zeroed() };
        // SAFETY: fills a local structure.
        unsafe { real::getcontext(&mut context) };
        *mask_of(&mut context) = mask;
        run(thread, signal, &mut info, &mut context);
    }
    set_mask(mask);
    errno::set(before);
}

/// Drops the deferred signal in a forked child, which inherits the mask of its parent but no
/// pending signals.
pub(super) fn forget(thread: &Thread) {
    if thread.deferred.swap(0, Relaxed) != 0 {
        // SAFETY: as in `release`.
        set_mask(unsafe { (*thread.deferral.get()).mask });
    }
}

/// Capacity for real-time signals that are queued behind the deferred one. More than that lose
/// their order.
const QUEUED: usize = 8;

/// Sends this thread a signal again, ahead of later signals with the same number. Returns `false`
/// if the kernel refuses.
fn queue_first(signal: c_int, info: &siginfo_t) -> bool {
    // SAFETY: zeroes are a valid siginfo_t.
    let mut later: [siginfo_t; QUEUED] = unsafe { std::mem::zeroed() };
    let mut count = 0;
    // Of a standard signal, at most one is pending.
    if signal >= libc::SIGRTMIN() {
        while count < QUEUED && take_pending(signal, &mut later[count]) {
            count += 1;
        }
    }
    let queued = queue(signal, info);
    later[..count].iter().for_each(|info| {
        queue(signal, info);
    });
    queued
}

fn queue(signal: c_int, info: &siginfo_t) -> bool {
    let process = rustix::process::getpid().as_raw_pid();
    let thread = rustix::thread::gettid().as_raw_pid();
    let info = std::ptr::from_ref(info).addr();
    // SAFETY: a siginfo_t that the kernel wrote.
    unsafe {
        real::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            process.into(),
            thread.into(),
            signal.into(),
            info as _,
            0,
            0,
        ) == 0
    }
}

fn take_pending(signal: c_int, info: &mut siginfo_t) -> bool {
    let (set, at_once) = (bit(signal), libc::timespec { tv_sec: 0, tv_nsec: 0 });
    // A system call, because libc's function is a cancellation point.
    // SAFETY: three local structures.
    unsafe {
        let (set, time) = (std::ptr::from_ref(&set).addr(), std::ptr::from_ref(&at_once).addr());
        let info = std::ptr::from_mut(info).addr();
        real::syscall(libc::SYS_rt_sigtimedwait, set as _, info as _, time as _, size_of::<u64>() as _, 0, 0)
            == signal.into()
    }
}

/// Returns the bit of a signal in the kernel's masks.
pub(super) fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// Returns the mask that returning from a handler restores. The kernel's mask has 64 bits, even
/// where libc's type is larger.
fn mask_of(context: &mut ucontext_t) -> &mut u64 {
    // SAFETY: libc's mask is longer than a word, and aligned.
    unsafe { &mut *std::ptr::from_mut(&mut context.uc_sigmask).cast() }
}

fn set_mask(mask: u64) {
    // SAFETY: zeroes are a valid set, and the write stays within it. The call changes only this
    // thread's mask.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        std::ptr::from_mut(&mut set).cast::<u64>().write(mask);
        libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}
