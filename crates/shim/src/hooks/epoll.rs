//! epoll.

use std::ffi::c_int;
use std::ptr::null;

use libc::{epoll_event, pollfd, sigset_t, timespec};
use shunt_abi::reason::Reason;
use shunt_sys::memory;

use super::readiness::{from_timespec, is_good_mask};
use crate::base::signal::{self, Shield};
use crate::base::table::{self, Entry};
use crate::base::{errno, process, real};
use crate::epoll::{self, Epoll};
use crate::life::census;
use crate::ops::sleep::as_timespec;
use crate::ops::{descriptors, epoll_wait as waiting, poll as polling};

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
    if is_socket && let Some(epoll) = epoll::behind(epfd) {
        if !bad && operation != libc::EPOLL_CTL_DEL {
            // SAFETY: it can be read; they are plain numbers.
            let events = unsafe { (&raw const (*event).events).read_unaligned() };
            // The kernel's set gets a token for it, which nobody else may meet.
            if events & libc::EPOLLONESHOT as u32 != 0 {
                census::settle();
            }
        }
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

/// The instance of a call, if it is one and the kernel refuses neither the array nor the mask without a look at it.
#[inline]
fn waited_for(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    mask: *const sigset_t,
) -> Option<&'static Epoll> {
    const MOST: c_int = c_int::MAX / size_of::<epoll_event>() as c_int;
    if !(1..=MOST).contains(&max) {
        return None;
    }
    let epoll = epoll::behind(epfd).or_else(|| unknown(epfd))?;
    (memory::is_of_user(events as usize, max as usize * size_of::<epoll_event>()) && is_good_mask(mask))
        .then_some(epoll)
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

/// Has `wait` fill the array of a call, or as much of it as can be written: the kernel puts there what it can, and keeps the
/// rest. If that is nothing, what there is to tell stays where it is, and is an error. A set that the kernel answers for is waited for by the
/// program's own call, `kernel`.
///
/// # Safety
/// As epoll_wait: `events` has room for `max`, or is a bad address; `mask` is the program's.
#[inline(always)]
unsafe fn fill(
    (epoll, epfd): (&'static Epoll, c_int),
    (events, max): (*mut epoll_event, c_int),
    mut timeout: Option<u64>,
    mask: *const sigset_t,
    kernel: impl FnOnce() -> c_int,
    sleep_in_kernel: &mut waiting::Sleep<'_>,
) -> c_int {
    if waiting::is_by_kernel(epoll) {
        let name = epoll.name();
        let deadline = timeout.filter(|nanos| *nanos > 0).map(|nanos| process::now().saturating_add(nanos));
        let told = kernel();
        // If it has been closed meanwhile, nothing of ours was left in the kernel's set.
        if told <= 0 || !epoll.must_translate() || epoll.name() != name {
            return told;
        }
        // SAFETY: the kernel has written there, and what it has not written it could.
        let events = unsafe { std::slice::from_raw_parts_mut(events, room(events, max as usize)) };
        let kept = waiting::translate(epoll, events, told as usize);
        if kept > 0 {
            return kept;
        }
        timeout = deadline.map(|deadline| deadline.saturating_sub(process::now())).or(timeout);
    }
    signal::point();
    let _shield = Shield::raise();
    match room(events, max as usize) {
        0 => refuse(epfd, timeout, mask),
        // SAFETY: so many can be written.
        room => waiting::wait(
            epoll,
            unsafe { std::slice::from_raw_parts_mut(events, room) },
            timeout,
            sleep_in_kernel,
        ),
    }
}

/// How many events can be written at `events`, of `max`.
#[inline]
fn room(events: *mut epoll_event, max: usize) -> usize {
    /// Of a longer array the rest is believed: it would cost more to look at than it is ever used.
    const LOOKED_AT: usize = 1024;
    let looked_at = max.min(LOOKED_AT);
    let is_good = |count: usize| memory::is_writable(events.cast(), count * size_of::<epoll_event>());
    if is_good(looked_at) { max } else { good_part(looked_at, is_good) }
}

/// How many of the first `bad` can be, of which not all can.
#[cold]
fn good_part(mut bad: usize, is_good: impl Fn(usize) -> bool) -> usize {
    // Good ones come before bad ones.
    let mut good = 0;
    while bad - good > 1 {
        let middle = good.midpoint(bad);
        if is_good(middle) { good = middle } else { bad = middle }
    }
    good
}

/// A wait that can tell nothing: it ends when there is something to tell. poll sees that without taking it.
fn refuse(epfd: c_int, timeout: Option<u64>, mask: *const sigset_t) -> c_int {
    let mut set = [pollfd { fd: epfd, events: libc::POLLIN, revents: 0 }];
    let (base, time) = (set.as_mut_ptr(), timeout.map(as_timespec));
    let pointer = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: an array of ours, and the program's mask.
    let found = polling::poll(&mut set, timeout, mask, || unsafe { real::ppoll(base, 1, pointer, mask) });
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
        let by_kernel = || real::epoll_wait(epfd, events, max, timeout);
        let Some(epoll) = waited_for(epfd, events, max, null()) else { return by_kernel() };
        let mut sleep = |set, part: &mut [epoll_event], time| {
            real::epoll_wait(set, part.as_mut_ptr(), part.len() as c_int, millis(time))
        };
        fill((epoll, epfd), (events, max), nanos(timeout), null(), by_kernel, &mut sleep)
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
        let by_kernel = || real::epoll_pwait(epfd, events, max, timeout, mask);
        let Some(epoll) = waited_for(epfd, events, max, mask) else { return by_kernel() };
        let mut sleep = |set, part: &mut [epoll_event], time| {
            real::epoll_pwait(set, part.as_mut_ptr(), part.len() as c_int, millis(time), mask)
        };
        fill((epoll, epfd), (events, max), nanos(timeout), mask, by_kernel, &mut sleep)
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
        let by_kernel = || real::epoll_pwait2(epfd, events, max, timeout, mask);
        let Some(epoll) = waited_for(epfd, events, max, mask) else { return by_kernel() };
        let Ok(nanos) = from_timespec(timeout) else { return by_kernel() };
        let mut sleep = |set, part: &mut [epoll_event], time: Option<u64>| {
            let time = time.map(as_timespec);
            let pointer = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            real::epoll_pwait2(set, part.as_mut_ptr(), part.len() as c_int, pointer, mask)
        };
        fill((epoll, epfd), (events, max), nanos, mask, by_kernel, &mut sleep)
    }
}
