//! The program's signal handlers. The kernel gets the trampoline in place of each handler.
//!
//! Only the kernel knows whether a signal is caught at all: in a vfork child, after an exec, or
//! after calls that the shim did not see. The table here only records which handler the trampoline
//! stands for.

use std::ffi::{c_int, c_long, c_ulong};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use libc::{SA_RESETHAND, SA_RESTART, SA_SIGINFO, SIG_DFL, SIG_IGN};
use shunt_sys::memory;

use super::deliver::trampoline;
use super::{FAULTS, Shield};
use crate::base::lock::{AcrossFork, Lock};
use crate::base::rank;
use crate::base::{errno, process, real};

const SIGNALS: usize = 65;
/// Flags that the trampoline handles itself, so that the kernel may get other values.
const OURS: c_int = SA_SIGINFO | SA_RESETHAND;
/// Signals that cannot be blocked.
const UNBLOCKABLE: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);

static ACTIONS: Lock<[Action; SIGNALS], { rank::ACTIONS }> =
    Lock::new([Action { handler: 0, flags: 0, mask: 0 }; SIGNALS]);

/// A handler of the program.
#[derive(Clone, Copy)]
pub(super) struct Action {
    pub(super) handler: usize,
    pub(super) flags: c_int,
    pub(super) mask: u64,
}

/// The kernel's `struct sigaction`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct KernelAction {
    handler: usize,
    flags: c_ulong,
    restorer: usize,
    mask: u64,
}

/// See sigaction(2).
///
/// # Safety
/// As in C.
pub(crate) unsafe fn sigaction(
    signal: c_int,
    action: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    if !is_known_to_libc(signal) {
        // libc refuses these before it reads the pointers.
        // SAFETY: the program's own call.
        return unsafe { real::sigaction(signal, action, old) };
    }
    // libc's function dereferences the pointers too. Both are read and written outside the lock,
    // because a bad pointer faults.
    // SAFETY: the program's promise: null or valid.
    let given = unsafe { action.as_ref() }.copied();
    let wanted = given.map(|given| Action {
        handler: given.sa_sigaction,
        flags: given.sa_flags,
        mask: first_word(&given.sa_mask),
    });
    // From now on hooks may run in signal handlers, where no function can be looked up.
    real::find_all();
    // libc writes only a part of the mask.
    // SAFETY: the program's promise: null or valid. Zeroes are a valid action.
    let mut replaced = unsafe { old.as_ref().copied().unwrap_or_else(|| std::mem::zeroed()) };
    {
        let _shield = Shield::raise();
        let mut actions = ACTIONS.lock();
        let mut passed = given;
        if let Some(passed) = &mut passed
            && let Some(wanted) = wanted.filter(|wanted| passes_through_us(signal, wanted))
        {
            passed.sa_sigaction = our_handler();
            passed.sa_flags = our_flags(wanted.flags);
            // SAFETY: fills a local set.
            unsafe { libc::sigfillset(&mut passed.sa_mask) };
        }
        let pointer = passed.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: two local structures. The handler is the program's, or the trampoline.
        let result = unsafe { real::sigaction(signal, pointer, &mut replaced) };
        if result != 0 {
            return result;
        }
        if replaced.sa_sigaction == our_handler() {
            show_own(&mut replaced, &actions[signal as usize]);
        }
        note(&mut actions, signal, wanted);
    }
    // SAFETY: the program's promise: null or valid.
    if let Some(old) = unsafe { old.as_mut() } {
        *old = replaced;
    }
    0
}

/// Implements rt_sigaction(2), for programs that call it by syscall(2).
///
/// # Safety
/// As rt_sigaction(2), with a mask of 64 bits. Bad pointers give EFAULT.
pub(crate) unsafe fn kernel_sigaction(
    signal: c_int,
    action: *const KernelAction,
    old: *mut KernelAction,
) -> c_long {
    // SAFETY: the program's pointer, to plain numbers.
    let given = unsafe { memory::read(action) };
    if given.is_none() && !action.is_null() {
        errno::set(libc::EFAULT);
        return -1;
    }
    let wanted =
        given.map(|given| Action { handler: given.handler, flags: given.flags as c_int, mask: given.mask });
    real::find_all();
    let mut replaced = KernelAction { handler: 0, flags: 0, restorer: 0, mask: 0 };
    {
        let _shield = Shield::raise();
        let mut actions = ACTIONS.lock();
        let passed = given.map(|given| match wanted.filter(|wanted| passes_through_us(signal, wanted)) {
            Some(wanted) => KernelAction {
                handler: our_handler(),
                flags: c_ulong::from(our_flags(wanted.flags) as u32),
                mask: u64::MAX,
                ..given
            },
            None => given,
        });
        let pointer = passed.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let into = std::ptr::from_mut(&mut replaced);
        // SAFETY: two local structures. The handler is the program's, or the trampoline.
        let result = unsafe {
            let (number, size) = (libc::SYS_rt_sigaction, size_of::<u64>() as c_long);
            real::syscall(number, signal.into(), pointer.addr() as c_long, into.addr() as c_long, size, 0, 0)
        };
        if result != 0 {
            return result;
        }
        if replaced.handler == our_handler() {
            let known = actions[signal as usize];
            replaced.handler = known.handler;
            replaced.flags =
                replaced.flags & !(OURS as u32 as c_ulong) | (known.flags & OURS) as u32 as c_ulong;
            replaced.mask = known.mask;
        }
        note(&mut actions, signal, wanted);
    }
    // The kernel too changes the action before it finds that it cannot write the old one.
    // SAFETY: the program passed this address for the old action.
    if !old.is_null() && !unsafe { memory::write(old, replaced) } {
        errno::set(libc::EFAULT);
        return -1;
    }
    0
}

