//! dlopen and dlmopen: nothing may be on shared memory while code comes that has not been judged (L11).

use std::ffi::{c_char, c_int, c_long, c_void};

use super::trampoline::{Call, trampolines};
use crate::base::real;
use crate::life::loads::{self, Load, Way};

trampolines! {
    /// See dlopen(3).
    dlopen: before_dlopen;
    /// See dlmopen(3).
    dlmopen: before_dlmopen;
}

extern "C" fn before_dlopen(call: &mut Call) -> *mut c_void {
    let real = real::address!("dlopen");
    let (path, flags) = (call.argument(0) as *const c_char, call.argument(1) as c_int);
    load(call, Load { path, flags, caller: call.caller, is_at_home: true }, real, || {
        // SAFETY: the prototype of dlopen, and the program's own arguments.
        unsafe {
            let dlopen = std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void,
            >(real);
            dlopen(path, flags)
        }
    })
}

extern "C" fn before_dlmopen(call: &mut Call) -> *mut c_void {
    let real = real::address!("dlmopen");
    let (space, path, flags) =
        (call.argument(0) as c_long, call.argument(1) as *const c_char, call.argument(2) as c_int);
    load(call, Load { path, flags, caller: call.caller, is_at_home: false }, real, || {
        // SAFETY: the prototype of dlmopen, and the program's own arguments.
        unsafe {
            let dlmopen = std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(c_long, *const c_char, c_int) -> *mut c_void,
            >(real);
            dlmopen(space, path, flags)
        }
    })
}

fn load(call: &mut Call, load: Load, real: *mut c_void, make: impl FnOnce() -> *mut c_void) -> *mut c_void {
    // SAFETY: the program's own argument, which the dynamic linker reads too.
    match unsafe { loads::prepare(&load) } {
        Way::Pass => real,
        Way::Here => {
            loads::begin();
            let handle = make();
            loads::end();
            call.answer_pointer(handle)
        }
    }
}
