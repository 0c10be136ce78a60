//! pthread_cancel. A thread with deferred cancellation can end only in a blocking call, which is
//! always in `open`, or at the beginning of a call. A thread with asynchronous cancellation has
//! that type suspended while the shield is up.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering::*};

use crate::base::{process, real, thread};

/// Whether this process has ever cancelled a thread, or had a thread with asynchronous
/// cancellation.
static IN_USE: AtomicBool = AtomicBool::new(false);

fn note_use() {
    IN_USE.store(true, Relaxed);
    process::shut_gate();
}

/// See pthread_cancel(3).
///
/// # Safety
/// As in C.
pub(crate) unsafe fn cancel(thread: libc::pthread_t) -> c_int {
    note_use();
    // SAFETY: the program's own call.
    unsafe { real::pthread_cancel(thread) }
}

/// See pthread_setcanceltype(3).
///
/// # Safety
/// As in C.
pub(crate) unsafe fn set_type(kind: c_int, old: *mut c_int) -> c_int {
    let thread = thread::this();
    let before = thread.cancelled_anywhere.get();
    // Recorded before the new type takes effect.
    if kind == PTHREAD_CANCEL_ASYNCHRONOUS {
        note_use();
    }
    thread.cancelled_anywhere.set(kind == PTHREAD_CANCEL_ASYNCHRONOUS);
    // SAFETY: the program's own call.
    let result = unsafe { real::pthread_setcanceltype(kind, old) };
    if result != 0 {
        thread.cancelled_anywhere.set(before);
    }
    result
}

/// The cancellation point at the beginning of a call that a lane may answer. The call is a
/// cancellation point even if it does not wait.
#[inline]
pub(crate) fn point() {
    if IN_USE.load(Relaxed) {
        // SAFETY: no lock is held and nothing is announced.
        unsafe { real::pthread_testcancel() }
    }
}

/// Makes a call that would be a cancellation point with cancellation disabled, because the shim's
/// work is half done.
#[inline]
pub(crate) fn without<R>(call: impl FnOnce() -> R) -> R {
    if !IN_USE.load(Relaxed) {
        return call();
    }
    let mut before = PTHREAD_CANCEL_DISABLE;
    // SAFETY: changes this thread's own cancel state, restored below.
    unsafe { real::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut before) };
    let result = call();
    // SAFETY: as above.
    unsafe { real::pthread_setcancelstate(before, std::ptr::null_mut()) };
    result
}

const PTHREAD_CANCEL_DISABLE: c_int = 1;
const PTHREAD_CANCEL_DEFERRED: c_int = 0;
const PTHREAD_CANCEL_ASYNCHRONOUS: c_int = 1;

#[cold]
pub(super) fn hold_off() {
    // SAFETY: changes this thread's own type.
    unsafe { real::pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, std::ptr::null_mut()) };
}

#[cold]
pub(super) fn let_in() {
    // SAFETY: changes this thread's own type. The thread may end here.
    unsafe { real::pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, std::ptr::null_mut()) };
}
