//! x86-64.

use std::ffi::c_void;

/// The largest page size. x86-64 has only this base page size.
pub(crate) const LARGEST_PAGE: usize = 4096;

/// Jumps to the function `{to}`.
macro_rules! jump {
    () => {
        "jmp {to}"
    };
}
pub(crate) use jump;

/// The registers that carry the arguments of an intercepted call, and its return address.
#[repr(C)]
pub(crate) struct Call {
    /// xmm0 to xmm7.
    vectors: [[u64; 2]; 8],
    /// How many vector registers a variadic call uses (in al).
    rax: u64,
    r9: u64,
    r8: u64,
    rcx: u64,
    rdx: u64,
    rsi: u64,
    rdi: u64,
    /// Where the call returns to.
    pub(crate) caller: *const c_void,
}

impl Call {
    /// The integer argument `index`, below 6.
    pub(crate) fn argument(&self, index: usize) -> u64 {
        [self.rdi, self.rsi, self.rdx, self.rcx, self.r8, self.r9][index]
    }

    /// Replaces the first argument.
    pub(crate) fn set_first(&mut self, argument: u64) {
        self.rdi = argument;
    }
}

/// The whole body of a function that calls `{before}` with the [`Call`], then jumps to the function
/// that it returns.
macro_rules! pass_through {
    () => {
        concat!(
            // Seven pushes leave the stack aligned for a call. An exception may unwind through this
            // frame.
            ".cfi_startproc\n",
            "push rdi\n push rsi\n push rdx\n push rcx\n push r8\n push r9\n push rax\n",
            "sub rsp, 128\n",
            ".cfi_adjust_cfa_offset 184\n",
            "movups [rsp], xmm0\n movups [rsp + 16], xmm1\n movups [rsp + 32], xmm2\n movups [rsp + 48], xmm3\n",
            "movups [rsp + 64], xmm4\n movups [rsp + 80], xmm5\n movups [rsp + 96], xmm6\n movups [rsp + 112], xmm7\n",
            "mov rdi, rsp\n",
            "call {before}\n",
            "mov r11, rax\n",
            "movups xmm0, [rsp]\n movups xmm1, [rsp + 16]\n movups xmm2, [rsp + 32]\n movups xmm3, [rsp + 48]\n",
            "movups xmm4, [rsp + 64]\n movups xmm5, [rsp + 80]\n movups xmm6, [rsp + 96]\n movups xmm7, [rsp + 112]\n",
            "add rsp, 128\n",
            "pop rax\n pop r9\n pop r8\n pop rcx\n pop rdx\n pop rsi\n pop rdi\n",
            ".cfi_adjust_cfa_offset -184\n",
            "jmp r11\n",
            ".cfi_endproc",
        )
    };
}
pub(crate) use pass_through;

// The function that the compiler calls for `thread_local!`, also in the standard library. With the
// dynamic linker's version, the shim would depend on glibc's symbol, and the function may allocate
// and wait for a lock. All thread-locals are in the block of `shunt_thread`
// (`crate::base::thread`).
std::arch::global_asm!(
    ".pushsection .text.__tls_get_addr, \"ax\", @progbits",
    ".globl __tls_get_addr",
    ".hidden __tls_get_addr",
    ".type __tls_get_addr, @function",
    "__tls_get_addr:",
    "mov rax, qword ptr [rip + shunt_thread@GOTTPOFF]",
    "add rax, qword ptr fs:[0]",
    "mov ecx, offset shunt_thread@DTPOFF",
    "sub rax, rcx",
    "add rax, qword ptr [rdi + 8]",
    "ret",
    ".size __tls_get_addr, . - __tls_get_addr",
    ".popsection",
);

/// Returns the address of this thread's block, which is zero when the thread begins and lives as
/// long as the thread.
#[inline(always)]
pub(crate) fn this_thread() -> *const c_void {
    let at: *const c_void;
    // SAFETY: the initial-exec model of thread-local storage. The dynamic linker stores the offset
    // of the block from the thread pointer in the GOT. A preloaded library always has its block in
    // static storage.
    unsafe {
        std::arch::asm!(
            "mov {at}, qword ptr [rip + shunt_thread@GOTTPOFF]",
            "add {at}, qword ptr fs:[0]",
            at = out(reg) at,
            options(pure, nomem, nostack),
        );
    }
    at
}

/// Returns a counter that grows with time and is the same on all processors.
#[inline]
pub(crate) fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has this instruction, and it touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}
