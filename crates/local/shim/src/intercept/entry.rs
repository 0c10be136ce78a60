//! Entry points: where the program jumps to in place of a `syscall` instruction, in the middle of
//! its own code. The kernel changes only rax, rcx and r11 in a system call. So this code preserves
//! all other registers, the flags, and the stack below the stack pointer, of which compilers let
//! functions use 128 bytes (the red zone).

use std::ffi::{c_int, c_void};
use std::mem::offset_of;

use libc::siginfo_t;
use shunt_abi::intercept::{BLOCK, Begin, Control};

use super::{ANSWERED, alone, block};
use crate::base::signal;

/// The registers of a call, as they are pushed onto the stack.
#[repr(C)]
pub(super) struct Frame {
    r9: i64,
    r8: i64,
    r10: i64,
    rdx: i64,
    rsi: i64,
    rdi: i64,
    /// The call's number in the upper bits, and the flags in the lower 16.
    packed: u64,
    /// The address where the thread continues.
    next: u64,
    stack: u64,
}

impl Frame {
    pub(super) fn number(&self) -> u32 {
        (self.packed >> 16) as u32
    }

    pub(super) fn arguments(&self) -> [i64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// Makes the thread continue behind the `syscall` instruction, because the call has been
    /// answered.
    pub(super) fn skip_call(&mut self) {
        const LENGTH_OF_SYSCALL: u64 = 2;
        self.next += LENGTH_OF_SYSCALL;
    }
}

macro_rules! keep_vectors {
    ($code:literal) => {
        concat!(
            "movups [rsp], xmm0\n movups [rsp + 16], xmm1\n movups [rsp + 32], xmm2\n movups [rsp + 48], xmm3\n",
            "movups [rsp + 64], xmm4\n movups [rsp + 80], xmm5\n movups [rsp + 96], xmm6\n movups [rsp + 112], xmm7\n",
            "movups [rsp + 128], xmm8\n movups [rsp + 144], xmm9\n movups [rsp + 160], xmm10\n movups [rsp + 176], xmm11\n",
            "movups [rsp + 192], xmm12\n movups [rsp + 208], xmm13\n movups [rsp + 224], xmm14\n movups [rsp + 240], xmm15\n",
            $code,
            "\n",
            "movups xmm0, [rsp]\n movups xmm1, [rsp + 16]\n movups xmm2, [rsp + 32]\n movups xmm3, [rsp + 48]\n",
            "movups xmm4, [rsp + 64]\n movups xmm5, [rsp + 80]\n movups xmm6, [rsp + 96]\n movups xmm7, [rsp + 112]\n",
            "movups xmm8, [rsp + 128]\n movups xmm9, [rsp + 144]\n movups xmm10, [rsp + 160]\n movups xmm11, [rsp + 176]\n",
            "movups xmm12, [rsp + 192]\n movups xmm13, [rsp + 208]\n movups xmm14, [rsp + 224]\n movups xmm15, [rsp + 240]",
        )
    };
}

/// The beginning of each entry point. A call without a bit is let through, at label `2`. For other
/// calls, the code after this finds number and flags in r11.
macro_rules! let_through {
    () => {
        concat!(
            // Packs the flags into two bytes of r11, without using memory.
            "mov r11, rax\n lahf\n seto al\n xchg rax, r11\n",
            "cmp eax, 512\n jae 2f\n",
            "bt dword ptr [rip + {answered}], eax\n jc 3f\n",
            "2:\n",
            "xchg rax, r11\n add al, 0x7f\n sahf\n mov rax, r11\n jmp rcx\n",
            "3:\n",
            "shl eax, 16\n movzx r11d, r11w\n or r11d, eax",
        )
    };
}
pub(super) use let_through;

/// Entry point in place of a `syscall` instruction. rax has the call's number, rcx the address of
/// the instruction.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn called() {
    std::arch::naked_asm!(
        let_through!(),
        // In its first call, a thread still has the GS of the thread that made it.
        "4:",
        "rdfsbase rax",
        "cmp rax, gs:[{program}]",
        "jne 8f",
        // A signal handler that runs from here on stays on its current stack.
        "mov eax, 1",
        "xadd gs:[{depth}], eax",
        "test eax, eax",
        "mov eax, r11d",
        "jnz 5f",
        "cmp dword ptr gs:[{switches}], 0",
        "jne 7f",
        // A thread that ends may have unmapped its stack, and a vfork child may have a very small
        // one.
        "shr eax, 16",
        "cmp eax, {exit}",
        "je 7f",
        "cmp eax, {execve}",
        "je 7f",
        "cmp eax, {execveat}",
        "je 7f",
        "5:",
        "mov rax, rsp",
        "lea rsp, [rsp - 128]",
        "and rsp, -16",
        "jmp 6f",
        "7:",
        "mov rax, rsp",
        "mov rsp, gs:[{stack}]",
        "6:",
        "push rax", "push rcx", "push r11", "push rdi", "push rsi", "push rdx", "push r10", "push r8", "push r9",
        "sub rsp, 264",
        keep_vectors!("lea rdi, [rsp + 264]\n call {answer}"),
        "add rsp, 264",
        "pop r9", "pop r8", "pop r10", "pop rdx", "pop rsi", "pop rdi", "pop r11", "pop rcx",
        "pop rsp",
        "dec dword ptr gs:[{depth}]",
        "jmp 2b",
        // The thread pointer is not that of the block in GS.
        "8:",
        "lea rsp, [rsp - 128]",
        "push rcx", "push r11", "push rdi", "push rsi", "push rdx", "push r10", "push r8", "push r9", "push rbx",
        "mov rbx, rsp",
        // The program's stack may have no more room, so the code below runs in a new block.
        "mov eax, {mmap}", "xor edi, edi", "mov esi, {block}", "mov edx, {access}", "mov r10d, {private}", "mov r8, -1",
        "xor r9d, r9d", "syscall",
        "cmp rax, -4096",
        "ja 9f",
        "lea rsp, [rax + {middle}]",
        "mov rdi, rax",
        keep_vectors!("call {adopt}"),
        "wrgsbase rax",
        "9:",
        "mov rsp, rbx",
        "pop rbx", "pop r9", "pop r8", "pop r10", "pop rdx", "pop rsi", "pop rdi", "pop r11", "pop rcx",
        "lea rsp, [rsp + 128]",
        "jmp 4b",
        answered = sym ANSWERED,
        answer = sym alone::answer,
        adopt = sym block::adopt,
        program = const offset_of!(Control, program),
        depth = const offset_of!(Control, depth),
        stack = const offset_of!(Control, stack),
        switches = const offset_of!(Control, switches),
        exit = const libc::SYS_exit,
        execve = const libc::SYS_execve,
        execveat = const libc::SYS_execveat,
        block = const BLOCK,
        middle = const BLOCK / 2,
        mmap = const libc::SYS_mmap,
        access = const libc::PROT_READ | libc::PROT_WRITE,
        private = const libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
    )
}

