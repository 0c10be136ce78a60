//! mmap, munmap, mprotect, mremap. These calls invalidate what the shim has cached about the
//! program's memory, which it needs to return EFAULT for bad pointers. Memory that becomes
//! executable is judged before it can run (L11).

use std::ffi::{c_int, c_void};

use libc::{off_t, size_t};
use shunt_sys::memory;

use crate::base::{errno, real};
use crate::life::census;
use crate::ops::locking;

/// Finds the real functions before the program starts. Later calls may come from allocators that
/// hold their own locks.
pub(crate) fn prepare() {
    let (nowhere, before) = (std::ptr::null_mut(), errno::get());
    // SAFETY: the calls change nothing, because their length is 0.
    unsafe {
        real::mmap(nowhere, 0, 0, 0, -1, 0);
        real::munmap(nowhere, 0);
        real::mprotect(nowhere, 0, 0);
        real::pkey_mprotect(nowhere, 0, 0, -1);
        real::mremap(nowhere, 0, 0, 0, nowhere);
    }
    errno::set(before);
}

/// See mmap(2).
///
/// # Safety
/// As in C. That holds for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mmap(
    address: *mut c_void,
    len: size_t,
    access: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the program's own call.
    let mapped = unsafe { real::mmap(address, len, access, flags, fd, offset) };
    if mapped != libc::MAP_FAILED {
        memory::forget(mapped as usize, len);
        if !note_access(mapped as usize, len, access) {
            census::code_has_come();
        }
    }
    mapped
}

/// Judges memory that becomes executable. Returns `false` if the caller must call
/// [`census::code_has_come`] once it is.
#[inline]
pub(super) fn note_access(address: usize, len: usize, access: c_int) -> bool {
    access & libc::PROT_EXEC == 0
        || census::made_executable(address..address.saturating_add(len), access & libc::PROT_WRITE != 0)
}

/// See mmap(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mmap64(
    address: *mut c_void,
    len: size_t,
    access: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the arguments of the same call. off_t has 64 bits here.
    unsafe { mmap(address, len, access, flags, fd, offset) }
}

/// See munmap(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn munmap(address: *mut c_void, len: size_t) -> c_int {
    // SAFETY: the program's own call.
    let result = unsafe { real::munmap(address, len) };
    memory::forget(address as usize, len);
    result
}

/// See mprotect(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mprotect(address: *mut c_void, len: size_t, access: c_int) -> c_int {
    let is_judged = note_access(address as usize, len, access);
    // SAFETY: the program's own call.
    let result = unsafe { real::mprotect(address, len, access) };
    if !is_judged {
        census::code_has_come();
    }
    memory::forget(address as usize, len);
    result
}

/// See pkey_mprotect(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pkey_mprotect(
    address: *mut c_void,
    len: size_t,
    access: c_int,
    key: c_int,
) -> c_int {
    let is_judged = note_access(address as usize, len, access);
    // SAFETY: the program's own call.
    let result = unsafe { real::pkey_mprotect(address, len, access, key) };
    if !is_judged {
        census::code_has_come();
    }
    memory::forget(address as usize, len);
    result
}

/// See mlockall(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mlockall(flags: c_int) -> c_int {
    locking::lock_all(flags)
}

/// See mremap(2). The C calling convention passes a variadic last argument like a named one.
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mremap(
    address: *mut c_void,
    len: size_t,
    new_len: size_t,
    flags: c_int,
    new_address: *mut c_void,
) -> *mut c_void {
    // SAFETY: the program's own call.
    let mapped = unsafe { real::mremap(address, len, new_len, flags, new_address) };
    memory::forget(address as usize, len);
    if mapped != libc::MAP_FAILED {
        memory::forget(mapped as usize, new_len);
        note_growth(address as usize, len, new_len);
    }
    mapped
}

/// Notes that a mapping has grown. If it is executable, the rest of its file is code that
/// has not been judged.
#[inline]
pub(super) fn note_growth(address: usize, len: usize, new_len: usize) {
    if new_len > len && census::is_judged(address) {
        census::code_has_come();
    }
}
