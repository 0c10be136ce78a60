//! poll, select and their variants.

use std::ffi::c_int;

use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use shunt_sys::memory;

use crate::base::signal::{self, Shield};
use crate::base::{clib, errno, own_table, process, real};
use crate::ops::poll;
use crate::ops::select::Sets;

/// Implements poll and its variants. An array that can be read but not written is waited for, and
/// then refused, as in the kernel.
///
/// # Safety
/// As poll: `fds` points to `count` entries, or the kernel refuses it.
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
        // SAFETY: the array is readable and writable.
        let set = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
        return poll::poll(set, nanos, mask, kernel);
    }
    // SAFETY: the array is readable.
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
/// As in C. That holds for every hook.
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

/// Returns a relative time in nanoseconds, or `Err` if the kernel must refuse it.
///
/// # Safety
/// `time` is null or the program's argument.
pub(super) unsafe fn from_timespec(time: *const timespec) -> Result<Option<u64>, ()> {
    if time.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise. A timespec consists of integers.
    let time = unsafe { memory::read(time) }.ok_or(())?;
    nanos(time.tv_sec, time.tv_nsec)
}

fn nanos(seconds: i64, nanos: i64) -> Result<Option<u64>, ()> {
    if seconds < 0 || !(0..1_000_000_000).contains(&nanos) {
        return Err(());
    }
    Ok(Some((seconds as u64).saturating_mul(1_000_000_000).saturating_add(nanos as u64)))
}

/// Returns whether the kernel can read a mask. It does so first, for any descriptors.
pub(super) fn is_good_mask(mask: *const sigset_t) -> bool {
    /// Size of the kernel's signal set.
    const BYTES: usize = size_of::<u64>();
    mask.is_null() || memory::is_readable(mask.cast(), BYTES)
}

/// Timeout and mask of a select. Neither is read before that is needed.
struct Limits<'a> {
    /// Returns the timeout in nanoseconds, or `Err` if the kernel must refuse it.
    time: &'a dyn Fn() -> Result<Option<u64>, ()>,
    mask: *const sigset_t,
    /// Stores the remaining time.
    leave: &'a dyn Fn(u64),
}

/// Implements select and its variants. `kernel` makes the program's own call, with the given number
/// of descriptors.
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
        Ok(nanos) if is_good_mask(limits.mask) && sets.may_concern_us() => {
            signal::point();
            let shield = Shield::raise();
            let begin = nanos.map(|_| process::now());
            let result = sets.answer_now(nanos, limits.mask).or_else(|| sets.wait(nanos, limits.mask));
            let Some(result) = result else {
                drop(shield);
                return kernel(count);
            };
            if let (Some(nanos), Some(begin)) = (nanos, begin) {
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
    // glibc uses only these bits of the microseconds.
    let micros = |micros: i64| i64::from(micros as i32);
    // SAFETY: the program's own call.
    let kernel = |count| unsafe { real::select(count, read, write, except, timeout) };
    // SAFETY: the program's argument.
    unsafe {
        selecting_with_timeval(count, [read, write, except], timeout, &micros, !clib::is_musl(), &kernel)
    }
}

/// Implements the system call select. Unlike libc's function, it fails with EFAULT if the timeout
/// is a bad address.
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
    unsafe { selecting_with_timeval(count, [read, write, except], timeout, &|micros| micros, true, &kernel) }
}

/// Implements select with a timeval, which may have more microseconds than a second. `taken`
/// returns how many of them count. Stores the remaining time in `timeout` if `leaves_rest`, as Linux
/// does. musl's function gives Linux a copy.
///
/// # Safety
/// `timeout` is the program's argument.
unsafe fn selecting_with_timeval(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *mut timeval,
    taken: &dyn Fn(i64) -> i64,
    leaves_rest: bool,
    kernel: &dyn Fn(c_int) -> c_int,
) -> c_int {
    let time = || {
        if timeout.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller's promise. A timeval consists of integers.
        let given = unsafe { memory::read(timeout) }.ok_or(())?;
        let micros = taken(given.tv_usec);
        let seconds = given.tv_sec.saturating_add(micros / 1_000_000);
        nanos((given.tv_sec >= 0).then_some(seconds).ok_or(())?, micros % 1_000_000 * 1000)
    };
    let leave = |left: u64| {
        let rest =
            timeval { tv_sec: (left / 1_000_000_000) as i64, tv_usec: (left % 1_000_000_000 / 1000) as i64 };
        if leaves_rest {
            // SAFETY: the program passed this address for the remaining time.
            unsafe { memory::write(timeout, rest) };
        }
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

/// glibc's checked variants, which programs built with _FORTIFY_SOURCE call.
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
