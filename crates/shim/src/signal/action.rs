//! What the program wants done at each signal, which the kernel is told with the trampoline in place of a handler.
//!
//! The kernel's own record says whether a signal is caught at all, in a vfork child, after an exec or behind calls that we
//! do not see: the table only says what the trampoline stands for.

use std::ffi::{c_int, c_long, c_ulong};

use libc::{SA_RESETHAND, SA_RESTART, SA_SIGINFO, SIG_DFL, SIG_IGN};

use super::deliver::trampoline;
use super::{FAULTS, Shield};
use crate::lock::Lock;
use crate::{process, real};

const SIGNALS: usize = 65;
/// Flags that the kernel is not given as the program gave them.
const OURS: c_int = SA_SIGINFO | SA_RESETHAND;
/// Signals that cannot be blocked.
const UNBLOCKABLE: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);

static ACTIONS: Lock<[Action; SIGNALS]> = Lock::new([Action { handler: 0, flags: 0, mask: 0 }; SIGNALS]);

/// A handler of the program's.
#[derive(Clone, Copy)]
pub(super) struct Action {
    pub(super) handler: usize,
    pub(super) flags: c_int,
    pub(super) mask: u64,
}

/// How the kernel takes an action.
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
    // SAFETY: the program's promise: null or valid.
    let wanted = unsafe { action.as_ref() }.map(|action| Action {
        handler: action.sa_sigaction,
        flags: action.sa_flags,
        mask: first_word(&action.sa_mask),
    });
    // From now on hooks may run in handlers, where nothing can be looked up.
    real::find_all();
    let _shield = Shield::raise();
    let mut actions = ACTIONS.lock();
    let result = match wanted.filter(|wanted| passes_through_us(signal, wanted)) {
        Some(wanted) => {
            // SAFETY: the action was there, and is copied with the rest of what is in it.
            let mut passed = unsafe { *action };
            passed.sa_sigaction = our_handler();
            passed.sa_flags = our_flags(wanted.flags);
            // SAFETY: fills a set of ours.
            unsafe { libc::sigfillset(&mut passed.sa_mask) };
            // SAFETY: ours, and the program's.
            unsafe { real::sigaction(signal, &passed, old) }
        }
        // SAFETY: the program's own call.
        None => unsafe { real::sigaction(signal, action, old) },
    };
    if result != 0 {
        return result;
    }
    // SAFETY: the kernel has filled it in.
    if let Some(old) = unsafe { old.as_mut() }
        && old.sa_sigaction == our_handler()
    {
        show_own(old, &actions[signal as usize]);
    }
    note(&mut actions, signal, wanted);
    result
}

/// The same by syscall(2).
///
/// # Safety
/// As rt_sigaction(2), with a mask of 64 bits.
pub(crate) unsafe fn kernel_sigaction(
    signal: c_int,
    action: *const KernelAction,
    old: *mut KernelAction,
) -> c_long {
    // SAFETY: the program's promise: null or valid.
    let given = unsafe { action.as_ref() }.copied();
    let wanted =
        given.map(|given| Action { handler: given.handler, flags: given.flags as c_int, mask: given.mask });
    real::find_all();
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
    // SAFETY: ours, and the program's.
    let result = unsafe {
        let (number, size) = (libc::SYS_rt_sigaction, size_of::<u64>() as c_long);
        real::syscall(number, signal.into(), pointer.addr() as c_long, old.addr() as c_long, size, 0, 0)
    };
    if result != 0 {
        return result;
    }
    // SAFETY: the kernel has filled it in.
    if let Some(old) = unsafe { old.as_mut() }
        && old.handler == our_handler()
    {
        let known = actions[signal as usize];
        old.handler = known.handler;
        old.flags = old.flags & !(OURS as u32 as c_ulong) | (known.flags & OURS) as u32 as c_ulong;
        old.mask = known.mask;
    }
    note(&mut actions, signal, wanted);
    result
}

/// The handler that runs now. One that was to run once is no longer there when it begins.
pub(super) fn begin(signal: c_int) -> Action {
    let _shield = Shield::raise();
    let action = ACTIONS.lock()[signal as usize];
    if action.flags & SA_RESETHAND != 0 {
        // SAFETY: zeroes are a valid action, the default one; the flags and the mask outlast the handler, as in the kernel.
        unsafe {
            let mut default: libc::sigaction = std::mem::zeroed();
            default.sa_flags = action.flags;
            std::ptr::from_mut(&mut default.sa_mask).cast::<u64>().write(action.mask);
            real::sigaction(signal, &default, std::ptr::null_mut());
        }
    }
    action
}

/// Whether every handler of which the trampoline does not tell restarts the calls that it interrupts: those of faults, and
/// those that were installed by bare system calls.
pub(crate) fn unseen_handlers_restart() -> bool {
    (1..SIGNALS as c_int).all(|signal| {
        // SAFETY: zeroes are a valid action.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: only asks; the structure is ours.
        let asked = unsafe { real::sigaction(signal, std::ptr::null(), &mut action) } == 0;
        let unseen = asked && ![SIG_DFL, SIG_IGN, our_handler()].contains(&action.sa_sigaction);
        !unseen || action.sa_flags & SA_RESTART != 0
    })
}

/// The kernel is told the program's own handlers, and calls them from now on.
pub(crate) fn give_back() {
    let actions = ACTIONS.lock();
    for signal in 1..SIGNALS as c_int {
        // SAFETY: zeroes are a valid action; the first call fills it in, and the second passes the program's own.
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

/// Puts the program's handler where ours is.
fn show_own(action: &mut libc::sigaction, own: &Action) {
    action.sa_sigaction = own.handler;
    action.sa_flags = action.sa_flags & !OURS | own.flags & OURS;
    // SAFETY: the first word of the set; libc leaves the rest as it was.
    unsafe { std::ptr::from_mut(&mut action.sa_mask).cast::<u64>().write(own.mask) };
}

/// Another thread of the parent's may have held the table.
///
/// # Safety
/// This must be the only thread of the process.
#[inline]
pub(crate) unsafe fn after_fork_in_child() {
    // SAFETY: the caller's promise.
    unsafe { ACTIONS.reset() };
    super::deliver::forget(crate::thread::this());
}

/// Handlers do, but not those of faults, nor those that a child of vfork installs in our memory for itself.
fn passes_through_us(signal: c_int, wanted: &Action) -> bool {
    let handler = wanted.handler != SIG_DFL && wanted.handler != SIG_IGN;
    let nameable = (1..SIGNALS as c_int).contains(&signal) && !FAULTS.contains(&signal);
    handler && nameable && !process::is_off() && process::is_home()
}

fn our_handler() -> usize {
    trampoline as *const () as usize
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
    // SAFETY: a set is longer than that, and aligned.
    unsafe { std::ptr::from_ref(set).cast::<u64>().read() }
}
