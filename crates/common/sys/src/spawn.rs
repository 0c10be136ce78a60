//! Starts another program without copying this process's memory. That works also in a vfork child,
//! whose memory is its parent's.

#[cfg(target_arch = "x86_64")]
use std::arch::asm;
use std::ffi::c_char;
use std::os::fd::RawFd;

#[cfg(target_arch = "x86_64")]
use crate::raw;
use crate::{Errno, Result};

/// Starts the program at `path` and returns its process id. The program runs in a new process
/// group. `socket`, which must be greater than 2, becomes its standard input and output. It
/// inherits no other descriptor.
///
/// The program is not a child of this process. A child starts it and exits, and the program becomes
/// an orphan. That child was cloned with exit signal 0: its exit raises no signal, and only a wait
/// with `__WCLONE` or `__WALL` would meet it. This function waits for it.
///
/// If `path` cannot be executed, the new process exits with status 127.
///
/// # Safety
/// As execve. All signals are blocked and stay blocked in the child: until execve, the child uses
/// this process's memory and stack.
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
    // SAFETY: this block holds all code that the child and its own child run. They write only one
    // word. CLONE_VFORK suspends each parent until its child has exited or executed the program.
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
    // SAFETY: the id of our child; the kernel writes no memory.
    unsafe { raw::call(libc::SYS_wait4, [result as usize, 0, libc::__WALL as usize, 0, 0, 0])? };
    let process = given[ITS_NUMBER] as isize;
    if process < 0 { Err(Errno::from_raw_os_error(-process as i32)) } else { Ok(process as i32) }
}

/// Fails with ENOSYS: the start of a program is written for x86-64 only.
///
/// # Safety
/// There is no requirement.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn start(
    _: RawFd,
    _: *const c_char,
    _: *const *const c_char,
    _: *const *const c_char,
) -> Result<i32> {
    Err(Errno::NOSYS)
}
