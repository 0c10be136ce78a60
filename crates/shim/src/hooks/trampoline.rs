//! Hooks that are told of a call and change nothing of it: every argument stays where it is, and the function that they
//! name is jumped to, so that it returns to the caller itself. For variadic functions, which Rust cannot define, and for
//! calls that come back twice or on another stack.

use std::ffi::{c_int, c_void};

/// A call as it came: the registers that carry arguments, and the stack.
#[repr(C)]
pub(super) struct Call {
    /// xmm0 to xmm7.
    vectors: [[u64; 2]; 8],
    /// How many of those a variadic function was given.
    rax: u64,
    r9: u64,
    r8: u64,
    rcx: u64,
    rdx: u64,
    rsi: u64,
    rdi: u64,
    /// Where the call returns to.
    pub(super) caller: *const c_void,
}

impl Call {
    /// The integer argument `index`, below 6.
    pub(super) fn argument(&self, index: usize) -> u64 {
        [self.rdi, self.rsi, self.rdx, self.rcx, self.r8, self.r9][index]
    }

    /// The function to jump to once the call has been made: it returns `result`.
    pub(super) fn answer(&mut self, result: c_int) -> *mut c_void {
        extern "C" fn given(result: c_int) -> c_int {
            result
        }
        self.rdi = result as u32 as u64;
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
            // Seven pushes leave the stack aligned for a call.
            std::arch::naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "sub rsp, 128",
                "movups [rsp], xmm0", "movups [rsp + 16], xmm1", "movups [rsp + 32], xmm2",
                "movups [rsp + 48], xmm3", "movups [rsp + 64], xmm4", "movups [rsp + 80], xmm5",
                "movups [rsp + 96], xmm6", "movups [rsp + 112], xmm7",
                "mov rdi, rsp",
                "call {before}",
                "mov r11, rax",
                "movups xmm0, [rsp]", "movups xmm1, [rsp + 16]", "movups xmm2, [rsp + 32]",
                "movups xmm3, [rsp + 48]", "movups xmm4, [rsp + 64]", "movups xmm5, [rsp + 80]",
                "movups xmm6, [rsp + 96]", "movups xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                before = sym $before,
            )
        }
    )* };
}
pub(super) use trampolines;
