//! stdio. It reads, writes and closes descriptors by calls inside libc, which no hook sees.

use std::ffi::{c_char, c_int, c_void};

use libc::FILE;
use shunt_abi::reason::Reason;

use super::trampoline::{Call, trampolines};
use crate::base::signal::{self, Shield};
use crate::base::table::{self, Entry};
use crate::base::undo_log::Held;
use crate::base::{errno, process, real};
use crate::life::attach;
use crate::ops::descriptors;
use crate::socket::endpoint::{self, Phase};

/// Keeps `fd` on TCP, because stdio will use it from now on.
fn given(fd: c_int) {
    let before = errno::get();
    match table::look_up(fd) {
        Entry::Endpoint(name) => {
            let _shield = Shield::raise();
            if let Some(endpoint) = name.resolve() {
                attach::bar_reading(endpoint, Reason::Stdio);
            }
        }
        // It may be connected later. Such a socket stays unknown to the shim.
        Entry::Unconnected(_) if process::is_home() => {
            let _shield = Shield::raise();
            descriptors::forget_unconnected(fd);
        }
        _ => {}
    }
    errno::set(before);
}

/// See fdopen(3).
///
/// # Safety
/// As in C. That holds for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    given(fd);
    // SAFETY: the program's own call.
    unsafe { real::fdopen(fd, mode) }
}

trampolines! {
    /// See dprintf(3).
    dprintf: before_dprintf;
    /// glibc's checked variant.
    __dprintf_chk: before_dprintf_chk;
    /// See vdprintf(3).
    vdprintf: before_vdprintf;
    /// glibc's checked variant.
    __vdprintf_chk: before_vdprintf_chk;
}

macro_rules! prints {
    ($($before:ident: $name:literal;)*) => { $(
        extern "C" fn $before(call: &Call) -> *mut c_void {
            given(call.argument(0) as c_int);
            real::address!($name)
        }
    )* };
}

prints! {
    before_dprintf: "dprintf";
    before_dprintf_chk: "__dprintf_chk";
    before_vdprintf: "vdprintf";
    before_vdprintf_chk: "__vdprintf_chk";
}

/// Calls `real`, which closes the descriptor of a stream after it has written the stream's buffer.
///
/// # Safety
/// `stream` is open.
unsafe fn closing<R>(stream: *mut FILE, real: impl FnOnce() -> R) -> R {
    let before = errno::get();
    // SAFETY: the caller's promise. A stream in memory has no descriptor.
    let fd = unsafe { libc::fileno(stream) };
    errno::set(before);
    if table::look_up(fd) == Entry::None || !process::is_home() {
        return real();
    }
    if endpoint::behind(fd).is_some_and(|endpoint| endpoint.phase() == Phase::Offered) {
        // Closing an offered connection may shut it down first, for the broker's sake. So the
        // buffer must be written before that.
        // SAFETY: the caller's promise.
        unsafe { libc::fflush(stream) };
        errno::set(before);
    }
    let _shield = Shield::raise();
    let closed = descriptors::begin_close(fd);
    let result = signal::open(Held::NOTHING, || signal::without(real));
    descriptors::end_close(closed);
    result
}

/// See fclose(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fclose(stream: *mut FILE) -> c_int {
    // SAFETY: the program's own call.
    unsafe { closing(stream, || real::fclose(stream)) }
}

/// See freopen(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn freopen(
    path: *const c_char,
    mode: *const c_char,
    stream: *mut FILE,
) -> *mut FILE {
    // SAFETY: the program's own call.
    unsafe { closing(stream, || real::freopen(path, mode, stream)) }
}

/// See freopen(3).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn freopen64(
    path: *const c_char,
    mode: *const c_char,
    stream: *mut FILE,
) -> *mut FILE {
    // SAFETY: the program's own call.
    unsafe { closing(stream, || real::freopen64(path, mode, stream)) }
}
