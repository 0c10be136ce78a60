//! What calls by their numbers are to a program that has no libc (`crate::door`).

use std::ffi::c_long;

use shunt_abi::door::NUMBERS;
use shunt_sys::memory;

use super::{Arguments, HOOKED, hook, is_answered, lend};
use crate::base::errno;

/// Answers a call that has a hook, as the kernel says it. `None` if the call is to be made as it came.
///
/// # Safety
/// As the system call.
pub(crate) unsafe fn answer(number: c_long, arguments: [c_long; 6]) -> Option<c_long> {
    let arguments = Arguments(arguments);
    lend(number, &arguments);
    // The stack that this runs on may be what is unmapped.
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

/// Whether it returns a second time, in a child, where a hook has answered it.
pub(crate) fn makes_child(number: c_long) -> bool {
    matches!(number, libc::SYS_fork | libc::SYS_clone | libc::SYS_clone3)
}

/// A bit for each call of which something must be known before it is made, or that has a hook.
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

/// What [`is_answered`] looks at, a thread's end, and a child in this memory.
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
