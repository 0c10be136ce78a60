//! Access to errno of the C library.

/// Sets errno of this thread.
#[inline]
pub(crate) fn set(errno: i32) {
    // SAFETY: glibc's errno location is always valid for the calling thread.
    unsafe { *libc::__errno_location() = errno }
}

/// Returns errno of this thread.
#[inline]
pub(crate) fn get() -> i32 {
    // SAFETY: as in `set`.
    unsafe { *libc::__errno_location() }
}
