//! Has a program ask for glibc's functions by their oldest names, so that it runs from glibc 2.28 on, whatever it is built with.
//!
//! A linker takes the newest version of each function that the libc beside it has. Where that differs in nothing that matters here from
//! the first, it is defined in the program itself, as a jump to the first, and what is linked finds it before libc's. What has moved into
//! libc from a library of its own is in `build.rs`. A program needs nothing but to be linked with this: `use shunt_glibc as _`.
//!
//! What is missing here shows in `tests/compat/tests/oldest.rs`.

#![cfg(target_env = "gnu")]

use std::ffi::{c_char, c_int};

/// The first version of glibc on this processor.
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

/// Goes on to `old_$name`. One register is free there.
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

/// Defines `$name`, for this program alone.
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

/// Names libc's `$name` of the first version.
macro_rules! old {
    ($name:ident) => {
        concat!(".symver old_", stringify!($name), ", ", stringify!($name), "@", first!(), "\n")
    };
}

/// Functions that are as ever but for what they say of errors.
macro_rules! moved {
    ($($name:ident;)*) => {
        std::arch::global_asm!($(old!($name), define!($name, go_on!($name)),)*);
    };
}

/// Functions that libc had by other names only, with the number of a layout in front.
macro_rules! files {
    ($($name:ident = $old:ident;)*) => {
        std::arch::global_asm!($(old!($old), define!($name, second!(), go_on!($old)),)*);
    };
}

/// Puts the number of the only layout there is before the two arguments.
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

// What Rust's standard library asks for and can do without: by its number, and not at all.
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
// Here an address of 0 would be moved with the program.
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(
    ".weak posix_spawn_file_actions_addchdir_np",
    ".hidden posix_spawn_file_actions_addchdir_np",
);

// A program that says nothing of its first functions has them called by a libc from 2.34 on only. Older ones, which know this function by
// the same old name, call what they are told.
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

/// Calls the program's first functions.
unsafe extern "C" fn first_functions(
    count: c_int,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) {
    let (mut next, end) = (&raw const __init_array_start, &raw const __init_array_end);
    while next != end {
        // SAFETY: the linker's list of them, up to its end; libc gives what they take.
        unsafe {
            (*next)(count, arguments, environment);
            next = next.add(1);
        }
    }
}
