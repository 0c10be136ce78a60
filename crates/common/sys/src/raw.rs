//! Direct system calls, for those without a function in rustix. libc's `syscall` is no alternative:
//! the shim hooks it, and it sets errno.

use std::arch::asm;

use crate::{Errno, Result};

/// Makes a system call and returns its result. An error is returned and not stored in errno.
///
/// # Safety
/// As the system call requires.
#[cfg(target_arch = "x86_64")]
pub unsafe fn call(number: i64, arguments: [usize; 6]) -> Result<usize> {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: by the kernel's calling convention it changes only rax, rcx and r11. The caller
    // guarantees the rest.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack)
        );
    }
    outcome(result)
}

/// Makes a system call and returns its result. An error is returned and not stored in errno.
///
/// # Safety
/// As the system call requires.
#[cfg(target_arch = "aarch64")]
pub unsafe fn call(number: i64, arguments: [usize; 6]) -> Result<usize> {
    let [a, b, c, d, e, f] = arguments;
    let result: isize;
    // SAFETY: by the kernel's calling convention it changes only x0. The caller guarantees the
    // rest.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack)
        );
    }
    outcome(result)
}

fn outcome(result: isize) -> Result<usize> {
    if (-4095..0).contains(&result) {
        Err(Errno::from_raw_os_error(-result as i32))
    } else {
        Ok(result as usize)
    }
}
