//! Differences between glibc and musl. A program has one of the two, and the shim must load with
//! both. So a function that only one of them has is looked up when the shim starts, or is in
//! [`real`].

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering::*};

use libc::{cmsghdr, msghdr};

use crate::base::{real, split};

/// Which libc the program has. 0: not known yet.
static KIND: AtomicU8 = AtomicU8::new(0);
const GLIBC: u8 = 1;
const MUSL: u8 = 2;

/// Points to glibc's `__libc_single_threaded`, see sys/single_threaded.h.
static SINGLE_THREADED: AtomicPtr<c_char> = AtomicPtr::new((&raw const UNSAID).cast_mut());
/// The value that is read where libc has no such variable: the process may have several threads.
static UNSAID: c_char = 0;

fn find(name: &CStr) -> *mut c_void {
    // SAFETY: a plain look-up of a constant name.
    unsafe { split::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// Looks the names up, before a signal handler could ask: a look-up takes the dynamic linker's
/// lock.
pub(crate) fn start() {
    let said = find(c"__libc_single_threaded");
    if !said.is_null() {
        SINGLE_THREADED.store(said.cast(), Relaxed);
    }
    kind();
}

fn kind() -> u8 {
    match KIND.load(Relaxed) {
        0 => {
            let kind = if find(c"gnu_get_libc_version").is_null() { MUSL } else { GLIBC };
            KIND.store(kind, Relaxed);
            kind
        }
        kind => kind,
    }
}

/// Returns whether the program's libc is musl.
pub(crate) fn is_musl() -> bool {
    kind() == MUSL
}

/// Returns whether the process has only this thread. musl does not report that, so there the answer
/// is always `false`.
#[inline]
pub(crate) fn is_single_threaded() -> bool {
    // SAFETY: a byte of glibc's, which other threads do not write, or `UNSAID`, which is never
    // written.
    unsafe { SINGLE_THREADED.load(Relaxed).read_volatile() != 0 }
}

type Handler = unsafe extern "C" fn();

/// Registers three functions that run around every fork, and live as long as the program. In glibc,
/// pthread_atfork is linked statically into each library and calls `__register_atfork`, which musl
/// does not have.
pub(crate) fn at_fork(before: Handler, in_parent: Handler, in_child: Handler) {
    type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    let name = if kind() == GLIBC { c"__register_atfork" } else { c"pthread_atfork" };
    let found = find(name);
    if !found.is_null() {
        // SAFETY: both functions have this prototype. pthread_atfork ignores the last argument,
        // which names a library that may be unloaded: none here.
        unsafe {
            std::mem::transmute::<*mut c_void, Register>(found)(
                before,
                in_parent,
                in_child,
                std::ptr::null_mut(),
            )
        };
    }
}

/// Ends the program after a checked function (_FORTIFY_SOURCE) found that its buffer is too small.
pub(crate) fn overflow() -> ! {
    // SAFETY: the function reports the overflow and ends the program.
    unsafe { real::__chk_fail() };
    std::process::abort()
}

/// Returns a message header as the kernel reads it. musl's lengths are narrower, and the padding
/// next to them may hold arbitrary bytes.
pub(crate) fn header(mut header: msghdr) -> msghdr {
    if is_musl() {
        header.msg_iovlen = header.msg_iovlen as u32 as usize;
        header.msg_controllen = header.msg_controllen as u32 as usize;
    }
    header
}

/// Returns the header of a control message as the kernel reads it, see [`header`].
pub(crate) fn piece(mut piece: cmsghdr) -> cmsghdr {
    if is_musl() {
        piece.cmsg_len = piece.cmsg_len as u32 as usize;
    }
    piece
}
