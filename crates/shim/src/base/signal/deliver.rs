//! What the kernel calls in place of the program's handlers: runs them, or puts them off while the shield is up.
//!
//! The kernel blocks every signal for the trampoline's own instructions, so at most one waits at a time: the trampoline
//! leaves all of them blocked behind it until that one has been released.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::*;

use libc::{siginfo_t, ucontext_t};

use super::{FAULTS, action};
use crate::base::thread::{self, Deferred, Thread};
use crate::base::waiter::Slot;
use crate::base::{errno, real};

/// What kind of handler has run since the present call began. With more than one the first decides, as in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Ran {
    /// None did.
    Nothing = 0,
    /// One with SA_RESTART.
    Restarting = 1,
    /// One without.
    Interrupting = 2,
}

/// Since the present call of this thread began, or this was last asked.
pub(crate) fn take_ran() -> Ran {
    match thread::this().ran.swap(0, Relaxed) {
        0 => Ran::Nothing,
        1 => Ran::Restarting,
        _ => Ran::Interrupting,
    }
}

/// The sleep to come must end when a handler runs, even one that runs after the last look at [`take_ran`] and before the
/// kernel sleeps: it rings the doorbell of this waiter.
pub(crate) fn ring_bell_on_signal(waiter: Option<Slot>) {
    thread::this().bell.store(waiter.map_or(0, |slot| slot.0 as u32 + 1), Relaxed);
}

/// A program's handler, with all that the kernel can give it.
type Handler = unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void);

/// The handler that the kernel knows.
pub(crate) unsafe extern "C-unwind" fn trampoline(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let thread = thread::this();
    // SAFETY: the kernel's arguments, ours for the length of the handler.
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
    // SAFETY: the program's handler; one that takes only the number ignores the rest, as on every Linux.
    unsafe {
        let handler: Handler = std::mem::transmute(action.handler);
        handler(signal, info, std::ptr::from_mut(context).cast());
    }
    let kind = if action.flags & libc::SA_RESTART != 0 { Ran::Restarting } else { Ran::Interrupting };
    // Calls that the handler made have used these two.
    thread.ran.store(if ran == Ran::Nothing as u32 { kind as u32 } else { ran }, Relaxed);
    thread.bell.store(bell, Relaxed);
    if let Some(slot) = bell.checked_sub(1) {
        Slot(slot as usize).ring();
    }
}

/// Puts the signal off, and all others behind it.
fn defer(thread: &Thread, signal: c_int, info: &siginfo_t, context: &mut ucontext_t) {
    let mask = mask_of(context);
    // SAFETY: nothing else of this thread runs while its signals are blocked.
    unsafe { *thread.deferral.get() = Deferred { info: *info, mask: *mask } };
    thread.deferred.store(signal, Relaxed);
    *mask |= !FAULTS.iter().fold(0, |bits, fault| bits | bit(*fault));
}

/// The shield is down: the signal that waited comes again, with all that came with it. The kernel delivers it when the
/// mask is back, before the last call here returns.
#[cold]
pub(super) fn release(thread: &Thread) {
    let before = errno::get();
    let signal = thread.deferred.swap(0, Relaxed);
    // SAFETY: written before `deferred` was, and all signals are blocked.
    let (mut info, mask) = unsafe { ((*thread.deferral.get()).info, (*thread.deferral.get()).mask) };
    if !queue_first(signal, &info) {
        // The user's queue of signals is full. The context is that of this call.
        // SAFETY: zeroes are a valid context, and the call below fills it in, where libc has it.
        let mut context: ucontext_t = unsafe { std::mem::zeroed() };
        // SAFETY: the structure is ours.
        unsafe { real::getcontext(&mut context) };
        *mask_of(&mut context) = mask;
        run(thread, signal, &mut info, &mut context);
    }
    set_mask(mask);
    errno::set(before);
}

/// A forked child has none of its parent's signals, but its mask.
pub(super) fn forget(thread: &Thread) {
    if thread.deferred.swap(0, Relaxed) != 0 {
        // SAFETY: as in `release`.
        set_mask(unsafe { (*thread.deferral.get()).mask });
    }
}

/// Real-time signals that were queued behind one that waits, of those at most that keep their order.
const QUEUED: usize = 8;

/// Sends this thread a signal again, before others of its number that have come since. `false` if the kernel refuses.
fn queue_first(signal: c_int, info: &siginfo_t) -> bool {
    // SAFETY: zeroes are a valid siginfo_t.
    let mut later: [siginfo_t; QUEUED] = unsafe { std::mem::zeroed() };
    let mut count = 0;
    // Of the others there is at most one.
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
    // SAFETY: a siginfo_t that the kernel has written itself.
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
    // Not libc's, which is a cancellation point.
    // SAFETY: three structures of ours.
    unsafe {
        let (set, time) = (std::ptr::from_ref(&set).addr(), std::ptr::from_ref(&at_once).addr());
        let info = std::ptr::from_mut(info).addr();
        real::syscall(libc::SYS_rt_sigtimedwait, set as _, info as _, time as _, size_of::<u64>() as _, 0, 0)
            == signal.into()
    }
}

/// The bit of a signal in the kernel's masks.
pub(super) fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// The mask that returning from a handler restores. The kernel's has 64 bits, whatever libc thinks.
fn mask_of(context: &mut ucontext_t) -> &mut u64 {
    // SAFETY: the mask is longer than that, and aligned.
    unsafe { &mut *std::ptr::from_mut(&mut context.uc_sigmask).cast() }
}

fn set_mask(mask: u64) {
    // SAFETY: zeroes are a valid set, and the copy stays within it; the call changes this thread's mask alone.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        std::ptr::from_mut(&mut set).cast::<u64>().write(mask);
        libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
    }
}
