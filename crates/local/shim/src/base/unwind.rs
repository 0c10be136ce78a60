//! The functions of the unwinder (libgcc_s), looked up when first needed.
//!
//! Frames of the shim are unwound when a thread is cancelled or ends in a call that sleeps, or when
//! a handler throws out of such a call. The code that unwinds them has usually loaded libgcc_s
//! already. Linking the shim against it would load it into every program, which was a third of what
//! the shim adds to a program's start. So Rust's runtime in this library calls the functions here.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::base::hidden::{c_name, hidden};
use crate::base::split;

/// Defines each function, and a symbol of its name that is hidden from other libraries, for Rust's
/// runtime in this one.
macro_rules! unwinder {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => { $(
        /// Calls libgcc_s's function of that name.
        ///
        /// # Safety
        /// As that function.
        #[allow(non_snake_case)]
        unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
            static CELL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            let found = find(&CELL, const { c_name(concat!(stringify!($name), "\0")) });
            // SAFETY: the symbol has this C prototype; the rest is the caller's promise.
            unsafe {
                let function: unsafe extern "C-unwind" fn($($ty),*) -> $ret = std::mem::transmute(found);
                function($($arg),*)
            }
        }

        hidden!($name, $name);
    )* };
}

/// The callback of `_Unwind_Backtrace` for each frame.
type Trace = extern "C-unwind" fn(*mut c_void, *mut c_void) -> c_int;

unwinder! {
    fn _Unwind_Backtrace(trace: Trace, argument: *mut c_void) -> c_int;
    fn _Unwind_GetDataRelBase(context: *mut c_void) -> usize;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
    fn _Unwind_GetIPInfo(context: *mut c_void, before: *mut c_int) -> usize;
    fn _Unwind_GetLanguageSpecificData(context: *mut c_void) -> *mut c_void;
    fn _Unwind_GetRegionStart(context: *mut c_void) -> usize;
    fn _Unwind_GetTextRelBase(context: *mut c_void) -> usize;
    fn _Unwind_RaiseException(exception: *mut c_void) -> c_int;
    fn _Unwind_Resume(exception: *mut c_void) -> !;
    fn _Unwind_SetGR(context: *mut c_void, register: c_int, value: usize) -> ();
    fn _Unwind_SetIP(context: *mut c_void, value: usize) -> ();
}

#[inline(never)]
fn find(cell: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = cell.load(Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: a library that is loaded already, or that glibc itself loads to end a thread. The
    // name is constant.
    let found = unsafe { split::dlsym(split::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    if found.is_null() {
        // glibc does so too if a thread must be unwound and there is no unwinder.
        std::process::abort();
    }
    cell.store(found, Relaxed);
    found
}

const LIBRARY: &CStr = c"libgcc_s.so.1";
