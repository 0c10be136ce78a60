//! System call interception in a program that has libc but also makes system calls by itself, such
//! as Go with cgo. The library is loaded as in any other program, and finds each thread's own data
//! by libc's thread pointer.
//!
//! Go's stacks are small, so there, calls are answered on a separate stack of the thread
//! ([`crate::base::thread::Apart`]). A call in a signal handler that interrupted such a call stays
//! on the stack that it has. libc's functions may change any vector register, and the kernel
//! changes none, so all of them are saved.

use std::arch::asm;
use std::ffi::{c_int, c_long, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustix::mm::{MprotectFlags, mprotect};
use shunt_abi::intercept::{BELOW, BLOCK, Below};
use shunt_sys::memory;

use super::entry::{Frame, let_through};
use super::{ANSWERED, Place, answer_calls, answered, wait_for};
use crate::base::thread::{self, Apart, Thread};
use crate::base::{errno, process, real};
use crate::life::census;

const PAGE: usize = 4096;

/// 1 if calls are answered on a separate stack of the thread, else 0.
static SWITCHES: AtomicU32 = AtomicU32::new(0);

struct Linked;

impl Place for Linked {
    fn outside(call: impl FnOnce()) {
        let is_in_use = &thread::this().apart.is_in_use;
        let before = is_in_use.replace(0);
        call();
        is_in_use.set(before);
    }
}

/// Begins to answer the program's calls, if `shunt_intercept` has redirected them.
pub(crate) fn open() {
    let Some(below) = below() else { return };
    wait_for(below.beside as usize);
    if process::is_off() {
        return;
    }
    // No function may be looked up while a call is answered on a thread's separate stack.
    real::find_all();
    SWITCHES.store(below.switches_stacks as u32, Relaxed);
    answer_calls();
    census::program_is_led(std::ptr::from_ref(below) as usize);
    below.called.store(called as *mut c_void, Release);
    // SAFETY: a page with nothing else on it, which is not written to any more.
    let _ = unsafe { mprotect(std::ptr::from_ref(below).cast_mut().cast(), PAGE, MprotectFlags::READ) };
}

/// Returns the structure that GS points to, and resets GS.
fn below() -> Option<&'static Below> {
    const FSGSBASE: u64 = 1 << 1;
    // SAFETY: only a query.
    if unsafe { ::libc::getauxval(::libc::AT_HWCAP2) } & FSGSBASE == 0 {
        return None;
    }
    let at: *const Below;
    // SAFETY: the kernel lets programs use these instructions, and nothing else uses GS.
    unsafe { asm!("rdgsbase {at}", at = out(reg) at, options(nomem, nostack)) };
    if at.is_null() {
        return None;
    }
    // SAFETY: an integer, at any address.
    let mark = unsafe { memory::read(at.wrapping_byte_add(offset_of!(Below, mark)).cast::<u64>()) };
    if mark != Some(BELOW) {
        return None;
    }
    // SAFETY: as above, and `shunt_intercept` never unmaps it.
    unsafe {
        asm!("wrgsbase {none}", none = in(reg) 0_usize, options(nomem, nostack));
        Some(&*at)
    }
}

/// Handles a system call of the program whose bit is set. Returns the call's number to let it
/// through. If the call has been answered, returns the result and changes `frame` so that the
/// thread skips the instruction.
unsafe extern "C" fn answer(frame: &mut Frame) -> c_long {
    const PTHREAD_CANCEL_DISABLE: c_int = 1;
    let (number, before) = (c_long::from(frame.number()), errno::get());
    thread::this().await_end();
    let mut state = 0;
    // SAFETY: the program's own call, which is not a cancellation point.
    let result = unsafe {
        real::pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut state);
        let result = answered::<Linked>(number, frame.arguments());
        real::pthread_setcancelstate(state, std::ptr::null_mut());
        result
    };
    errno::set(before);
    if result.is_some() {
        frame.skip_call();
    }
    result.unwrap_or(number)
}

/// Pushes the rest of a [`Frame`], and calls `answer`. Saves all vector registers and their control
/// word, and rbx and r12, which the code itself uses.
macro_rules! answer {
    () => {
        concat!(
            "push rcx\n push r11\n push rdi\n push rsi\n push rdx\n push r10\n push r8\n push r9\n",
            "push r12\n push rbx\n",
            "mov rbx, rsp\n sub rsp, {state}\n and rsp, -64\n xor eax, eax\n",
            "mov [rsp + 512], rax\n mov [rsp + 520], rax\n mov [rsp + 528], rax\n mov [rsp + 536], rax\n",
            "mov [rsp + 544], rax\n mov [rsp + 552], rax\n mov [rsp + 560], rax\n mov [rsp + 568], rax\n",
            "mov eax, {vectors}\n xor edx, edx\n xsave64 [rsp]\n",
            "lea rdi, [rbx + 16]\n call {answer}\n",
            "mov r12, rax\n mov eax, {vectors}\n xor edx, edx\n xrstor64 [rsp]\n mov rax, r12\n",
            "mov rsp, rbx\n pop rbx\n pop r12\n",
            "pop r9\n pop r8\n pop r10\n pop rdx\n pop rsi\n pop rdi\n pop r11\n pop rcx\n pop rsp",
        )
    };
}

