//! The function by which AddressSanitizer's runtime asks for options: see
//! `crate::program::sanitizer`.

use std::ffi::c_char;

/// Returns the options of a program that has no such function: the runtime need not be the first
/// library. ASAN_OPTIONS overrides them.
#[unsafe(no_mangle)]
pub extern "C" fn __asan_default_options() -> *const c_char {
    c"verify_asan_link_order=0".as_ptr()
}
