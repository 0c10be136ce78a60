//! Makes a program import the oldest versions of glibc's functions. It then runs with glibc 2.28
//! and later, whatever glibc it is built with.
//!
//! A linker binds each function to the newest version that the installed libc has. This crate
//! covers functions whose newest version does not differ from the first in a way that matters here.
//! It defines each of them in the program, as a jump to the first version. The rest of the program
//! then binds to this definition instead of libc's. `build.rs` covers functions that have moved
//! into libc from other libraries. A program only has to link this crate: `use shunt_glibc as _`.
//!
//! `tests/compat/tests/oldest.rs` finds functions that are missing here.

#![cfg(target_env = "gnu")]

use std::ffi::{c_char, c_int};

/// The first version of glibc for this processor.
#[cfg(target_arch = "x86_64")]
macro_rules! first {
    () => {
        "GLIBC_2.2.5"
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! first {
    () => {
        "GLIBC_2.17"
    };
}

/// Jumps to `old_$name`. A function may clobber the register that this needs.
#[cfg(target_arch = "x86_64")]
macro_rules! go_on {
    ($name:ident) => {
        concat!("jmp qword ptr [rip + old_", stringify!($name), "@GOTPCREL]\n")
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! go_on {
    ($name:ident) => {
        concat!(
            "adrp x16, :got:old_",
            stringify!($name),
            "\n",
            "ldr x16, [x16, :got_lo12:old_",
            stringify!($name),
            "]\n",
            "br x16\n"
        )
    };
}

/// Defines `$name`, visible in this program only.
macro_rules! define {
    ($name:ident, $($code:expr),*) => {
        concat!(
            ".pushsection .text.", stringify!($name), ", \"ax\", @progbits\n",
            ".globl ", stringify!($name), "\n",
            ".hidden ", stringify!($name), "\n",
            ".type ", stringify!($name), ", @function\n",
            stringify!($name), ":\n",
            $($code,)*
            ".size ", stringify!($name), ", . - ", stringify!($name), "\n",
            ".popsection\n"
        )
    };
}

/// Declares `old_$name` as the first version of libc's `$name`.
macro_rules! old {
    ($name:ident) => {
        concat!(".symver old_", stringify!($name), ", ", stringify!($name), "@", first!(), "\n")
    };
}

/// Functions that differ from the first version only in how they report errors.
macro_rules! moved {
    ($($name:ident;)*) => {
        std::arch::global_asm!($(old!($name), define!($name, go_on!($name)),)*);
    };
}

/// Functions that libc had only under other names, with a layout version as an additional first
/// argument.
macro_rules! files {
    ($($name:ident = $old:ident;)*) => {
        std::arch::global_asm!($(old!($old), define!($name, second!(), go_on!($old)),)*);
    };
}

/// Inserts the only layout version before the two arguments.
#[cfg(target_arch = "x86_64")]
macro_rules! second {
    () => {
        "mov rdx, rsi\nmov rsi, rdi\nmov edi, 1\n"
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! second {
    () => {
        "mov x2, x1\nmov x1, x0\nmov w0, 0\n"
    };
}

moved! {
    exp;
    log;
    log2;
    pow;
}

files! {
    fstat = __fxstat;
    fstat64 = __fxstat64;
    lstat = __lxstat;
    lstat64 = __lxstat64;
    stat = __xstat;
    stat64 = __xstat64;
}

// Functions that Rust's standard library imports if they exist. `gettid` is replaced by a system
// call, and the other is made to look absent.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(define!(gettid, "mov eax, 186\nsyscall\nret\n"));
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(define!(gettid, "mov x8, 178\nsvc 0\nret\n"));
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    ".globl posix_spawn_file_actions_addchdir_np",
    ".hidden posix_spawn_file_actions_addchdir_np",
    ".set posix_spawn_file_actions_addchdir_np, 0",
);
// On aarch64 an absolute address of 0 would be relocated with the program.
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".weak posix_spawn_file_actions_addchdir_np",
    ".hidden posix_spawn_file_actions_addchdir_np",
);

// Since glibc 2.34, libc itself calls the initialisers of a program that passes none to
// `__libc_start_main`. Older versions have the same symbol version, and call only the function that
// is passed.
#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(
    old!(__libc_start_main),
    define!(
        __libc_start_main,
        "lea rax, [rip + {first_functions}]\ntest rcx, rcx\ncmovz rcx, rax\n",
        go_on!(__libc_start_main)
    ),
    first_functions = sym first_functions,
);
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    old!(__libc_start_main),
    define!(
        __libc_start_main,
        "cbnz x3, 2f\nadrp x3, {first_functions}\nadd x3, x3, :lo12:{first_functions}\n2:\n",
        go_on!(__libc_start_main)
    ),
    first_functions = sym first_functions,
);

type First = unsafe extern "C" fn(c_int, *const *const c_char, *const *const c_char);

unsafe extern "C" {
    static __init_array_start: First;
    static __init_array_end: First;
}

/// Calls the program's initialisers.
unsafe extern "C" fn first_functions(
    count: c_int,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    let (mut next, end) = (&raw const __init_array_start, &raw const __init_array_end);
    while next != end {
        // SAFETY: the linker defines the list and its end, and libc passes the arguments that
        // initialisers take.
        unsafe {
            (*next)(count, arguments, environment);
            next = next.add(1);
        }
    }
}
