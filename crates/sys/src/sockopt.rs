//! getsockopt for the options that rustix has no function for.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Errno, Result};

/// Types for which every bit pattern is a value, so that whatever the kernel writes is one.
///
/// # Safety
///
/// The implementer holds integers only and has no padding that is read.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: integers.
unsafe impl Plain for u32 {}
// SAFETY: integers.
unsafe impl Plain for u64 {}

/// Reads an option; bytes that the kernel does not fill (an older kernel's shorter structure) are zero.
/// Returns the value and how many bytes the kernel filled.
pub(crate) fn read<T: Plain>(fd: BorrowedFd<'_>, level: i32, option: i32) -> Result<(T, usize)> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: errno is a valid thread-local integer.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above; the program around us must find its errno unchanged.
    let before = unsafe { *errno };
    // SAFETY: the kernel writes at most `len` bytes to `value` and four to `len`; both outlive the call.
    // `syscall` itself is not hooked.
    let status = unsafe {
        libc::syscall(libc::SYS_getsockopt, fd.as_raw_fd(), level, option, value.as_mut_ptr(), &raw mut len)
    };
    if status < 0 {
        // SAFETY: as above.
        let error = unsafe { std::mem::replace(&mut *errno, before) };
        return Err(Errno::from_raw_os_error(error));
    }
    // SAFETY: zeroed before the call, and every bit pattern is a `T` (`Plain`).
    Ok((unsafe { value.assume_init() }, len as usize))
}