/// Entry point in place of a `syscall` instruction. rax has the call's number, rcx the address of
/// the instruction. Compare [`super::entry::called`].
#[unsafe(naked)]
unsafe extern "C" fn called() {
    std::arch::naked_asm!(
        let_through!(),
        // libc's thread pointer points to itself. A thread with another one has no data of this
        // library.
        "rdfsbase rax",
        "cmp rax, fs:[0]",
        "je 4f",
        "mov eax, r11d",
        "shr eax, 16",
        "jmp 2b",
        "4:",
        "mov rax, qword ptr [rip + shunt_thread@GOTTPOFF]",
        "add rax, fs:[0]",
        "cmp dword ptr [rax + {is_in_use}], 0",
        "jne 5f",
        "cmp dword ptr [rip + {switches}], 0",
        "jne 7f",
        // A thread that ends may have unmapped its stack, and a vfork child may have a very small
        // one.
        "mov eax, r11d",
        "shr eax, 16",
        "cmp eax, {exit}",
        "je 6f",
        "cmp eax, {execve}",
        "je 6f",
        "cmp eax, {execveat}",
        "je 6f",
        // Answers the call on the current stack.
        "5:",
        "mov rax, rsp",
        "lea rsp, [rsp - 128]",
        "and rsp, -16",
        "push rax",
        answer!(),
        "jmp 2b",
        // Answers the call on the thread's separate stack.
        "6:",
        "mov rax, qword ptr [rip + shunt_thread@GOTTPOFF]",
        "add rax, fs:[0]",
        "7:",
        "cmp qword ptr [rax + {end}], 0",
        "je 8f",
        // A signal handler that runs from here on stays on its current stack.
        "mov dword ptr [rax + {is_in_use}], 1",
        "mov qword ptr [rax + {programs}], rsp",
        "mov rsp, qword ptr [rax + {end}]",
        "push qword ptr [rax + {programs}]",
        answer!(),
        "xchg rax, r11",
        "add al, 0x7f",
        "sahf",
        "mov rax, r11",
        "mov r11, qword ptr [rip + shunt_thread@GOTTPOFF]",
        "mov dword ptr fs:[r11 + {is_in_use}], 0",
        "jmp rcx",
        // The thread has no separate stack yet.
        "8:",
        "lea rsp, [rsp - 128]",
        "push rcx", "push r11", "push rdi", "push rsi", "push rdx", "push r10", "push r8", "push r9",
        "mov eax, {mmap}", "xor edi, edi", "mov esi, {block}", "mov edx, {access}", "mov r10d, {private}", "mov r8, -1",
        "xor r9d, r9d", "syscall",
        "cmp rax, -4096",
        "ja 9f",
        "add rax, {block}",
        "mov rcx, qword ptr [rip + shunt_thread@GOTTPOFF]",
        "mov qword ptr fs:[rcx + {end}], rax",
        "9:",
        "pop r9", "pop r8", "pop r10", "pop rdx", "pop rsi", "pop rdi", "pop r11", "pop rcx",
        "lea rsp, [rsp + 128]",
        // A signal handler may have run meanwhile.
        "jmp 4b",
        answered = sym ANSWERED,
        answer = sym answer,
        switches = sym SWITCHES,
        is_in_use = const offset_of!(Thread, apart) + offset_of!(Apart, is_in_use),
        end = const offset_of!(Thread, apart) + offset_of!(Apart, end),
        programs = const offset_of!(Thread, apart) + offset_of!(Apart, programs),
        // The room that XSAVE needs for these: SSE, AVX and AVX-512.
        state = const 2688,
        vectors = const 0b1110_0110,
        exit = const ::libc::SYS_exit,
        execve = const ::libc::SYS_execve,
        execveat = const ::libc::SYS_execveat,
        block = const BLOCK,
        mmap = const ::libc::SYS_mmap,
        access = const ::libc::PROT_READ | ::libc::PROT_WRITE,
        private = const ::libc::MAP_PRIVATE | ::libc::MAP_ANONYMOUS | ::libc::MAP_NORESERVE,
    )
}
