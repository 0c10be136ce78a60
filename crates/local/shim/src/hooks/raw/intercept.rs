//! System calls of a program without libc (`crate::intercept`).

use std::ffi::c_long;

use shunt_abi::intercept::NUMBERS;
use shunt_sys::memory;

use super::{Arguments, HOOKED, hook, is_answered, lend};
use crate::base::errno;

/// Answers a call that has a hook, with a negative errno for an error, as the kernel does. Returns
/// `None` if the call must be made unchanged.
///
/// # Safety
/// As the system call.
pub(crate) unsafe fn answer(number: c_long, arguments: [c_long; 6]) -> Option<c_long> {
    let arguments = Arguments(arguments);
    lend(number, &arguments);
    // Not answered here, because the current stack may be part of the memory that is unmapped.
    if number == libc::SYS_munmap {
        memory::forget(arguments.size(0), arguments.size(1));
        return None;
    }
    if !is_answered(number, &arguments) {
        return None;
    }
    // SAFETY: the caller's promise.
    let result = unsafe { hook(number)?(&arguments) };
    Some(if result == -1 { -c_long::from(errno::get()) } else { result })
}

/// Returns whether the call, answered by a hook, returns a second time in a child.
pub(crate) fn makes_child(number: c_long) -> bool {
    matches!(number, libc::SYS_fork | libc::SYS_clone | libc::SYS_clone3)
}

/// A bit for each call that has a hook, or that the shim must know about in advance.
pub(crate) static ANSWERED: [u32; NUMBERS / 32] = {
    let mut bits = [0; NUMBERS / 32];
    let mut index = 0;
    while index < HOOKED.len() + TOLD.len() {
        let number = if index < TOLD.len() { TOLD[index] } else { HOOKED[index - TOLD.len()] };
        bits[number as usize / 32] |= 1 << (number % 32);
        index += 1;
    }
    bits
};

/// Calls without a hook that the shim must know about: those in [`is_answered`], a thread's end,
/// and vfork.
const TOLD: [c_long; 12] = [
    libc::SYS_vfork,
    libc::SYS_prctl,
    libc::SYS_seccomp,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_submit,
    libc::SYS_unshare,
    libc::SYS_chroot,
    libc::SYS_setuid,
    libc::SYS_setreuid,
    libc::SYS_setresuid,
    libc::SYS_exit,
];
