//! poll, select and their variants.

use std::ffi::c_int;

use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use shunt_sys::memory;

use crate::ops::{poll as polling, select as selecting};
use crate::signal::Shield;
use crate::{process, real, signal};

/// The set of a call, if it is one the kernel would read.
///
/// # Safety
/// As poll: `fds` points to `count` entries.
unsafe fn set<'a>(fds: *mut pollfd, count: nfds_t) -> Option<&'a mut [pollfd]> {
    let len = (count as usize).saturating_mul(size_of::<pollfd>());
    if fds.is_null() || count > i32::MAX as nfds_t || !memory::is_writable(fds.cast(), len) {
        return None;
    }
    // SAFETY: it can be read and written.
    Some(unsafe { std::slice::from_raw_parts_mut(fds, count as usize) })
}

/// See poll(2).
///
/// # Safety
/// As in C; so for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program's own call, here and below.
    unsafe {
        let kernel = || real::poll(fds, count, timeout);
        if process::is_off() {
            return kernel();
        }
        let nanos = (timeout >= 0).then(|| timeout as u64 * 1_000_000);
        match set(fds, count) {
            Some(set) => {
                signal::point();
                let _shield = Shield::raise();
                polling::poll(set, nanos, std::ptr::null(), kernel)
            }
            None => kernel(),
        }
    }
}

/// See ppoll(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own call, here and below.
    unsafe {
        let kernel = || real::ppoll(fds, count, timeout, mask);
        if process::is_off() {
            return kernel();
        }
        match (set(fds, count), from_timespec(timeout)) {
            (Some(set), Ok(nanos)) => {
                signal::point();
                let _shield = Shield::raise();
                polling::poll(set, nanos, mask, kernel)
            }
            _ => kernel(),
        }
    }
}

/// A relative time in nanoseconds; `Err` if the kernel must refuse it.
///
/// # Safety
/// `time` is null or the program's argument.
pub(super) unsafe fn from_timespec(time: *const timespec) -> Result<Option<u64>, ()> {
    if !time.is_null() && !memory::is_readable(time.cast(), size_of::<timespec>()) {
        return Err(());
    }
    // SAFETY: null, or it can be read.
    match unsafe { time.as_ref() } {
        None => Ok(None),
        Some(time) if time.tv_sec < 0 || !(0..1_000_000_000).contains(&time.tv_nsec) => Err(()),
        Some(time) => {
            Ok(Some((time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)))
        }
    }
}

/// See select(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the program's own call, here and below.
    unsafe {
        if process::is_off() {
            return real::select(count, read, write, except, timeout);
        }
        let sets = selecting::Sets::new(count, [read, write, except]);
        let readable = timeout.is_null() || memory::is_writable(timeout.cast(), size_of::<timeval>());
        let in_order = |time: &timeval| time.tv_sec >= 0 && (0..1_000_000).contains(&time.tv_usec);
        if !readable || !timeout.as_ref().is_none_or(in_order) || !sets.concern_us() {
            return real::select(count, read, write, except, timeout);
        }
        let nanos = timeout.as_ref().map(|time| {
            (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_usec as u64 * 1000)
        });
        signal::point();
        let _shield = Shield::raise();
        let begin = process::now();
        let result = sets.wait(nanos, std::ptr::null());
        // Linux leaves the time that was not slept.
        if let (Some(time), Some(nanos)) = (timeout.as_mut(), nanos) {
            let left = nanos.saturating_sub(process::now() - begin);
            *time = timeval {
                tv_sec: (left / 1_000_000_000) as i64,
                tv_usec: (left % 1_000_000_000 / 1000) as i64,
            };
        }
        result
    }
}

/// See pselect(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own call, here and below.
    unsafe {
        if process::is_off() {
            return real::pselect(count, read, write, except, timeout, mask);
        }
        let sets = selecting::Sets::new(count, [read, write, except]);
        match from_timespec(timeout) {
            Ok(nanos) if sets.concern_us() => {
                signal::point();
                let _shield = Shield::raise();
                sets.wait(nanos, mask)
            }
            _ => real::pselect(count, read, write, except, timeout, mask),
        }
    }
}

/// glibc's checked variants.
mod checked {
    use super::*;

    unsafe extern "C" {
        fn __chk_fail() -> !;
    }

    fn check(count: nfds_t, room: size_t) {
        if room / size_of::<pollfd>() < count as usize {
            // SAFETY: reports the overflow and ends the program, as the checked function would.
            unsafe { __chk_fail() }
        }
    }

    /// See poll(2).
    ///
    /// # Safety
    /// As in C.
    #[unsafe(no_mangle)]
    pub unsafe extern "C-unwind" fn __poll_chk(
        fds: *mut pollfd,
        count: nfds_t,
        timeout: c_int,
        room: size_t,
    ) -> c_int {
        check(count, room);
        // SAFETY: the program's own call.
        unsafe { poll(fds, count, timeout) }
    }

    /// See ppoll(2).
    ///
    /// # Safety
    /// As in C.
    #[unsafe(no_mangle)]
    pub unsafe extern "C-unwind" fn __ppoll_chk(
        fds: *mut pollfd,
        count: nfds_t,
        timeout: *const timespec,
        mask: *const sigset_t,
        room: size_t,
    ) -> c_int {
        check(count, room);
        // SAFETY: the program's own call.
        unsafe { ppoll(fds, count, timeout, mask) }
    }
}
