//! poll, select and their variants.

use std::ffi::c_int;

use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use shunt_sys::memory;

use crate::base::signal::{self, Shield};
use crate::base::{clib, errno, own_table, process, real};
use crate::ops::poll;
use crate::ops::select::Sets;

/// poll and its kin. What can be read but not be written is waited for all the same, and refused then.
///
/// # Safety
/// As poll: `fds` points to `count` entries, or is what the kernel refuses.
unsafe fn polling(
    (fds, count): (*mut pollfd, nfds_t),
    nanos: Option<u64>,
    mask: *const sigset_t,
    kernel: &dyn Fn() -> c_int,
) -> c_int {
    let len = (count as usize).saturating_mul(size_of::<pollfd>());
    if fds.is_null() || count > i32::MAX as nfds_t || !memory::is_readable(fds.cast(), len) {
        return kernel();
    }
    signal::point();
    let _shield = Shield::raise();
    if memory::is_writable(fds.cast(), len) {
        // SAFETY: it can be read and written.
        let set = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
        return poll::poll(set, nanos, mask, kernel);
    }
    // SAFETY: it can be read.
    let mut copy = unsafe { std::slice::from_raw_parts(fds, count as usize) }.to_vec();
    let result = poll::poll(&mut copy, nanos, mask, kernel);
    if result < 0 {
        return result;
    }
    errno::set(libc::EFAULT);
    -1
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
        polling((fds, count), nanos, std::ptr::null(), &kernel)
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
        match from_timespec(timeout) {
            Ok(nanos) if is_good_mask(mask) => polling((fds, count), nanos, mask, &kernel),
            _ => kernel(),
        }
    }
}

/// A relative time in nanoseconds; `Err` if the kernel must refuse it.
///
/// # Safety
/// `time` is null or the program's argument.
pub(super) unsafe fn from_timespec(time: *const timespec) -> Result<Option<u64>, ()> {
    if time.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise; it is two numbers.
    let time = unsafe { memory::read(time) }.ok_or(())?;
    nanos(time.tv_sec, time.tv_nsec)
}

fn nanos(seconds: i64, nanos: i64) -> Result<Option<u64>, ()> {
    if seconds < 0 || !(0..1_000_000_000).contains(&nanos) {
        return Err(());
    }
    Ok(Some((seconds as u64).saturating_mul(1_000_000_000).saturating_add(nanos as u64)))
}

/// Whether the kernel can read a mask: it does so before it looks at anything else, and whatever it finds.
pub(super) fn is_good_mask(mask: *const sigset_t) -> bool {
    /// Signals are 64 bits to the kernel.
    const BYTES: usize = size_of::<u64>();
    mask.is_null() || memory::is_readable(mask.cast(), BYTES)
}

/// The time and the mask of a select. Nothing is looked at before it is known that it must be.
struct Limits<'a> {
    /// In nanoseconds; `Err` if it is refused.
    time: &'a dyn Fn() -> Result<Option<u64>, ()>,
    mask: *const sigset_t,
    /// Is told how much of the time has not been slept.
    leave: &'a dyn Fn(u64),
}

/// select and its kin. `kernel` makes the program's own call, for so many descriptors.
fn selecting(
    count: c_int,
    sets: [*mut fd_set; 3],
    limits: &Limits<'_>,
    kernel: &dyn Fn(c_int) -> c_int,
) -> c_int {
    if process::is_off() {
        return kernel(count);
    }
    let before = errno::get();
    let result = select_among(count, sets, limits, kernel);
    if result == -1
        && errno::get() == libc::EBADF
        && let Some(fewer) = own_table::shorter_than(count)
    {
        errno::set(before);
        return select_among(fewer, sets, limits, kernel);
    }
    result
}

fn select_among(
    count: c_int,
    sets: [*mut fd_set; 3],
    limits: &Limits<'_>,
    kernel: &dyn Fn(c_int) -> c_int,
) -> c_int {
    let mut sets = Sets::new(count, sets);
    match (limits.time)() {
        Ok(nanos) if is_good_mask(limits.mask) && sets.concern_us() => {
            signal::point();
            let _shield = Shield::raise();
            let begin = process::now();
            let result = sets.wait(nanos, limits.mask);
            if let Some(nanos) = nanos {
                (limits.leave)(nanos.saturating_sub(process::now() - begin));
            }
            result
        }
        _ => kernel(count),
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
    // glibc looks at so many bits of it.
    let micros = |micros: i64| i64::from(micros as i32);
    // SAFETY: the program's own call.
    let kernel = |count| unsafe { real::select(count, read, write, except, timeout) };
    // SAFETY: the program's argument.
    unsafe { selecting_with_timeval(count, [read, write, except], timeout, &micros, &kernel) }
}

/// The system call. Unlike with libc's function, a bad address of the time is the kernel's to refuse.
///
/// # Safety
/// As the system call.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn select_by_number(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let [a, b, c, d] =
        [read.addr(), write.addr(), except.addr(), timeout.addr()].map(|word| word as std::ffi::c_long);
    // SAFETY: the program's own call, here and below.
    let kernel =
        |count: c_int| unsafe { real::syscall(libc::SYS_select, count.into(), a, b, c, d, 0) as c_int };
    // SAFETY: the program's argument.
    unsafe { selecting_with_timeval(count, [read, write, except], timeout, &|micros| micros, &kernel) }
}

/// There may be more microseconds than a second has; `taken` says how many count. Linux leaves in `timeout` what was not slept,
/// if it can.
///
/// # Safety
/// `timeout` is the program's argument.
unsafe fn selecting_with_timeval(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *mut timeval,
    taken: &dyn Fn(i64) -> i64,
    kernel: &dyn Fn(c_int) -> c_int,
) -> c_int {
    let time = || {
        if timeout.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller's promise; it is two numbers.
        let given = unsafe { memory::read(timeout) }.ok_or(())?;
        let micros = taken(given.tv_usec);
        let seconds = given.tv_sec.saturating_add(micros / 1_000_000);
        nanos((given.tv_sec >= 0).then_some(seconds).ok_or(())?, micros % 1_000_000 * 1000)
    };
    let leave = |left: u64| {
        let rest =
            timeval { tv_sec: (left / 1_000_000_000) as i64, tv_usec: (left % 1_000_000_000 / 1000) as i64 };
        // SAFETY: the program wants it there.
        unsafe { memory::write(timeout, rest) };
    };
    selecting(count, sets, &Limits { time: &time, mask: std::ptr::null(), leave: &leave }, kernel)
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
    // SAFETY: the program's own call.
    let kernel = |count| unsafe { real::pselect(count, read, write, except, timeout, mask) };
    // SAFETY: the program's argument.
    let time = || unsafe { from_timespec(timeout) };
    selecting(count, [read, write, except], &Limits { time: &time, mask, leave: &|_| () }, &kernel)
}

/// glibc's checked variants.
mod checked {
    use super::*;

    fn check(count: nfds_t, room: size_t) {
        if room / size_of::<pollfd>() < count as usize {
            clib::overflow()
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
