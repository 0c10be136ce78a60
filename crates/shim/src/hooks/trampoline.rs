//! Hooks that are told of a call and change nothing of it: every argument stays where it is, and the function that they
//! name is jumped to, so that it returns to the caller itself. For variadic functions, which Rust cannot define, and for
//! calls that come back twice or on another stack.

use std::ffi::{c_int, c_void};

pub(super) use crate::base::arch::Call;

impl Call {
    /// The function to jump to once the call has been made: it returns `result`.
    pub(super) fn answer(&mut self, result: c_int) -> *mut c_void {
        extern "C" fn given(result: c_int) -> c_int {
            result
        }
        self.set_first(result as u32 as u64);
        given as *mut c_void
    }

    /// The same with a pointer.
    pub(super) fn answer_pointer(&mut self, result: *mut c_void) -> *mut c_void {
        extern "C" fn given(result: *mut c_void) -> *mut c_void {
            result
        }
        self.set_first(result as u64);
        given as *mut c_void
    }
}

/// Defines C functions: `before` sees the [`Call`] and returns the function to jump to.
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
