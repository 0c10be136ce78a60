//! What is not the same in glibc and musl, of which a program has one. The shim needs nothing to be loaded that only one of them has:
//! that is looked up when the shim starts, or has its place in [`real`].

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering::*};

use libc::{cmsghdr, msghdr};

use crate::base::{real, split};

/// Which it is: not known yet, glibc, or musl.
static KIND: AtomicU8 = AtomicU8::new(0);
const GLIBC: u8 = 1;
const MUSL: u8 = 2;

/// See sys/single_threaded.h of glibc.
static SINGLE_THREADED: AtomicPtr<c_char> = AtomicPtr::new((&raw const UNSAID).cast_mut());
/// What is read in its place where nobody says: no.
static UNSAID: c_char = 0;

fn find(name: &CStr) -> *mut c_void {
    // SAFETY: a plain look-up of a constant name.
    unsafe { split::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// Before there are handlers that ask: a look-up takes the dynamic linker's lock.
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

/// Whether the process has one thread, and no other is in the middle of anything. musl does not say: then it may have more.
#[inline]
pub(crate) fn is_single_threaded() -> bool {
    // SAFETY: a byte of glibc's, which other threads do not write, or one of ours, which nobody writes.
    unsafe { SINGLE_THREADED.load(Relaxed).read_volatile() != 0 }
}

type Handler = unsafe extern "C" fn();

/// Has three functions, which live as long as the program, called around every fork. In glibc pthread_atfork is a function of each
/// library's own, which musl's programs do not have.
pub(crate) fn at_fork(before: Handler, in_parent: Handler, in_child: Handler) {
    type Register = unsafe extern "C" fn(Handler, Handler, Handler, *mut c_void) -> c_int;
    let name = if kind() == GLIBC { c"__register_atfork" } else { c"pthread_atfork" };
    let found = find(name);
    if !found.is_null() {
        // SAFETY: they have this prototype, pthread_atfork without the last one, which names the library that will be unloaded: none.
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

/// A checked function, as _FORTIFY_SOURCE has them, has found that its buffer is too small.
pub(crate) fn overflow() -> ! {
    // SAFETY: reports that and ends the program.
    unsafe { real::__chk_fail() };
    std::process::abort()
}

/// The header of a message as the kernel is to read it: musl's has narrower lengths, and beside them whatever has been there before.
pub(crate) fn header(mut header: msghdr) -> msghdr {
    if kind() == MUSL {
        header.msg_iovlen = header.msg_iovlen as u32 as usize;
        header.msg_controllen = header.msg_controllen as u32 as usize;
    }
    header
}

/// The same of a piece of control data.
pub(crate) fn piece(mut piece: cmsghdr) -> cmsghdr {
    if kind() == MUSL {
        piece.cmsg_len = piece.cmsg_len as u32 as usize;
    }
    piece
}