/// The signal handler that the kernel calls in place of the program's.
#[unsafe(naked)]
pub(super) unsafe extern "C" fn signalled(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    std::arch::naked_asm!(
        "rdfsbase rax",
        "cmp rax, gs:[{program}]",
        "je 2f",
        "push rdi", "push rsi", "push rdx",
        "call {adopt}",
        "wrgsbase rax",
        "pop rdx", "pop rsi", "pop rdi",
        "2:",
        "jmp {handler}",
        program = const offset_of!(Control, program),
        adopt = sym block::adopt_here,
        handler = sym signal::handler,
    )
}

/// The entry point of the process. The registers are those of the program's first thread, all zero
/// as the kernel leaves them, except rbx, which has the address of a [`Begin`].
#[unsafe(naked)]
pub(super) unsafe extern "C" fn start() {
    std::arch::naked_asm!(
        "mov rsp, gs:[0]",
        "lea rsp, [rsp - {below}]",
        "and rsp, -16",
        "mov rdi, rbx",
        "call {begin}",
        "mov rsp, [rbx + {stack}]",
        "mov r11, [rbx + {entry}]",
        "xor eax, eax", "xor ecx, ecx", "xor edx, edx", "xor ebx, ebx", "xor esi, esi", "xor edi, edi", "xor ebp, ebp",
        "xor r8d, r8d", "xor r9d, r9d", "xor r10d, r10d",
        "pxor xmm0, xmm0", "pxor xmm1, xmm1", "pxor xmm2, xmm2", "pxor xmm3, xmm3", "pxor xmm4, xmm4", "pxor xmm5, xmm5",
        "pxor xmm6, xmm6", "pxor xmm7, xmm7", "pxor xmm8, xmm8", "pxor xmm9, xmm9", "pxor xmm10, xmm10",
        "pxor xmm11, xmm11", "pxor xmm12, xmm12", "pxor xmm13, xmm13", "pxor xmm14, xmm14", "pxor xmm15, xmm15",
        "jmp r11",
        begin = sym alone::begin,
        stack = const offset_of!(Begin, stack),
        entry = const offset_of!(Begin, entry),
        // More than the size of a thread's own data.
        below = const 8192,
    )
}
