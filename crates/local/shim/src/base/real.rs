//! The functions that the hooks replace, found behind this library in the link order.
//!
//! The shim calls them rather than making system calls. So other preloaded libraries stay in the
//! chain, and cancellation points remain cancellation points.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::*};

use libc::{
    epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t, off64_t, pid_t, pollfd,
    posix_spawn_file_actions_t, posix_spawnattr_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec,
    timeval, uid_t,
};

use crate::base::split;

#[inline(never)]
fn resolve(cell: &AtomicPtr<c_void>, name: &'static str) -> *mut c_void {
    let name = CStr::from_bytes_with_nul(name.as_bytes()).expect("names end in a zero");
    // SAFETY: a plain look-up of a constant name.
    let mut found = unsafe { split::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if found.is_null()
        && let Some(plain) = plain(name)
    {
        // SAFETY: as above.
        found = unsafe { split::dlsym(libc::RTLD_NEXT, plain.as_ptr()) };
    }
    if found.is_null() {
        found = by_number(name);
    }
    if found.is_null() {
        found = split::find_behind(name);
    }
    if found.is_null() {
        // The result is not cached: a library that has the function may be loaded later.
        return missing as *mut c_void;
    }
    cell.store(found, Relaxed);
    found
}

/// Returns musl's name of a function for large files. In musl all file offsets are 64 bits wide.
/// Allocates nothing: the allocator itself may be the caller of this look-up.
fn plain(name: &CStr) -> Option<&'static CStr> {
    match name.to_bytes() {
        b"fcntl64" => Some(c"fcntl"),
        b"freopen64" => Some(c"freopen"),
        b"sendfile64" => Some(c"sendfile"),
        _ => None,
    }
}

/// Returns a substitute for a function that this libc lacks, or null. Without such a function, a
/// program makes the system call by syscall(2) (`hooks::raw`).
fn by_number(name: &CStr) -> *mut c_void {
    match name.to_bytes() {
        b"epoll_pwait2" => epoll_pwait2_by_number as *mut c_void,
        b"preadv2" => preadv2_by_number as *mut c_void,
        b"pwritev2" => pwritev2_by_number as *mut c_void,
        b"close_range" => close_range_by_number as *mut c_void,
        b"execveat" => execveat_by_number as *mut c_void,
        b"pkey_mprotect" => pkey_mprotect_by_number as *mut c_void,
        _ => std::ptr::null_mut(),
    }
}

macro_rules! by_number {
    ($($function:ident($($arg:ident),*) = $number:ident($a:expr, $b:expr, $c:expr, $d:expr, $e:expr, $f:expr);)*) => { $(
        unsafe extern "C-unwind" fn $function($($arg: c_long),*) -> c_long {
            // SAFETY: the arguments are those of the program's own call.
            unsafe { syscall(libc::$number, $a, $b, $c, $d, $e, $f) }
        }
    )* };
}

/// Size of the kernel's signal mask.
const MASK_BYTES: c_long = 8;

by_number! {
    epoll_pwait2_by_number(epoll, events, max, timeout, mask) = SYS_epoll_pwait2(epoll, events, max, timeout, mask, MASK_BYTES);
    preadv2_by_number(fd, list, count, offset, flags) = SYS_preadv2(fd, list, count, offset, 0, flags);
    pwritev2_by_number(fd, list, count, offset, flags) = SYS_pwritev2(fd, list, count, offset, 0, flags);
    close_range_by_number(first, last, flags) = SYS_close_range(first, last, flags, 0, 0, 0);
    execveat_by_number(dir, path, argv, envp, flags) = SYS_execveat(dir, path, argv, envp, flags, 0);
    pkey_mprotect_by_number(address, len, access, key) = SYS_pkey_mprotect(address, len, access, key, 0, 0);
}

/// Substitute for any other function that this libc lacks.
extern "C" fn missing() -> c_long {
    crate::base::errno::set(libc::ENOSYS);
    -1
}

/// Returns the address of the next definition of a function, for hooks that jump to it.
macro_rules! address {
    ($name:literal) => {{
        static CELL: std::sync::atomic::AtomicPtr<std::ffi::c_void> =
            std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
        $crate::base::real::found(&CELL, concat!($name, "\0"))
    }};
}
pub(crate) use address;

#[inline]
pub(crate) fn found(cell: &AtomicPtr<c_void>, name: &'static str) -> *mut c_void {
    let found = cell.load(Relaxed);
    if found.is_null() { resolve(cell, name) } else { found }
}

