//! Handles: how C has the ends of channels.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::EFAULT;

/// Makes a handle of the result, or returns its error number.
///
/// # Safety
/// `handle` can be written.
pub(crate) unsafe fn hand_out<T>(made: Result<T, c_int>, handle: *mut *mut T) -> c_int {
    match made {
        Ok(made) => {
            // SAFETY: the caller's promise.
            unsafe { handle.write(Box::into_raw(Box::new(made))) };
            0
        }
        Err(error) => error,
    }
}

/// Returns the descriptor by which an end is polled.
///
/// # Safety
/// `handle` is null or an open handle.
pub(crate) unsafe fn fd<T>(handle: *const T, end: impl FnOnce(&T) -> BorrowedFd<'_>) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { handle.as_ref() }.map_or(-EFAULT, |of| end(of).as_raw_fd())
}

/// Closes a handle, unless it is null.
///
/// # Safety
/// `handle` is null or from [`hand_out`], and is not used again.
pub(crate) unsafe fn close<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: made by `Box::into_raw`, and the last use.
        drop(unsafe { Box::from_raw(handle) });
    }
}
