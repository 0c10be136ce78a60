//! The other names under which glibc exports functions that have hooks.

use std::ffi::{c_char, c_int, c_ulong, c_void};

use libc::{fd_set, nfds_t, pollfd, size_t, sockaddr, socklen_t, ssize_t, timeval};

use super::{descriptor, io, readiness, socket, stdio};

macro_rules! aliases {
    ($($name:ident = $module:ident::$hook:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => { $(
        /// Another name of a hooked function in glibc.
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the arguments of the same call.
            unsafe { $module::$hook($($arg),*) }
        }
    )* };
}

aliases! {
    __read = io::read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t;
    __write = io::write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t;
    __send = io::send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    __connect = socket::connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    __close = descriptor::close(fd: c_int) -> c_int;
    __dup2 = descriptor::dup2(old: c_int, new: c_int) -> c_int;
    __fcntl = descriptor::fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    __poll = readiness::poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    __select = readiness::select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int;
    _IO_fdopen = stdio::fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE;
    _IO_fclose = stdio::fclose(stream: *mut libc::FILE) -> c_int;
}