/// Returns the action whose handler is about to run. An action with SA_RESETHAND is reset to the
/// default first.
pub(super) fn begin(signal: c_int) -> Action {
    let _shield = Shield::raise();
    let action = ACTIONS.lock()[signal as usize];
    if action.flags & SA_RESETHAND != 0 {
        // SAFETY: zeroes are a valid action, the default one. Flags and mask stay after the reset,
        // as in the kernel.
        unsafe {
            let mut default: libc::sigaction = std::mem::zeroed();
            default.sa_flags = action.flags;
            std::ptr::from_mut(&mut default.sa_mask).cast::<u64>().write(action.mask);
            real::sigaction(signal, &default, std::ptr::null_mut());
        }
    }
    action
}

/// Returns whether every handler that bypasses the trampoline restarts the calls that it
/// interrupts. Such handlers are those of faults, and those that were installed by bare system
/// calls.
pub(crate) fn unseen_handlers_restart() -> bool {
    (1..SIGNALS as c_int).all(|signal| {
        // SAFETY: zeroes are a valid action.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: a query, into a local structure.
        let asked = unsafe { real::sigaction(signal, std::ptr::null(), &mut action) } == 0;
        let unseen = asked && ![SIG_DFL, SIG_IGN, our_handler()].contains(&action.sa_sigaction);
        !unseen || action.sa_flags & SA_RESTART != 0
    })
}

/// Puts the trampoline in the place of the handlers that the program has installed already. No
/// handler may run meanwhile.
pub(crate) fn adopt_handlers() {
    let mut actions = ACTIONS.lock();
    for signal in (1..SIGNALS as c_int).filter(|signal| is_known_to_libc(*signal)) {
        // SAFETY: zeroes are a valid action. The first call fills it in, and the second installs
        // the trampoline.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let asked = real::sigaction(signal, std::ptr::null(), &mut action) == 0;
            let handler = action.sa_sigaction;
            if !asked || [SIG_DFL, SIG_IGN, our_handler()].contains(&handler) || FAULTS.contains(&signal) {
                continue;
            }
            let mask = first_word(&action.sa_mask) & !UNBLOCKABLE;
            actions[signal as usize] = Action { handler, flags: action.sa_flags, mask };
            action.sa_sigaction = our_handler();
            action.sa_flags = our_flags(action.sa_flags);
            libc::sigfillset(&mut action.sa_mask);
            real::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Gives the program's own handlers to the kernel, which calls them from now on.
pub(crate) fn give_back() {
    let actions = ACTIONS.lock();
    for signal in 1..SIGNALS as c_int {
        // SAFETY: zeroes are a valid action. The first call fills it in, and the second installs
        // the program's handler.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let asked = real::sigaction(signal, std::ptr::null(), &mut action) == 0;
            if asked && action.sa_sigaction == our_handler() {
                show_own(&mut action, &actions[signal as usize]);
                real::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }
}

/// Replaces the trampoline by the program's handler in `action`.
fn show_own(action: &mut libc::sigaction, own: &Action) {
    action.sa_sigaction = own.handler;
    action.sa_flags = action.sa_flags & !OURS | own.flags & OURS;
    // SAFETY: the first word of the mask. libc leaves the rest as it was.
    unsafe { std::ptr::from_mut(&mut action.sa_mask).cast::<u64>().write(own.mask) };
}

/// Drops a deferred signal in a forked child, and restores its signal mask.
#[inline]
pub(crate) fn after_fork_in_child() {
    super::deliver::forget(crate::base::thread::this());
}

/// Returns the lock of the actions, which no thread changes during a fork.
pub(crate) fn across_fork() -> &'static impl AcrossFork {
    &ACTIONS
}

/// Returns whether the kernel gets the trampoline for this action. It does not for the handlers of
/// faults, nor for handlers that a vfork child installs for itself in the shared memory.
fn passes_through_us(signal: c_int, wanted: &Action) -> bool {
    let handler = wanted.handler != SIG_DFL && wanted.handler != SIG_IGN;
    let nameable = (1..SIGNALS as c_int).contains(&signal) && !FAULTS.contains(&signal);
    handler && nameable && !process::is_off() && process::is_home()
}

/// Returns whether libc accepts this signal. The first two real-time signals are libc's own.
fn is_known_to_libc(signal: c_int) -> bool {
    (1..SIGNALS as c_int).contains(&signal) && !(32..=33).contains(&signal)
}

/// The handler that the kernel gets. 0 means the trampoline. A program without libc has another
/// entry point.
static ENTRANCE: AtomicUsize = AtomicUsize::new(0);

/// Makes the kernel deliver signals to `entrance`, which calls [`super::handler`]. Call it before
/// any handler is installed.
#[cfg(target_arch = "x86_64")]
pub(crate) fn set_entrance(entrance: usize) {
    ENTRANCE.store(entrance, Relaxed);
}

fn our_handler() -> usize {
    match ENTRANCE.load(Relaxed) {
        0 => trampoline as *const () as usize,
        entrance => entrance,
    }
}

fn our_flags(flags: c_int) -> c_int {
    flags & !SA_RESETHAND | SA_SIGINFO
}

fn note(actions: &mut [Action; SIGNALS], signal: c_int, wanted: Option<Action>) {
    if let Some(wanted) = wanted.filter(|wanted| passes_through_us(signal, wanted)) {
        actions[signal as usize] = Action { mask: wanted.mask & !UNBLOCKABLE, ..wanted };
    }
}

fn first_word(set: &libc::sigset_t) -> u64 {
    // SAFETY: a set is longer than a word, and aligned.
    unsafe { std::ptr::from_ref(set).cast::<u64>().read() }
}
