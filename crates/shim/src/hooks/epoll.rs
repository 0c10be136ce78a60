//! epoll.

use std::ffi::c_int;

use libc::{epoll_event, sigset_t, timespec};
use shunt_abi::reason::Reason;

use super::readiness::from_timespec;
use crate::ops::{descriptors, epoll_wait as waiting, sleep::as_timespec};
use crate::signal::Shield;
use crate::table::{self, Entry};
use crate::{attach, process, real, signal};

/// See epoll_create(2).
///
/// # Safety
/// As in C; so for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_create(size: c_int) -> c_int {
    // SAFETY: the program's own call.
    made(unsafe { real::epoll_create(size) })
}

/// See epoll_create1(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_create1(flags: c_int) -> c_int {
    // SAFETY: the program's own call.
    made(unsafe { real::epoll_create1(flags) })
}

fn made(fd: c_int) -> c_int {
    if fd >= 0 && !process::is_off() && process::is_home() {
        descriptors::made_epoll(fd);
    }
    fd
}

/// See epoll_ctl(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_ctl(
    epfd: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    match (table::epoll(epfd), table::look_up(fd)) {
        // SAFETY: the program's own call.
        (Some(epoll), Entry::Endpoint(_) | Entry::Unconnected) => unsafe {
            let _shield = Shield::raise();
            epoll.control(operation, fd, event)
        },
        (set, entry) => {
            let _shield = Shield::raise();
            match entry {
                Entry::Epoll(name) => {
                    if let Some(inner) = name.resolve() {
                        inner.set_nested();
                    }
                }
                Entry::Endpoint(name) if set.is_none() => {
                    if let Some(endpoint) = name.resolve() {
                        attach::bar(endpoint, Reason::UnknownEpoll);
                    }
                }
                _ => {}
            }
            // SAFETY: the program's own call.
            unsafe { real::epoll_ctl(epfd, operation, fd, event) }
        }
    }
}

/// The array of a call, if it is one the kernel would fill.
///
/// # Safety
/// As epoll_wait: `events` has room for `max`.
unsafe fn array<'a>(events: *mut epoll_event, max: c_int) -> Option<&'a mut [epoll_event]> {
    if events.is_null() || max <= 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    Some(unsafe { std::slice::from_raw_parts_mut(events, max as usize) })
}

fn millis(nanos: Option<u64>) -> c_int {
    // Rounded up: a wait must not end before its time.
    nanos.map_or(-1, |nanos| nanos.div_ceil(1_000_000).min(i32::MAX as u64) as c_int)
}

fn nanos(millis: c_int) -> Option<u64> {
    (millis >= 0).then(|| millis as u64 * 1_000_000)
}

/// See epoll_wait(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_wait(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the program's own call, here and below.
    unsafe {
        match (table::epoll(epfd), array(events, max)) {
            (Some(epoll), Some(array)) => {
                signal::point();
                let _shield = Shield::raise();
                waiting::wait(epoll, array, nanos(timeout), &mut |part, time| {
                    real::epoll_wait(epfd, part.as_mut_ptr(), part.len() as c_int, millis(time))
                })
            }
            _ => real::epoll_wait(epfd, events, max, timeout),
        }
    }
}

/// See epoll_pwait(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own call, here and below.
    unsafe {
        match (table::epoll(epfd), array(events, max)) {
            (Some(epoll), Some(array)) => {
                signal::point();
                let _shield = Shield::raise();
                waiting::wait(epoll, array, nanos(timeout), &mut |part, time| {
                    real::epoll_pwait(epfd, part.as_mut_ptr(), part.len() as c_int, millis(time), mask)
                })
            }
            _ => real::epoll_pwait(epfd, events, max, timeout, mask),
        }
    }
}

/// See epoll_pwait2(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn epoll_pwait2(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's own call, here and below.
    unsafe {
        match (table::epoll(epfd), array(events, max), from_timespec(timeout)) {
            (Some(epoll), Some(array), Ok(nanos)) => {
                signal::point();
                let _shield = Shield::raise();
                waiting::wait(epoll, array, nanos, &mut |part, time| {
                    let time = time.map(as_timespec);
                    let pointer = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
                    real::epoll_pwait2(epfd, part.as_mut_ptr(), part.len() as c_int, pointer, mask)
                })
            }
            _ => real::epoll_pwait2(epfd, events, max, timeout, mask),
        }
    }
}
