//! Hooks of the dynamic linker. dlopen and dlmopen: no connection may be on shared memory while
//! code is loaded that has not been judged (L11). dlsym and dlvsym: a look-up of a libc function
//! that has a hook returns the hook.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use super::trampoline::{Call, trampolines};
use crate::base::{real, split};
use crate::life::census::lookups::{self, Lead, Lookup};
use crate::life::loads::{self, Load, Way};

trampolines! {
    /// See dlopen(3).
    dlopen: before_dlopen;
    /// See dlmopen(3).
    dlmopen: before_dlmopen;
    /// See dlsym(3).
    dlsym: before_dlsym;
    /// See dlvsym(3).
    dlvsym: before_dlvsym;
}

extern "C-unwind" fn before_dlopen(call: &mut Call) -> *mut c_void {
    let real = real::address!("dlopen");
    let (path, flags) = (call.argument(0) as *const c_char, call.argument(1) as c_int);
    load(call, Load { path, flags, caller: call.caller, is_at_home: true }, real, || {
        // SAFETY: the prototype of dlopen, and the program's own arguments.
        unsafe {
            let dlopen = std::mem::transmute::<
                *mut c_void,
                unsafe extern "C-unwind" fn(*const c_char, c_int) -> *mut c_void,
            >(real);
            dlopen(path, flags)
        }
    })
}

extern "C-unwind" fn before_dlmopen(call: &mut Call) -> *mut c_void {
    let real = real::address!("dlmopen");
    let (space, path, flags) =
        (call.argument(0) as c_long, call.argument(1) as *const c_char, call.argument(2) as c_int);
    load(call, Load { path, flags, caller: call.caller, is_at_home: false }, real, || {
        // SAFETY: the prototype of dlmopen, and the program's own arguments.
        unsafe {
            let dlmopen = std::mem::transmute::<
                *mut c_void,
                unsafe extern "C-unwind" fn(c_long, *const c_char, c_int) -> *mut c_void,
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
            // The guard also ends the load if a constructor of the library throws an exception.
            let under_way = loads::begin();
            let handle = make();
            drop(under_way);
            call.answer_pointer(handle)
        }
    }
}

extern "C" fn before_dlsym(call: &mut Call) -> *mut c_void {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    // Before glibc 2.34, a program without libdl has no dlsym. Then the shim's own searches the
    // loaded libraries.
    let real = behind(&REAL, c"dlsym", split::dlsym as *mut c_void);
    look_up(call, false, real, |handle, name, _| {
        // SAFETY: the prototype of dlsym, and the program's own arguments.
        unsafe {
            let dlsym = std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void,
            >(real);
            dlsym(handle, name)
        }
    })
}

extern "C" fn before_dlvsym(call: &mut Call) -> *mut c_void {
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    let real = behind(&REAL, c"dlvsym", not_found as *mut c_void);
    look_up(call, true, real, |handle, name, version| {
        // SAFETY: the prototype of dlvsym, and the program's own arguments.
        unsafe {
            let dlvsym = std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void,
            >(real);
            dlvsym(handle, name, version)
        }
    })
}

extern "C" fn not_found() -> *mut c_void {
    std::ptr::null_mut()
}

/// Returns the next function of that name. A failed dlsym would leave an error for the program's
/// dlerror, so dlsym is not used.
#[inline(never)]
fn behind(cell: &AtomicPtr<c_void>, name: &'static CStr, without: *mut c_void) -> *mut c_void {
    let mut found = cell.load(Relaxed);
    if found.is_null() {
        found = split::find_behind(name);
        cell.store(found, Relaxed);
    }
    if found.is_null() { without } else { found }
}

fn look_up(
    call: &mut Call,
    is_versioned: bool,
    real: *mut c_void,
    make: impl FnOnce(*mut c_void, *const c_char, *const c_char) -> *mut c_void,
) -> *mut c_void {
    let (name, version) = (call.argument(1) as *const c_char, call.argument(2) as *const c_char);
    if name.is_null() {
        return real;
    }
    // SAFETY: the program's own argument, which the dynamic linker reads too.
    let name_in_c = unsafe { CStr::from_ptr(name) };
    let handle = call.argument(0) as *mut c_void;
    match lookups::lead(&Lookup { handle, name: name_in_c, caller: call.caller, is_versioned }) {
        Lead::Pass => real,
        Lead::Here { handle, hook } => {
            let found = make(handle, name, version);
            call.answer_pointer(if lookups::leads_behind(found) { hook } else { found })
        }
    }
}
