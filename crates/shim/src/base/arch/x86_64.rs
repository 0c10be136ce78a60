//! x86-64.

use std::ffi::c_void;

/// Pages have this size.
pub(crate) const LARGEST_PAGE: usize = 4096;

/// Goes on to the function `{to}`.
macro_rules! jump {
    () => {
        "jmp {to}"
    };
}
pub(crate) use jump;

/// A call as it came: the registers that carry arguments, and the stack.
#[repr(C)]
pub(crate) struct Call {
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
    pub(crate) caller: *const c_void,
}

impl Call {
    /// The integer argument `index`, below 6.
    pub(crate) fn argument(&self, index: usize) -> u64 {
        [self.rdi, self.rsi, self.rdx, self.rcx, self.r8, self.r9][index]
    }

    /// Changes the first of them.
    pub(crate) fn set_first(&mut self, argument: u64) {
        self.rdi = argument;
    }
}

/// All of a function: has `{before}` see the [`Call`], and jumps to the function that it returns.
macro_rules! pass_through {
    () => {
        concat!(
            // Seven pushes leave the stack aligned for a call. An exception may unwind through it.
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

// What the compiler calls for `thread_local!`, also for those of the standard library. The dynamic linker's would have the shim need
// glibc's own by its name, may allocate, and may wait for a lock. All of them are in the block of `shunt_thread`
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

/// This thread's own, which is zero at its beginning and lives as long.
#[inline(always)]
pub(crate) fn this_thread() -> *const c_void {
    let at: *const c_void;
    // SAFETY: the initial-exec model of thread-local storage: the offset of that block from the thread pointer, which
    // the dynamic linker stores in the GOT. A preloaded library always has its block in static storage.
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

/// A number that grows with time, on all processors alike.
#[inline]
pub(crate) fn ticks() -> u64 {
    // SAFETY: an instruction of every such processor, which touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}
