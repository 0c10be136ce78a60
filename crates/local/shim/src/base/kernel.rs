//! System calls that do not wait and leave errno unchanged, for callers that hold a lock.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use std::ffi::{c_int, c_long};

use libc::{epoll_event, msghdr, pollfd, socklen_t};
use rustix::net::{AddressFamily, sockopt};

use crate::base::{errno, real};

/// Makes a system call that does not wait, under a lock. libc's own function could be a
/// cancellation point, and a thread that ended there would never release the lock.
///
/// # Safety
/// As the system call.
pub(crate) unsafe fn call(number: c_long, arguments: [c_long; 6]) -> Result<usize, i32> {
    let before = errno::get();
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the caller's promise.
    let result = unsafe { real::syscall(number, a, b, c, d, e, f) };
    usize::try_from(result).map_err(|_| {
        let failed = errno::get();
        errno::set(before);
        failed
    })
}

/// Calls recvmsg without waiting.
///
/// # Safety
/// As recvmsg; the flags contain MSG_DONTWAIT.
pub(crate) unsafe fn recvmsg_now(fd: RawFd, message: *mut msghdr, flags: c_int) -> Result<usize, i32> {
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_recvmsg, [fd.into(), message as _, flags.into(), 0, 0, 0]) }
}

/// Calls send without waiting or raising SIGPIPE.
///
/// # Safety
/// As send.
pub(crate) unsafe fn send_now(fd: RawFd, base: *const u8, len: usize) -> Result<usize, i32> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_sendto, [fd.into(), base as _, len as _, flags.into(), 0, 0]) }
}

/// Calls pwrite on a regular file.
///
/// # Safety
/// As pwrite.
pub(crate) unsafe fn write_at(file: RawFd, base: *const u8, len: usize, offset: i64) -> Result<usize, i32> {
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_pwrite64, [file.into(), base as _, len as _, offset, 0, 0]) }
}

/// Sends a byte of urgent data, which is not part of the stream. Returns whether that worked.
pub(crate) fn send_urgent_now(fd: RawFd) -> bool {
    let byte = [0u8];
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | libc::MSG_OOB;
    // SAFETY: the byte is a local variable.
    unsafe { call(libc::SYS_sendto, [fd.into(), byte.as_ptr() as _, 1, flags.into(), 0, 0]) }.is_ok()
}

/// Calls pread on a regular file.
///
/// # Safety
/// As pread.
pub(crate) unsafe fn read_at(file: RawFd, base: *mut u8, len: usize, offset: i64) -> Result<usize, i32> {
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_pread64, [file.into(), base as _, len as _, offset, 0, 0]) }
}

/// Dissolves the socket's association (connect with AF_UNSPEC), which leaves ECONNRESET as its
/// error.
pub(crate) fn dissolve(fd: RawFd) {
    let nowhere = libc::sockaddr { sa_family: libc::AF_UNSPEC as u16, sa_data: [0; 14] };
    let (address, len) = (std::ptr::from_ref(&nowhere) as c_long, size_of_val(&nowhere) as c_long);
    // SAFETY: the address is a local variable.
    let _ = unsafe { call(libc::SYS_connect, [fd.into(), address, len, 0, 0, 0]) };
}

/// Gives a closed socket the error ECONNRESET: it begins to connect, which is dissolved before
/// anything is sent. TCP Fast Open without a cookie defers the first segment until there is data.
/// Does nothing where the kernel does not support that.
#[cold]
pub(crate) fn dissolve_connecting(socket: BorrowedFd<'_>) {
    const DISCARD: u16 = 9;
    let fd = socket.as_raw_fd();
    let defer = |on: c_int| {
        set_tcp_option(fd, libc::TCP_FASTOPEN_NO_COOKIE, on)
            && set_tcp_option(fd, libc::TCP_FASTOPEN_CONNECT, on)
    };
    let itself = match sockopt::socket_domain(socket) {
        Ok(AddressFamily::INET6) => SocketAddr::from((Ipv6Addr::LOCALHOST, DISCARD)),
        _ => SocketAddr::from((Ipv4Addr::LOCALHOST, DISCARD)),
    };
    if defer(1) && rustix::net::connect(socket, &itself).is_ok() {
        dissolve(fd);
    }
    defer(0);
}

/// Returns whether a process has this thread.
pub(crate) fn has_thread(process: i32, thread: i32) -> bool {
    // SAFETY: a plain call. Signal 0 is not sent.
    let asked = unsafe { call(libc::SYS_tgkill, [process.into(), thread.into(), 0, 0, 0, 0]) };
    asked != Err(libc::ESRCH)
}

/// Makes TCP send segments that it delays because they are small. Sets TCP_NODELAY for that, and
/// clears it again.
#[cold]
pub(crate) fn push(fd: RawFd) {
    let mut on: c_int = 0;
    let mut len = size_of::<c_int>() as libc::socklen_t;
    let (level, name) = (c_long::from(libc::IPPROTO_TCP), c_long::from(libc::TCP_NODELAY));
    let (value, room) = (std::ptr::from_mut(&mut on) as c_long, std::ptr::from_mut(&mut len) as c_long);
    // SAFETY: a local integer and its length, here and below.
    let asked = unsafe { call(libc::SYS_getsockopt, [fd.into(), level, name, value, room, 0]) };
    if asked.is_err() || on != 0 {
        return;
    }
    for nodelay in [1, 0] {
        set_tcp_option(fd, libc::TCP_NODELAY, nodelay);
    }
}

