//! fork and exec. Ordinary forks are seen by handlers, see `crate::fork`.

use std::ffi::{c_char, c_int, c_void};

use libc::pid_t;
use shunt_abi::reason::Reason;

use super::trampoline::{Call, trampolines};
use crate::ops::descriptors;
use crate::{fork, real, unseen};

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

// Variadic functions, which Rust cannot define.
trampolines! {
    /// See exec(3).
    execl: before_execl;
    /// See exec(3).
    execlp: before_execlp;
    /// See exec(3).
    execle: before_execle;
}

macro_rules! variadic_exec {
    ($($before:ident: $name:literal;)*) => { $(
        extern "C" fn $before(_: &Call) -> *mut c_void {
            descriptors::before_exec();
            real::address!($name)
        }
    )* };
}

variadic_exec! {
    before_execl: "execl";
    before_execlp: "execlp";
    before_execle: "execle";
}

/// See unshare(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn unshare(flags: c_int) -> c_int {
    if flags & libc::CLONE_FILES != 0 {
        unseen::leave(Reason::OwnTable);
    }
    // SAFETY: the program's own call.
    unsafe { real::unshare(flags) }
}
