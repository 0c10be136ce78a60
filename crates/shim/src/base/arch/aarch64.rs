//! 64-bit ARM.

use std::ffi::c_void;

/// Pages have 4, 16 or 64 KiB: the kernel was built for one of these.
pub(crate) const LARGEST_PAGE: usize = 64 * 1024;

/// Goes on to the function `{to}`.
macro_rules! jump {
    () => {
        "b {to}"
    };
}
pub(crate) use jump;

/// A call as it came: the registers that carry arguments, and where it returns to.
#[repr(C)]
pub(crate) struct Call {
    /// q0 to q7.
    vectors: [[u64; 2]; 8],
    /// x0 to x7. Variadic functions have theirs there too.
    arguments: [u64; 8],
    /// x8, where a large result goes.
    result: u64,
    /// Where the call returns to.
    pub(crate) caller: *const c_void,
}

impl Call {
    /// The integer argument `index`, below 8.
    pub(crate) fn argument(&self, index: usize) -> u64 {
        self.arguments[index]
    }

    /// Changes the first of them.
    pub(crate) fn set_first(&mut self, argument: u64) {
        self.arguments[0] = argument;
    }
}

/// All of a function: has `{before}` see the [`Call`], and jumps to the function that it returns. By x16: where branches are checked, what is
/// called may be jumped to by that.
macro_rules! pass_through {
    () => {
        concat!(
            // An exception may unwind through the call.
            ".cfi_startproc\n",
            "stp x29, x30, [sp, -16]!\n",
            ".cfi_adjust_cfa_offset 16\n .cfi_rel_offset x29, 0\n .cfi_rel_offset x30, 8\n",
            "mov x29, sp\n",
            "sub sp, sp, 208\n",
            ".cfi_adjust_cfa_offset 208\n",
            "stp q0, q1, [sp]\n stp q2, q3, [sp, 32]\n stp q4, q5, [sp, 64]\n stp q6, q7, [sp, 96]\n",
            "stp x0, x1, [sp, 128]\n stp x2, x3, [sp, 144]\n stp x4, x5, [sp, 160]\n stp x6, x7, [sp, 176]\n",
            "stp x8, x30, [sp, 192]\n",
            "mov x0, sp\n",
            "bl {before}\n",
            "mov x16, x0\n",
            "ldp q0, q1, [sp]\n ldp q2, q3, [sp, 32]\n ldp q4, q5, [sp, 64]\n ldp q6, q7, [sp, 96]\n",
            "ldp x0, x1, [sp, 128]\n ldp x2, x3, [sp, 144]\n ldp x4, x5, [sp, 160]\n ldp x6, x7, [sp, 176]\n",
            "ldr x8, [sp, 192]\n",
            "add sp, sp, 208\n",
            "ldp x29, x30, [sp], 16\n",
            ".cfi_adjust_cfa_offset -224\n .cfi_restore x29\n .cfi_restore x30\n",
            "br x16\n",
            ".cfi_endproc",
        )
    };
}
pub(crate) use pass_through;

/// This thread's own, which is zero at its beginning and lives as long. What the compiler has for `thread_local!` asks the dynamic linker for
/// no function by its name here: it calls by a descriptor, which in a preloaded library leads to an offset.
#[inline(always)]
pub(crate) fn this_thread() -> *const c_void {
    let at: *const c_void;
    // SAFETY: the initial-exec model of thread-local storage: the offset of that block from the thread pointer, which
    // the dynamic linker stores in the GOT. A preloaded library always has its block in static storage.
    unsafe {
        std::arch::asm!(
            "adrp {at}, :gottprel:shunt_thread",
            "ldr {at}, [{at}, :gottprel_lo12:shunt_thread]",
            "mrs {pointer}, tpidr_el0",
            "add {at}, {at}, {pointer}",
            at = out(reg) at,
            pointer = out(reg) _,
            options(pure, nomem, nostack),
        );
    }
    at
}

/// A number that grows with time, on all processors alike: the kernel lets programs read the counter that its own clocks are made of.
#[inline]
pub(crate) fn ticks() -> u64 {
    let count;
    // SAFETY: it changes nothing. It counts as an access to memory, so that the compiler leaves it where it is; the barrier does the same
    // for the processor, which could read the counter before what was loaded earlier.
    unsafe { std::arch::asm!("isb", "mrs {count}, cntvct_el0", count = out(reg) count, options(nostack)) };
    count
}