/// Sets a TCP option that is an integer. Returns whether the kernel accepted that.
fn set_tcp_option(fd: RawFd, name: c_int, value: c_int) -> bool {
    let (address, len) = (std::ptr::from_ref(&value) as c_long, size_of_val(&value) as c_long);
    let arguments = [fd.into(), libc::IPPROTO_TCP.into(), name.into(), address, len, 0];
    // SAFETY: the value is a local integer.
    unsafe { call(libc::SYS_setsockopt, arguments) }.is_ok()
}

/// Ends the receiving direction of a socket, as if its peer had.
pub(crate) fn shut_down_reading(fd: RawFd) {
    // SAFETY: a plain call, which neither waits nor reads memory.
    let _ = unsafe { call(libc::SYS_shutdown, [fd.into(), libc::SHUT_RD.into(), 0, 0, 0, 0]) };
}

/// Returns whether the socket has a pending error. Does not consume the error.
pub(crate) fn has_error(fd: RawFd) -> bool {
    let mut polled = [pollfd { fd, events: 0, revents: 0 }];
    poll_now(&mut polled) > 0 && polled[0].revents & libc::POLLERR != 0
}

/// Returns whether a send would not wait.
pub(crate) fn has_room(fd: RawFd) -> bool {
    let mut polled = [pollfd { fd, events: libc::POLLOUT, revents: 0 }];
    poll_now(&mut polled) > 0
}

/// Returns whether urgent data is waiting.
pub(crate) fn has_urgent(fd: RawFd) -> bool {
    let mut polled = [pollfd { fd, events: libc::POLLPRI, revents: 0 }];
    poll_now(&mut polled);
    polled[0].revents & libc::POLLPRI != 0
}

/// Calls poll without waiting. Returns 0 if it fails.
pub(crate) fn poll_now(fds: &mut [pollfd]) -> usize {
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let time = std::ptr::from_ref(&at_once) as c_long;
    // SAFETY: the array is as long as it says.
    unsafe { call(libc::SYS_ppoll, [fds.as_mut_ptr() as _, fds.len() as _, time, 0, 0, 0]) }.unwrap_or(0)
}

/// Calls select without waiting.
///
/// # Safety
/// The sets are null, or have room for `count` descriptors.
pub(crate) unsafe fn select_now(count: c_int, sets: [*mut u64; 3]) -> Result<usize, i32> {
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let time = std::ptr::from_ref(&at_once) as c_long;
    let [read, write, except] = sets.map(|set| set as c_long);
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_pselect6, [count.into(), read, write, except, time, 0]) }
}

/// Calls epoll_wait without waiting. Returns 0 if it fails.
pub(crate) fn epoll_now(epoll: RawFd, events: &mut [epoll_event]) -> usize {
    let (base, len) = (events.as_mut_ptr() as c_long, events.len() as c_long);
    // SAFETY: the array is as long as it says.
    unsafe { call(libc::SYS_epoll_pwait, [epoll.into(), base, len, 0, 0, 0]) }.unwrap_or(0)
}

/// Runs a call of the shim's and restores errno. `Err` holds the errno of the call.
pub(crate) fn quietly(call: impl FnOnce() -> c_int) -> Result<(), i32> {
    let before = errno::get();
    let result = call();
    let failed = errno::get();
    errno::set(before);
    if result == 0 { Ok(()) } else { Err(failed) }
}

/// Returns a socket option of type `T`, or `None` if the kernel returns another length or fails.
pub(crate) fn option<T: Copy>(fd: RawFd, level: c_int, name: c_int) -> Option<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as socklen_t;
    // SAFETY: the buffer is `len` bytes long.
    let asked = quietly(|| unsafe { real::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &mut len) });
    // SAFETY: callers ask for integers and timevals, for which every bit pattern is valid.
    (asked.is_ok() && len as usize == size_of::<T>()).then(|| unsafe { value.assume_init() })
}

/// Sets an integer option. Ignores errors.
pub(crate) fn set_option(fd: RawFd, level: c_int, name: c_int, value: c_int) {
    let (base, len) = (std::ptr::from_ref(&value) as c_long, size_of::<c_int>() as c_long);
    // SAFETY: a local integer and its length.
    let _ = unsafe { call(libc::SYS_setsockopt, [fd.into(), level.into(), name.into(), base, len, 0]) };
}

/// Returns and clears the socket's pending error (SO_ERROR).
pub(crate) fn take_error(fd: RawFd) -> Option<i32> {
    option::<c_int>(fd, libc::SOL_SOCKET, libc::SO_ERROR).filter(|errno| *errno != 0)
}

/// Returns SO_RCVLOWAT if it is more than 1, else 0.
pub(crate) fn low_water(fd: RawFd) -> usize {
    let bytes: c_int = option(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT).unwrap_or(1);
    usize::try_from(bytes).map_or(0, |bytes| if bytes > 1 { bytes } else { 0 })
}
