//! In a program with a libc, which makes system calls by itself besides: Go with cgo. The library is there as in any other, and finds each
//! thread's own data by libc's thread pointer.
//!
//! Go's stacks are small, so there, calls are answered on a stack of the thread's own ([`crate::base::thread::Apart`]): not those of a handler
//! that has come from there, which stays on the stack that it has. libc's functions may use any vector register, of which the kernel
//! changes none, so all are kept.

use std::arch::asm;
use std::ffi::{c_int, c_long, c_void};
use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering::*};

use rustix::mm::{MprotectFlags, mprotect};
use shunt_abi::door::{BELOW, BLOCK, Below};
use shunt_sys::memory;

use super::entry::{Frame, let_through};
use super::{ANSWERED, Place, answer_calls, answered, wait_for};
use crate::base::thread::{self, Apart, Thread};
use crate::base::{errno, process, real};
use crate::life::census;

const PAGE: usize = 4096;

/// Whether calls are answered on a stack of the thread's own: 0 or 1.
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

/// Has the program's calls come here, if `shunt_door` has led them this far.
pub(crate) fn open() {
    let Some(below) = below() else { return };
    wait_for(below.beside as usize);
    if process::is_off() {
        return;
    }
    // Nothing may be looked up on a thread's own stack.
    real::find_all();
    SWITCHES.store(below.switches_stacks as u32, Relaxed);
    answer_calls();
    census::program_is_led(std::ptr::from_ref(below) as usize);
    below.called.store(called as *mut c_void, Release);
    // SAFETY: a page of its own, which nobody writes to any more.
    let _ = unsafe { mprotect(std::ptr::from_ref(below).cast_mut().cast(), PAGE, MprotectFlags::READ) };
}

/// What GS points to, until this has been asked.
fn below() -> Option<&'static Below> {
    const FSGSBASE: u64 = 1 << 1;
    // SAFETY: only asks.
    if unsafe { ::libc::getauxval(::libc::AT_HWCAP2) } & FSGSBASE == 0 {
        return None;
    }
    let at: *const Below;
    // SAFETY: the kernel lets programs use these instructions; nobody else uses GS.
    unsafe { asm!("rdgsbase {at}", at = out(reg) at, options(nomem, nostack)) };
    if at.is_null() {
        return None;
    }
    // SAFETY: a plain number, wherever it is.
    let mark = unsafe { memory::read(at.wrapping_byte_add(offset_of!(Below, mark)).cast::<u64>()) };
    if mark != Some(BELOW) {
        return None;
    }
    // SAFETY: as above; and `shunt_door` has put it there for good.
    unsafe {
        asm!("wrgsbase {none}", none = in(reg) 0_usize, options(nomem, nostack));
        Some(&*at)
    }
}

/// A call of the program's that has its bit. It is let through, or has been answered here: then `frame` says where to go on.
unsafe extern "C" fn answer(frame: &mut Frame) -> c_long {
    const PTHREAD_CANCEL_DISABLE: c_int = 1;
    let (number, before) = (c_long::from(frame.number()), errno::get());
    thread::this().await_end();
    let mut state = 0;
    // SAFETY: the program's own call, which is no cancellation point.
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

/// Behind what has been put on the stack for [`Frame`]: keeps all vector registers, the flags of their calculations, and two more for itself.
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

/// In place of a system call: the number in rax, the address of the `syscall` instruction to go to in rcx. As [`super::entry::called`].
#[unsafe(naked)]
unsafe extern "C" fn called() {
    std::arch::naked_asm!(
        let_through!(),
        // libc's thread pointer points to itself. A thread that has another has none of this library's data.
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
        // A thread that ends may have unmapped its stack, and a child of vfork may have a very small one.
        "mov eax, r11d",
        "shr eax, 16",
        "cmp eax, {exit}",
        "je 6f",
        "cmp eax, {execve}",
        "je 6f",
        "cmp eax, {execveat}",
        "je 6f",
        // On the stack that there is.
        "5:",
        "mov rax, rsp",
        "lea rsp, [rsp - 128]",
        "and rsp, -16",
        "push rax",
        answer!(),
        "jmp 2b",
        // On the thread's own.
        "6:",
        "mov rax, qword ptr [rip + shunt_thread@GOTTPOFF]",
        "add rax, fs:[0]",
        "7:",
        "cmp qword ptr [rax + {end}], 0",
        "je 8f",
        // A handler that comes from here on stays on the stack that it has.
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
        // There is none yet.
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
        // A handler may have come meanwhile.
        "jmp 4b",
        answered = sym ANSWERED,
        answer = sym answer,
        switches = sym SWITCHES,
        is_in_use = const offset_of!(Thread, apart) + offset_of!(Apart, is_in_use),
        end = const offset_of!(Thread, apart) + offset_of!(Apart, end),
        programs = const offset_of!(Thread, apart) + offset_of!(Apart, programs),
        // As much as XSAVE stores of these: of SSE, AVX and AVX-512.
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
