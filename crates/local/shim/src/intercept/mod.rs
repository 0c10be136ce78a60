//! System call interception (`crates/local/intercept`), for programs that make system calls by
//! themselves. See `docs/adr/0028-system-calls-are-redirected-at-the-exec.md`.
//!
//! At the program's exec, `shunt_intercept` (`crates/local/intercept`) has replaced its `syscall`
//! instructions by jumps to this code.
//!
//! - A program without a dynamic linker ([`alone`]) gets this library too, bound to the functions
//!   in [`libc`] instead of a libc. It starts at [`entry::start`], before the program's first
//!   instruction. The thread pointer (FS) stays the program's. The library finds each thread's own
//!   data by GS, which programs do not use. For that, `shunt_intercept` has changed the one
//!   instruction by which the library reads the thread pointer.
//! - In a program with a dynamic linker ([`linked`]), the dynamic linker loads the library as in
//!   any other program. The program's own system calls come here in addition.

mod alone;
mod block;
mod entry;
mod libc;
mod linked;

use std::ffi::{c_char, c_int, c_long};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use shunt_abi::intercept::{NUMBERS, Offer};

use crate::base::{process, thread, thread_end};
use crate::hooks::raw::intercept as raw;
use crate::ops::exec;
use crate::program::ptrace_helper::{self, By, Executed};

pub(crate) use linked::open;

/// What `shunt_intercept` looks for in the library.
#[unsafe(no_mangle)]
#[expect(unreachable_pub, reason = "found by its name in the file")]
pub static shunt_intercept: Offer = Offer {
    start: entry::start,
    called: entry::called,
    functions: &libc::FUNCTIONS[0],
    count: libc::FUNCTIONS.len(),
    numbers: &raw::ANSWERED,
};

/// A bit for each call that is not let through immediately.
static ANSWERED: [AtomicU32; NUMBERS / 32] = [const { AtomicU32::new(0) }; NUMBERS / 32];

type Strings = *const *const c_char;

/// Begins to answer calls, unless the shim is off.
fn answer_calls() {
    if process::is_off() {
        return;
    }
    for (word, bits) in ANSWERED.iter().zip(raw::ANSWERED) {
        word.store(bits, Relaxed);
    }
}

/// Waits for the helper to end, if it is a child of the program, so that the program's own waits do
/// not find it. No code of the program runs yet.
fn wait_for(beside: usize) {
    if beside != 0 {
        // SAFETY: the call writes no memory.
        unsafe { libc::call(::libc::SYS_wait4, [beside as c_long, 0, ::libc::__WALL.into(), 0, 0, 0]) };
    }
}

/// The kind of program.
trait Place {
    /// Makes a call that may end a vfork child, as if outside of all answered calls: the parent's
    /// thread then continues with the state of that moment.
    fn outside(call: impl FnOnce());
}

/// Executes another program in a vfork child, if that program needs a helper. Returns if it does
/// not, or if the exec fails while it is traced.
///
/// # Safety
/// As the system call.
#[cold]
#[inline(never)]
unsafe fn execute<P: Place>(number: c_long, arguments: [c_long; 6]) {
    let [a, b, c, d, e, _] = arguments;
    // SAFETY: the caller's promise.
    unsafe {
        let (executed, environment) = match number {
            ::libc::SYS_execve => (Executed::by_path(a as *const c_char), c),
            _ => (Executed::from(a as c_int, b as *const c_char, e as c_int), d),
        };
        if let Some(_beside) = ptrace_helper::prepare(executed, environment as Strings, By::Us) {
            P::outside(|| _ = libc::call(number, arguments));
        }
    }
}

/// Returns the result of a call whose bit is set, or `None` to let it through.
///
/// # Safety
/// As the system call.
#[inline(always)]
unsafe fn answered<P: Place>(number: c_long, arguments: [c_long; 6]) -> Option<c_long> {
    if is_borrowed() {
        // The child has its own descriptors and signal handlers, and its parent's memory. So its
        // calls are let through until it executes a program.
        if matches!(number, ::libc::SYS_execve | ::libc::SYS_execveat) {
            exec::before_child();
            // SAFETY: the caller's promise.
            unsafe { execute::<P>(number, arguments) };
        }
        return None;
    }
    if number == ::libc::SYS_exit {
        thread_end::over();
    }
    // SAFETY: the caller's promise.
    unsafe { raw::answer(number, arguments) }
}

/// Returns whether this is a vfork child that runs in a thread's place, rather than the thread.
fn is_borrowed() -> bool {
    let thread = thread::this();
    if !thread.is_lent.get() {
        return false;
    }
    let is_borrowed = !process::is_home();
    if !is_borrowed {
        thread.is_lent.set(false);
    }
    is_borrowed
}
