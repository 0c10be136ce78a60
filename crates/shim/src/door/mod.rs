//! The door: how a program that makes system calls by itself comes to them by way of this library. See `docs/adr/0028`.
//!
//! `shunt_door` (crates/door) has led the program's `syscall` instructions here at its exec.
//!
//! A program without a dynamic linker ([`alone`]) has been given the library as well, bound to the functions in [`libc`] instead of a
//! libc. It starts at [`entry::start`], before the program's first instruction. The program's thread pointer stays the program's: here,
//! each thread's own data is found by GS, which the program leaves alone. `shunt_door` has changed the one instruction with which the
//! library asks for it.
//!
//! Into one with a dynamic linker ([`linked`]) that loads the library, and it is as in any other; its calls come here besides.

mod alone;
mod block;
mod entry;
mod libc;
mod linked;

use std::ffi::{c_char, c_int, c_long};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use shunt_abi::door::{NUMBERS, Offer};

use crate::base::{end, process, thread};
use crate::hooks::raw::door as raw;
use crate::ops::exec;
use crate::program::beside::{self, By, Executed};

pub(crate) use linked::open;

/// What `shunt_door` looks for in the library.
#[unsafe(no_mangle)]
#[expect(unreachable_pub, reason = "found by its name in the file")]
pub static shunt_door: Offer = Offer {
    start: entry::start,
    called: entry::called,
    functions: &libc::FUNCTIONS[0],
    count: libc::FUNCTIONS.len(),
    numbers: &raw::ANSWERED,
};

/// A bit for each call that is not let through at once.
static ANSWERED: [AtomicU32; NUMBERS / 32] = [const { AtomicU32::new(0) }; NUMBERS / 32];

type Strings = *const *const c_char;

/// From now on, unless the program is to be on TCP.
fn answer_calls() {
    if process::is_off() {
        return;
    }
    for (word, bits) in ANSWERED.iter().zip(raw::ANSWERED) {
        word.store(bits, Relaxed);
    }
}

/// `shunt_door` itself, if it is a child of the program's: gone before the program could wait for it. Nothing that waits is the program's
/// yet.
fn wait_for(beside: usize) {
    if beside != 0 {
        // SAFETY: nothing is written anywhere.
        unsafe { libc::call(::libc::SYS_wait4, [beside as c_long, 0, ::libc::__WALL.into(), 0, 0, 0]) };
    }
}

/// In what kind of program.
trait Place {
    /// Makes a call after which a child of vfork may be gone, and its parent's thread goes on as it is then: outside of all calls.
    fn outside(call: impl FnOnce());
}

/// A child of vfork becomes another program, if that is one that must be entered. Returns if it is none of those, or cannot become one
/// while it is traced.
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
        if let Some(_beside) = beside::prepare(executed, environment as Strings, By::Us) {
            P::outside(|| _ = libc::call(number, arguments));
        }
    }
}

/// What a call of the program's that has its bit returns. `None` if it is to be let through.
///
/// # Safety
/// As the system call.
#[inline(always)]
unsafe fn answered<P: Place>(number: c_long, arguments: [c_long; 6]) -> Option<c_long> {
    if is_borrowed() {
        // Its descriptors and its handlers are its own, and all else is its parent's. So it is not looked at until it becomes a program.
        if matches!(number, ::libc::SYS_execve | ::libc::SYS_execveat) {
            exec::before_child();
            // SAFETY: the caller's promise.
            unsafe { execute::<P>(number, arguments) };
        }
        return None;
    }
    if number == ::libc::SYS_exit {
        end::over();
    }
    // SAFETY: the caller's promise.
    unsafe { raw::answer(number, arguments) }
}

/// Whether this is such a child, and not the thread.
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
