//! A process beside this one, of another program: made without a copy of this one's memory, and so also where that is a parent's.

#[cfg(target_arch = "x86_64")]
use std::arch::asm;
use std::ffi::c_char;
use std::os::fd::RawFd;

#[cfg(target_arch = "x86_64")]
use crate::raw;
use crate::{Errno, Result};

/// Starts the program at `path` with `socket`, which is greater than 2, as its standard input and output, and nothing else that is open
/// here; in a process group of its own. It is no child of this one but an orphan, of a child that no plain wait meets, whose end no signal
/// tells (`__WCLONE`), and that is gone already. If there is no such program, it ends at once.
///
/// # Safety
/// As execve. All signals are blocked, and stay so in the child: until it is the program it has this memory and this stack.
#[cfg(target_arch = "x86_64")]
pub unsafe fn start(
    socket: RawFd,
    path: *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> Result<i32> {
    const FLAGS: usize = (libc::CLONE_VM | libc::CLONE_VFORK) as usize;
    const ITS_NUMBER: usize = 5;
    let mut given = [path as usize, arguments as usize, environment as usize, socket as usize, FLAGS, 0];
    let result: isize;
    // SAFETY: the share of the child and of its own child is all here. They write but one word, and each ends or becomes the program before
    // the one that has made it goes on.
    unsafe {
        asm!(
            "mov eax, {clone}",
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "mov eax, {clone}", "mov rdi, [r12 + 32]", "xor esi, esi", "xor edx, edx",
            "syscall",
            "test rax, rax",
            "jz 3f",
            "mov [r12 + 40], rax",
            "mov eax, {exit}", "xor edi, edi", "syscall",
            "3:",
            "mov eax, {setpgid}", "xor edi, edi", "xor esi, esi", "syscall",
            "mov eax, {dup2}", "mov rdi, [r12 + 24]", "xor esi, esi", "syscall",
            "mov eax, {dup2}", "mov rdi, [r12 + 24]", "mov esi, 1", "syscall",
            "mov eax, {close_range}", "mov edi, 2", "mov esi, -1", "xor edx, edx", "syscall",
            "mov eax, {execve}", "mov rdi, [r12]", "mov rsi, [r12 + 8]", "mov rdx, [r12 + 16]", "syscall",
            "mov eax, {exit}", "mov edi, 127", "syscall",
            "2:",
            clone = const libc::SYS_clone,
            setpgid = const libc::SYS_setpgid,
            dup2 = const libc::SYS_dup2,
            close_range = const libc::SYS_close_range,
            execve = const libc::SYS_execve,
            exit = const libc::SYS_exit,
            in("r12") given.as_mut_ptr(),
            inlateout("rdi") FLAGS => _,
            inlateout("rsi") 0_isize => _,
            inlateout("rdx") 0_isize => _,
            in("r10") 0,
            in("r8") 0,
            lateout("rax") result,
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    if result < 0 {
        return Err(Errno::from_raw_os_error(-result as i32));
    }
    // SAFETY: the child's number; nothing is written.
    unsafe { raw::call(libc::SYS_wait4, [result as usize, 0, libc::__WALL as usize, 0, 0, 0])? };
    let process = given[ITS_NUMBER] as isize;
    if process < 0 { Err(Errno::from_raw_os_error(-process as i32)) } else { Ok(process as i32) }
}

/// No program is entered so on this processor.
///
/// # Safety
/// None is needed.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn start(
    _: RawFd,
    _: *const c_char,
    _: *const *const c_char,
    _: *const *const c_char,
) -> Result<i32> {
    Err(Errno::NOSYS)
}
