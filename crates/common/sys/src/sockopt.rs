//! getsockopt and setsockopt for the options that rustix has no function for.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Result, raw};

/// Types for which every bit pattern is a valid value, so that the kernel may fill them.
///
/// # Safety
///
/// The implementer holds integers only and has no padding that is read.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: integers.
unsafe impl Plain for u32 {}
// SAFETY: integers.
unsafe impl Plain for u64 {}

/// Reads an option, and returns its value and the number of bytes that the kernel filled. The other
/// bytes are zero: an older kernel's structure may be shorter.
pub(crate) fn read<T: Plain>(fd: BorrowedFd<'_>, level: i32, option: i32) -> Result<(T, usize)> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    let (value_at, len_at) = (value.as_mut_ptr() as usize, &raw mut len as usize);
    let arguments = [fd.as_raw_fd() as usize, level as usize, option as usize, value_at, len_at, 0];
    // SAFETY: the kernel writes at most `len` bytes to `value` and four to `len`; both outlive the
    // call.
    unsafe { raw::call(libc::SYS_getsockopt, arguments)? };
    // SAFETY: zeroed before the call, and every bit pattern is a `T` (`Plain`).
    Ok((unsafe { value.assume_init() }, len as usize))
}

/// Sets an option.
pub(crate) fn write<T: Plain>(fd: BorrowedFd<'_>, level: i32, option: i32, value: T) -> Result<()> {
    let (value_at, len) = (&raw const value as usize, size_of::<T>());
    let arguments = [fd.as_raw_fd() as usize, level as usize, option as usize, value_at, len, 0];
    // SAFETY: the kernel reads `len` bytes of `value`, which outlives the call.
    unsafe { raw::call(libc::SYS_setsockopt, arguments)? };
    Ok(())
}

/// Attaches a classic BPF program that decides which segments the socket receives.
pub(crate) fn write_filter(fd: BorrowedFd<'_>, program: &[libc::sock_filter]) -> Result<()> {
    let given = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    let (value_at, len) = (&raw const given as usize, size_of_val(&given));
    let (level, option) = (libc::SOL_SOCKET as usize, libc::SO_ATTACH_FILTER as usize);
    let arguments = [fd.as_raw_fd() as usize, level, option, value_at, len, 0];
    // SAFETY: the kernel reads `given` and the program behind it. Both outlive the call and are not
    // changed.
    unsafe { raw::call(libc::SYS_setsockopt, arguments)? };
    Ok(())
}
