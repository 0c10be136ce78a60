//! Hooks that install signal handlers and cancel threads.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering::*};

use libc::{SA_NODEFER, SA_RESETHAND, SA_RESTART, SIG_ERR, sighandler_t, sigset_t};

use crate::base::errno;
use crate::base::signal as signals;

/// A flag of Linux that the crate `libc` does not have.
const SA_INTERRUPT: c_int = 0x2000_0000;
const SIG_HOLD: sighandler_t = 2;

/// A bit for each signal whose handler does not restart calls if `signal` installs it, see
/// siginterrupt(3).
static INTERRUPTING: AtomicU64 = AtomicU64::new(0);

/// See sigaction(2).
///
/// # Safety
/// As in C. That holds for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigaction(
    signal: c_int,
    action: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the program's own call.
    unsafe { signals::sigaction(signal, action, old) }
}

/// Another name of sigaction in glibc.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sigaction(
    signal: c_int,
    action: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the program's own call.
    unsafe { signals::sigaction(signal, action, old) }
}

/// Installs a handler with these flags, and returns the one it replaces.
fn install(signal: c_int, handler: sighandler_t, flags: c_int, blocks_itself: bool) -> sighandler_t {
    // SAFETY: zeroes are a valid action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    if blocks_itself {
        // SAFETY: a local set.
        unsafe { libc::sigaddset(&mut action.sa_mask, signal) };
    }
    // SAFETY: zeroes are a valid action.
    let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: two local structures. The handler is the program's.
    match unsafe { signals::sigaction(signal, &action, &mut old) } {
        0 => old.sa_sigaction,
        _ => SIG_ERR,
    }
}

fn is_signal(signal: c_int) -> bool {
    (1..=64).contains(&signal)
}

fn refuse() -> sighandler_t {
    errno::set(libc::EINVAL);
    SIG_ERR
}

/// See signal(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    if handler == SIG_ERR || !is_signal(signal) {
        return refuse();
    }
    let interrupts = INTERRUPTING.load(Relaxed) & 1 << (signal - 1) != 0;
    install(signal, handler, if interrupts { 0 } else { SA_RESTART }, true)
}

/// See bsd_signal(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the arguments of the same call.
    unsafe { signal(number, handler) }
}

/// See ssignal(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ssignal(number: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the arguments of the same call.
    unsafe { signal(number, handler) }
}

/// See sysv_signal(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    if handler == SIG_ERR || !is_signal(signal) {
        return refuse();
    }
    install(signal, handler, SA_RESETHAND | SA_NODEFER | SA_INTERRUPT, false)
}

/// See sysv_signal(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the arguments of the same call.
    unsafe { __sysv_signal(signal, handler) }
}

/// See sigset(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t {
    if handler == SIG_ERR || !is_signal(signal) {
        return refuse();
    }
    let replaced = if handler == SIG_HOLD {
        // SAFETY: zeroes are a valid action.
        let mut present: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: a query, into a local structure.
        match unsafe { signals::sigaction(signal, std::ptr::null(), &mut present) } {
            0 => present.sa_sigaction,
            _ => SIG_ERR,
        }
    } else {
        install(signal, handler, 0, false)
    };
    if replaced == SIG_ERR {
        return SIG_ERR;
    }
    let how = if handler == SIG_HOLD { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
    // SAFETY: two local sets. The call changes only this thread's mask.
    unsafe {
        let mut set: sigset_t = std::mem::zeroed();
        let mut before: sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut set, signal);
        libc::sigprocmask(how, &set, &mut before);
        if libc::sigismember(&before, signal) == 1 { SIG_HOLD } else { replaced }
    }
}

/// See siginterrupt(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn siginterrupt(signal: c_int, interrupt: c_int) -> c_int {
    // SAFETY: zeroes are a valid action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a local structure, which the first call fills in.
    unsafe {
        if signals::sigaction(signal, std::ptr::null(), &mut action) != 0 {
            return -1;
        }
        if interrupt != 0 {
            INTERRUPTING.fetch_or(1 << (signal - 1), Relaxed);
            action.sa_flags &= !SA_RESTART;
        } else {
            INTERRUPTING.fetch_and(!(1 << (signal - 1)), Relaxed);
            action.sa_flags |= SA_RESTART;
        }
        signals::sigaction(signal, &action, std::ptr::null_mut())
    }
}

/// See pthread_cancel(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pthread_cancel(thread: libc::pthread_t) -> c_int {
    // SAFETY: the program's own call.
    unsafe { signals::cancel(thread) }
}

/// See pthread_setcanceltype(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int {
    // SAFETY: the program's own call.
    unsafe { signals::set_type(kind, old) }
}
