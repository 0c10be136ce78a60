//! fork and exec. Ordinary forks are seen by handlers, see `crate::fork`.

use std::ffi::{c_char, c_int};

use libc::pid_t;

use crate::ops::descriptors;
use crate::{fork, real};

/// See _Fork(3): a fork that runs no handlers.
///
/// # Safety
/// As in C; so for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn _Fork() -> pid_t {
    fork::before_bare();
    // SAFETY: the program's own call.
    let pid = unsafe { real::_Fork() };
    if pid == 0 {
        // SAFETY: this is the only thread of the child.
        unsafe { fork::after_in_child() };
    }
    pid
}

macro_rules! exec {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => { $(
        /// See execve(2).
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> c_int {
            descriptors::before_exec();
            // SAFETY: the program's own call.
            unsafe { real::$name($($arg),*) }
        }
    )* };
}

type List = *const *const c_char;

exec! {
    execve(path: *const c_char, argv: List, envp: List);
    execv(path: *const c_char, argv: List);
    execvp(file: *const c_char, argv: List);
    execvpe(file: *const c_char, argv: List, envp: List);
    fexecve(fd: c_int, argv: List, envp: List);
    execveat(dir: c_int, path: *const c_char, argv: List, envp: List, flags: c_int);
}

/// What the variadic ones do first; returns where the real function is.
#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn before_variadic_exec(name: *const c_char) -> *mut std::ffi::c_void {
    descriptors::before_exec();
    // SAFETY: the trampolines below pass a constant name.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name) }
}

/// Rust cannot define variadic functions, and need not: all arguments are left where they are, and the real function
/// is jumped to.
macro_rules! variadic_exec {
    ($($name:ident;)*) => { $(
        /// See exec(3).
        ///
        /// # Safety
        /// As in C.
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            // Seven pushes leave the stack aligned for a call, and every register that may carry an argument as it was.
            std::arch::naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "lea rdi, [rip + {text}]",
                "call {before}",
                "mov r11, rax",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                text = sym names::$name,
                before = sym before_variadic_exec,
            )
        }
    )* };
}

/// The names that the trampolines look up.
#[cfg(target_arch = "x86_64")]
#[allow(non_upper_case_globals)]
mod names {
    pub(super) static execl: [u8; 6] = *b"execl\0";
    pub(super) static execlp: [u8; 7] = *b"execlp\0";
    pub(super) static execle: [u8; 7] = *b"execle\0";
}

variadic_exec! {
    execl;
    execlp;
    execle;
}
