//! dup, close, fcntl, ioctl: calls that create, close or change descriptors.

use std::ffi::{c_int, c_uint, c_ulong, c_void};

use shunt_abi::reason::Reason;

use crate::base::real;
use crate::base::signal::Shield;
use crate::base::table::{self, Entry};
use crate::life::untracked;
use crate::ops::{descriptors, options};
use crate::socket::endpoint;

/// See close(2).
///
/// # Safety
/// As in C. That holds for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    descriptors::close(fd)
}

/// See close_range(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: the program's own call, split into ranges.
    let real = |first, last| unsafe { real::close_range(first, last, flags) };
    if flags & libc::CLOSE_RANGE_UNSHARE as c_int != 0 {
        untracked::leave(Reason::OwnTable);
    }
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 || first > last {
        return real(first, last);
    }
    descriptors::close_range(first, last, real)
}

/// See closefrom(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn closefrom(first: c_int) {
    // SAFETY: as in C.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

/// See dup(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    // SAFETY: the program's own call.
    let new = unsafe { real::dup(fd) };
    if new >= 0 {
        descriptors::duplicated(fd, new);
    }
    new
}

/// See dup2(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup2(old: c_int, new: c_int) -> c_int {
    // SAFETY: the program's own call.
    descriptors::duplicate_onto(old, new, || unsafe { real::dup2(old, new) })
}

/// See dup3(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    // SAFETY: the program's own call.
    descriptors::duplicate_onto(old, new, || unsafe { real::dup3(old, new, flags) })
}

/// See fcntl(2). The C calling convention passes a variadic third argument like a named one.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let entry = table::look_up(fd);
    // SAFETY: the program's own call.
    let real = || unsafe { real::fcntl64(fd, command, argument) };
    if entry == Entry::None {
        return real();
    }
    let _shield = Shield::raise();
    let endpoint = endpoint::behind(fd);
    if let Some(endpoint) = endpoint {
        options::before_fcntl(endpoint, command, argument);
    }
    let result = real();
    if result >= 0 {
        if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
            descriptors::duplicated(fd, result);
        } else if let Some(endpoint) = endpoint {
            options::after_fcntl(endpoint, command, argument);
        }
    }
    result
}

/// See fcntl(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the arguments of the same call. off_t has 64 bits here.
    unsafe { fcntl64(fd, command, argument) }
}

/// See ioctl(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    match endpoint::behind(fd) {
        Some(endpoint) => {
            let _shield = Shield::raise();
            // SAFETY: the program's own call.
            unsafe { options::ioctl(endpoint, fd, request, argument) }
        }
        // SAFETY: the program's own call.
        None => unsafe { real::ioctl(fd, request, argument) },
    }
}