macro_rules! real {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {
        #[allow(non_upper_case_globals)]
        mod cells {
            $(pub(super) static $name: super::AtomicPtr<super::c_void> = super::AtomicPtr::new(std::ptr::null_mut());)*
        }

        fn resolve_all() {
            $(resolve(&cells::$name, concat!(stringify!($name), "\0"));)*
        }

        $(
            /// The next definition of this function in the link order.
            ///
            /// # Safety
            /// As the C function.
            #[inline]
            #[allow(clippy::too_many_arguments, non_snake_case)]
            pub(crate) unsafe fn $name($($arg: $ty),*) -> $ret {
                let found = found(&cells::$name, concat!(stringify!($name), "\0"));
                // SAFETY: the symbol has this C prototype; the rest is the caller's promise.
                unsafe {
                    let function: unsafe extern "C-unwind" fn($($ty),*) -> $ret = std::mem::transmute(found);
                    function($($arg),*)
                }
            }
        )*
    };
}

/// Finds all functions in advance: a look-up takes the dynamic linker's lock, so a signal handler
/// must not make one.
pub(crate) fn find_all() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Relaxed) {
        resolve_all();
    }
}

real! {
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
    fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    fn shutdown(fd: c_int, how: c_int) -> c_int;
    fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int;
    fn close(fd: c_int) -> c_int;
    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    fn dup(fd: c_int) -> c_int;
    fn dup2(old: c_int, new: c_int) -> c_int;
    fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
    fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int;
    fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int;
    fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t;
    fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t;
    fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t;
    fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t;
    fn preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    fn recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, fromlen: *mut socklen_t) -> ssize_t;
    fn sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, tolen: socklen_t) -> ssize_t;
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t;
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t;
    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int;
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    fn sendfile64(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t;
    fn splice(from: c_int, from_offset: *mut off64_t, to: c_int, to_offset: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t;
    fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    fn ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    fn select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int;
    fn pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    fn epoll_create(size: c_int) -> c_int;
    fn epoll_create1(flags: c_int) -> c_int;
    fn epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    fn epoll_wait(epoll: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int;
    fn epoll_pwait(epoll: c_int, events: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t) -> c_int;
    fn epoll_pwait2(epoll: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    fn mmap(address: *mut c_void, len: size_t, access: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void;
    fn munmap(address: *mut c_void, len: size_t) -> c_int;
    fn mprotect(address: *mut c_void, len: size_t, access: c_int) -> c_int;
    fn pkey_mprotect(address: *mut c_void, len: size_t, access: c_int, key: c_int) -> c_int;
    fn mlockall(flags: c_int) -> c_int;
    fn mremap(address: *mut c_void, len: size_t, new_len: size_t, flags: c_int, new_address: *mut c_void) -> *mut c_void;
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE;
    fn fclose(stream: *mut libc::FILE) -> c_int;
    fn freopen(path: *const c_char, mode: *const c_char, stream: *mut libc::FILE) -> *mut libc::FILE;
    fn freopen64(path: *const c_char, mode: *const c_char, stream: *mut libc::FILE) -> *mut libc::FILE;
    fn aio_read(request: *mut libc::aiocb) -> c_int;
    fn aio_write(request: *mut libc::aiocb) -> c_int;
    fn lio_listio(mode: c_int, list: *const *mut libc::aiocb, count: c_int, event: *mut libc::sigevent) -> c_int;
    fn unshare(flags: c_int) -> c_int;
    fn chroot(path: *const c_char) -> c_int;
    fn setuid(user: uid_t) -> c_int;
    fn seteuid(effective: uid_t) -> c_int;
    fn setreuid(real: uid_t, effective: uid_t) -> c_int;
    fn setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int;
    fn fork() -> pid_t;
    fn _Fork() -> pid_t;
    fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t, attributes: *const posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    fn posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const posix_spawn_file_actions_t, attributes: *const posix_spawnattr_t, argv: *const *mut c_char, envp: *const *mut c_char) -> c_int;
    fn posix_spawn_file_actions_adddup2(actions: *mut posix_spawn_file_actions_t, old: c_int, new: c_int) -> c_int;
    fn system(command: *const c_char) -> c_int;
    fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE;
    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
    fn execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    fn execv(path: *const c_char, argv: *const *const c_char) -> c_int;
    fn execvp(file: *const c_char, argv: *const *const c_char) -> c_int;
    fn execvpe(file: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    fn fexecve(fd: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int;
    fn execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, envp: *const *const c_char, flags: c_int) -> c_int;
    fn sigaction(signal: c_int, action: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
    fn pthread_cancel(thread: libc::pthread_t) -> c_int;
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
    fn pthread_testcancel() -> ();
    fn getcontext(context: *mut libc::ucontext_t) -> c_int;
    fn __chk_fail() -> ();
}
