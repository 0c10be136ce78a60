//! The hooks of epoll.

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
/// As in C. That holds for every hook.
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
            // SAFETY: the event is readable, and consists of integers.
            let events = unsafe { (&raw const (*event).events).read_unaligned() };
            // The kernel's registration will get a token, which no call past the shim may meet
            // (L11).
            if events & libc::EPOLLONESHOT as u32 != 0 {
                census::settle();
            }
        }
        epoll.note_call_by(epfd);
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
    if is_socket && result == 0 && process::is_home() && !process::has_ended() {
        match epoll::take_in(epfd) {
            // SAFETY: the kernel has accepted these arguments.
            Some(epoll) => unsafe { epoll.note_control(operation, fd, event) },
            None => descriptors::hand_on(fd, Reason::UnknownEpoll),
        }
    }
    result
}

/// Returns the epoll instance of a call. Returns `None` if there is none, or if the kernel refuses
/// the array or the mask by their addresses alone.
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

/// Returns an instance that the shim has not seen being made. It is taken in now, because a
/// connection with bytes in a lane may be registered there while this wait sleeps.
#[cold]
fn unknown(epfd: c_int) -> Option<&'static Epoll> {
    if process::is_off() || !process::is_home() || table::look_up(epfd) != Entry::None {
        return None;
    }
    let _shield = Shield::raise();
    epoll::is_instance(epfd).then(|| epoll::take_in(epfd)).flatten()
}

/// Makes `wait` fill the array of a call, or its writable beginning: the kernel too reports as many
/// events as it can write and keeps the rest. If no event can be written, the events stay pending
/// and the call fails. If the kernel answers for the instance, the program's own call `kernel` does
/// the wait.
///
/// # Safety
/// As epoll_wait: `events` has room for `max`, or is a bad address. `mask` is the program's.
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
        // If the instance was closed meanwhile, its kernel set contained no token of the shim.
        if told <= 0 || !epoll.must_translate() || epoll.name() != name {
            return told;
        }
        // SAFETY: the kernel has written the first entries, and `room` has checked the others.
        let events = unsafe { std::slice::from_raw_parts_mut(events, room(events, max as usize)) };
        let kept = waiting::translate(epoll, events, told as usize);
        if kept > 0 {
            return kept;
        }
        timeout = deadline.map(|deadline| deadline.saturating_sub(process::now())).or(timeout);
    }
    signal::point();
    let _shield = Shield::raise();
    epoll.note_call_by(epfd);
    match room(events, max as usize) {
        0 => refuse(epfd, timeout, mask),
        // SAFETY: `room` has checked that so many entries are writable.
        room => waiting::wait(
            epoll,
            unsafe { std::slice::from_raw_parts_mut(events, room) },
            timeout,
            sleep_in_kernel,
        ),
    }
}

/// Returns how many of `max` events can be written at `events`.
#[inline]
fn room(events: *mut epoll_event, max: usize) -> usize {
    /// Only so many entries are checked. Programs rarely use more, and checking them would cost
    /// more than that is worth.
    const LOOKED_AT: usize = 1024;
    let looked_at = max.min(LOOKED_AT);
    let is_good = |count: usize| memory::is_writable(events.cast(), count * size_of::<epoll_event>());
    if is_good(looked_at) { max } else { good_part(looked_at, is_good) }
}

/// Returns how many entries are writable, by bisection. Fewer than `bad` are.
#[cold]
fn good_part(mut bad: usize, is_good: impl Fn(usize) -> bool) -> usize {
    // Writable entries precede the others.
    let mut good = 0;
    while bad - good > 1 {
        let middle = good.midpoint(bad);
        if is_good(middle) { good = middle } else { bad = middle }
    }
    good
}

/// Handles a wait that cannot report any event. It ends with EFAULT when an event is pending. poll
/// notices that without consuming the event.
fn refuse(epfd: c_int, timeout: Option<u64>, mask: *const sigset_t) -> c_int {
    let mut set = [pollfd { fd: epfd, events: libc::POLLIN, revents: 0 }];
    let (base, time) = (set.as_mut_ptr(), timeout.map(as_timespec));
    let pointer = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: a local array, and the program's mask.
    let found = polling::poll(&mut set, timeout, mask, || unsafe { real::ppoll(base, 1, pointer, mask) });
    if found > 0 {
        errno::set(libc::EFAULT);
        return -1;
    }
    found
}

fn millis(nanos: Option<u64>) -> c_int {
    // Rounded up, because a wait must not end early.
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
