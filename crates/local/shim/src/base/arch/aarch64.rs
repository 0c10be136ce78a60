//! 64-bit ARM.

use std::ffi::c_void;

/// The largest page size. The kernel was built for pages of 4, 16 or 64 KiB.
pub(crate) const LARGEST_PAGE: usize = 64 * 1024;

/// Jumps to the function `{to}`.
macro_rules! jump {
    () => {
        "b {to}"
    };
}
pub(crate) use jump;

/// The registers that carry the arguments of an intercepted call, and its return address.
#[repr(C)]
pub(crate) struct Call {
    /// q0 to q7.
    vectors: [[u64; 2]; 8],
    /// x0 to x7. Variadic functions get their arguments there too.
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

    /// Replaces the first argument.
    pub(crate) fn set_first(&mut self, argument: u64) {
        self.arguments[0] = argument;
    }
}

/// The whole body of a function that calls `{before}` with the [`Call`], then jumps to the function
/// that it returns. The jump goes through x16: with branch target identification, a jump through
/// x16 may enter a function that expects a call.
macro_rules! pass_through {
    () => {
        concat!(
            // An exception may unwind through this frame.
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

/// Returns the address of this thread's block, which is zero when the thread begins and lives as
/// long as the thread. `thread_local!` needs no function of the dynamic linker by name on this
/// architecture: the compiler calls through a TLS descriptor, which in a preloaded library resolves
/// to an offset.
#[inline(always)]
pub(crate) fn this_thread() -> *const c_void {
    let at: *const c_void;
    // SAFETY: the initial-exec model of thread-local storage. The dynamic linker stores the offset
    // of the block from the thread pointer in the GOT. A preloaded library always has its block in
    // static storage.
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

/// Returns a counter that grows with time and is the same on all processors. The kernel lets
/// programs read the counter that its clocks use.
#[inline]
pub(crate) fn ticks() -> u64 {
    let count;
    // SAFETY: the instructions change nothing. The asm counts as an access to memory, so that the
    // compiler does not move it. `isb` keeps the processor from reading the counter before earlier
    // loads.
    unsafe { std::arch::asm!("isb", "mrs {count}, cntvct_el0", count = out(reg) count, options(nostack)) };
    count
}
