//! Hooks that observe a call, and then jump to the function that they name with all arguments
//! unchanged. The function returns directly to the caller. They serve variadic functions, which
//! Rust cannot define, and calls that return twice or on another stack.

use std::ffi::{c_int, c_void};

pub(super) use crate::base::arch::Call;

impl Call {
    /// Returns a function to jump to after the call has been made here. It returns `result`.
    pub(super) fn answer(&mut self, result: c_int) -> *mut c_void {
        extern "C" fn given(result: c_int) -> c_int {
            result
        }
        self.set_first(result as u32 as u64);
        given as *mut c_void
    }

    /// Returns a function to jump to after the call has been made here. It returns the pointer
    /// `result`.
    pub(super) fn answer_pointer(&mut self, result: *mut c_void) -> *mut c_void {
        extern "C" fn given(result: *mut c_void) -> *mut c_void {
            result
        }
        self.set_first(result as u64);
        given as *mut c_void
    }
}

/// Defines C functions. For each, `before` gets the [`Call`] and returns the function to jump to.
macro_rules! trampolines {
    ($($(#[$doc:meta])* $name:ident: $before:path;)*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// As in C.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            std::arch::naked_asm!($crate::base::arch::pass_through!(), before = sym $before)
        }
    )* };
}
pub(super) use trampolines;
