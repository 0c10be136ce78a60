//! epoll.

use std::ffi::c_int;

use libc::{epoll_event, sigset_t, timespec};
use shunt_abi::reason::Reason;
use shunt_sys::memory;

use super::readiness::from_timespec;
use crate::epoll::{self, Epoll};
use crate::ops::{descriptors, epoll_wait as waiting, sleep::as_timespec};
use crate::signal::Shield;
use crate::table::{self, Entry};
use crate::{errno, process, real, signal};

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
    if process::is_off() {
        // SAFETY: the program's own call.
        return unsafe { real::epoll_ctl(epfd, operation, fd, event) };
    }
    let bad =
        operation != libc::EPOLL_CTL_DEL && !memory::is_readable(event.cast(), size_of::<epoll_event>());
    let entry = if bad { Entry::None } else { table::look_up(fd) };
    let _shield = (entry != Entry::None).then(Shield::raise);
    let is_socket = matches!(entry, Entry::Endpoint(_) | Entry::Unconnected(_));
    if is_socket && let Some(epoll) = table::epoll(epfd) {
        // SAFETY: the program's own call.
        return unsafe { epoll.control(operation, fd, event) };
    }
    if let Entry::Epoll(name) = entry
        && let Some(inner) = name.resolve()
    {
        inner.set_nested();
    }
    // SAFETY: the program's own call.
    let result = unsafe { real::epoll_ctl(epfd, operation, fd, event) };
    if is_socket && result == 0 && process::is_home() {
        match epoll::take_in(epfd) {
            // SAFETY: the kernel has done what the program asked for.
            Some(epoll) => unsafe { epoll.note_control(operation, fd, event) },
            None => descriptors::hand_on(fd, Reason::UnknownEpoll),
        }
    }
    result
}

/// The instance of a call, if it is one and the kernel has nothing against the size of the array.
fn waited_for(epfd: c_int, max: c_int) -> Option<&'static Epoll> {
    const MOST: c_int = c_int::MAX / size_of::<epoll_event>() as c_int;
    (1..=MOST).contains(&max).then(|| table::epoll(epfd).or_else(|| unknown(epfd))).flatten()
}

/// One that was made elsewhere: what lies in a lane when a connection comes into it is to be told to those who wait already.
#[cold]
fn unknown(epfd: c_int) -> Option<&'static Epoll> {
    if process::is_off() || !process::is_home() || table::look_up(epfd) != Entry::None {
        return None;
    }
    let _shield = Shield::raise();
    epoll::is_set(epfd).then(|| epoll::take_in(epfd)).flatten()
}

/// Has `wait` fill the array of a call. What it finds for an array that cannot be written is an error.
///
/// # Safety
/// As epoll_wait: `events` has room for `max`, or is a bad address.
unsafe fn fill(
    events: *mut epoll_event,
    max: c_int,
    wait: impl FnOnce(&mut [epoll_event]) -> c_int,
) -> c_int {
    /// Of a longer array the rest is believed: it would cost more to look at than it is ever used.
    const LOOKED_AT: usize = 1024;
    signal::point();
    let _shield = Shield::raise();
    let looked_at = (max as usize).min(LOOKED_AT) * size_of::<epoll_event>();
    if memory::is_writable(events.cast(), looked_at) {
        // SAFETY: it can be written, and the caller's promise.
        return wait(unsafe { std::slice::from_raw_parts_mut(events, max as usize) });
    }
    let found = wait(&mut [epoll_event { events: 0, u64: 0 }]);
    if found > 0 {
        errno::set(libc::EFAULT);
        return -1;
    }
    found
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
        let Some(epoll) = waited_for(epfd, max) else { return real::epoll_wait(epfd, events, max, timeout) };
        let mut kernel = |part: &mut [epoll_event], time| {
            real::epoll_wait(epfd, part.as_mut_ptr(), part.len() as c_int, millis(time))
        };
        fill(events, max, |array| waiting::wait(epoll, array, nanos(timeout), &mut kernel))
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
        let Some(epoll) = waited_for(epfd, max) else {
            return real::epoll_pwait(epfd, events, max, timeout, mask);
        };
        let mut kernel = |part: &mut [epoll_event], time| {
            real::epoll_pwait(epfd, part.as_mut_ptr(), part.len() as c_int, millis(time), mask)
        };
        fill(events, max, |array| waiting::wait(epoll, array, nanos(timeout), &mut kernel))
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
        let (Some(epoll), Ok(nanos)) = (waited_for(epfd, max), from_timespec(timeout)) else {
            return real::epoll_pwait2(epfd, events, max, timeout, mask);
        };
        let mut kernel = |part: &mut [epoll_event], time: Option<u64>| {
            let time = time.map(as_timespec);
            let pointer = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            real::epoll_pwait2(epfd, part.as_mut_ptr(), part.len() as c_int, pointer, mask)
        };
        fill(events, max, |array| waiting::wait(epoll, array, nanos, &mut kernel))
    }
}
