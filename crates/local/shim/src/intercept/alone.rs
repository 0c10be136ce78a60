//! System call interception in a program without libc.

use std::ffi::{c_int, c_long};

use shunt_abi::intercept::Begin;

use super::entry::{self, Frame};
use super::{Place, Strings, answer_calls, answered, block, libc, wait_for};
use crate::base::signal;
use crate::hooks::raw::intercept as raw;
use crate::life::census;
use crate::program::handover;

struct Alone;

impl Place for Alone {
    fn outside(call: impl FnOnce()) {
        block::left(call);
    }
}

/// Does the work of a dynamic linker for this library. Runs on the first thread's stack, before the
/// program.
pub(super) unsafe extern "C" fn begin(told: &Begin) {
    signal::set_entrance(entry::signalled as *const () as usize);
    // SAFETY: the kernel's stack layout: the number of arguments, the arguments, the environment
    // and the auxiliary vector. Each list ends in a zero.
    unsafe {
        let count = told.stack.read();
        let arguments: Strings = told.stack.add(1).cast();
        let environment: Strings = arguments.add(count + 1);
        libc::start(environment);
        block::start(told);
        handover::set_library(told.library);
        wait_for(told.beside);
        let functions = std::slice::from_raw_parts(told.first_functions, told.first_functions_count);
        for function in functions {
            let function: unsafe extern "C" fn(c_int, Strings, Strings) = std::mem::transmute(*function);
            function(count as c_int, arguments, environment);
        }
    }
    census::all_is_led();
    answer_calls();
}

/// Handles a system call of the program whose bit is set. Returns the call's number to let it
/// through. If the call has been answered, returns the result and changes `frame` so that the
/// thread skips the instruction.
pub(super) unsafe extern "C" fn answer(frame: &mut Frame) -> c_long {
    let number = c_long::from(frame.number());
    // SAFETY: the program's own call.
    let Some(result) = (unsafe { answered::<Alone>(number, frame.arguments()) }) else { return number };
    frame.skip_call();
    if result == 0 && raw::makes_child(number) {
        block::forked();
    }
    result
}
