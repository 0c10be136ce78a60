//! The door: how a program without a dynamic linker comes to its system calls by way of this library. See `docs/adr/0028`.
//!
//! `shunt_door` (crates/door) has put the library into the program at its exec, bound it to the functions in [`libc`] instead of a
//! libc, and led the program's `syscall` instructions here. It starts at [`entry::start`], before the program's first instruction.
//!
//! The program's thread pointer stays the program's: here, each thread's own data is found by GS, which the program leaves alone.
//! `shunt_door` has changed the one instruction with which the library asks for it.

mod block;
mod entry;
mod libc;

use std::ffi::{c_char, c_int, c_long};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use shunt_abi::door::{Begin, NUMBERS, Offer};

use crate::base::{process, signal, thread};
use crate::hooks::raw::door as raw;
use crate::ops::exec;
use crate::program::beside::{self, By, Executed};
use crate::program::handover;
use entry::Frame;

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

/// Runs what a dynamic linker would: on the first thread's own stack, before the program.
unsafe extern "C" fn begin(told: &Begin) {
    signal::set_entrance(entry::signalled as *const () as usize);
    // SAFETY: the kernel's: the number of arguments, they, the environment, and what it says of itself, each list with a zero behind it.
    unsafe {
        let count = told.stack.read();
        let arguments: Strings = told.stack.add(1).cast();
        let environment: Strings = arguments.add(count + 1);
        libc::start(environment);
        block::start(told);
        handover::set_library(told.library);
        // Gone before the program could wait for it. Nothing that waits is the program's yet.
        if told.beside != 0 {
            libc::call(::libc::SYS_wait4, [told.beside as c_long, 0, ::libc::__WALL.into(), 0, 0, 0]);
        }
        let functions = std::slice::from_raw_parts(told.first_functions, told.first_functions_count);
        for function in functions {
            let function: unsafe extern "C" fn(c_int, Strings, Strings) = std::mem::transmute(*function);
            function(count as c_int, arguments, environment);
        }
    }
    if process::is_off() {
        return;
    }
    for (word, bits) in ANSWERED.iter().zip(raw::ANSWERED) {
        word.store(bits, Relaxed);
    }
}

/// A child of vfork becomes another program, if that is one that must be entered. Returns if it is none of those, or cannot become one
/// while it is traced.
///
/// # Safety
/// As the system call.
unsafe fn execute(number: c_long, arguments: [c_long; 6]) {
    let [a, b, c, d, e, _] = arguments;
    // SAFETY: the caller's promise.
    unsafe {
        let (executed, environment) = match number {
            ::libc::SYS_execve => (Executed::by_path(a as *const c_char), c),
            _ => (Executed::from(a as c_int, b as *const c_char, e as c_int), d),
        };
        if let Some(_beside) = beside::prepare(executed, environment as Strings, By::Us) {
            block::left(|| _ = libc::call(number, arguments));
        }
    }
}

/// A call of the program's that has its bit. It is let through, or has been answered here: then `frame` says where to go on.
unsafe extern "C" fn answer(frame: &mut Frame) -> c_long {
    let (number, arguments) = (c_long::from(frame.number()), frame.arguments());
    if block::is_borrowed() {
        // Its descriptors and its handlers are its own, and all else is its parent's. So it is not looked at until it becomes a program.
        if matches!(number, ::libc::SYS_execve | ::libc::SYS_execveat) {
            exec::before_child();
            // SAFETY: the program's own call.
            unsafe { execute(number, arguments) };
        }
        return number;
    }
    if number == ::libc::SYS_exit {
        thread::over();
    }
    if raw::lends_memory(number, arguments) {
        block::lend();
    }
    // SAFETY: the program's own call.
    match unsafe { raw::answer(number, arguments) } {
        Some(result) => {
            frame.skip_call();
            if result == 0 && raw::makes_child(number) {
                block::forked();
            }
            result
        }
        None => number,
    }
}
