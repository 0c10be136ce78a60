//! The socket options and flags that calls on a lane must respect. They are read from the kernel
//! before an endpoint is offered, and where they may have changed.

use std::ffi::{c_int, c_uint};
use std::os::fd::RawFd;

use libc::{socklen_t, timeval};
use shunt_abi::option::SocketOption;
use shunt_abi::reason::Reason;

use crate::base::kernel::{low_water, option, quietly};
use crate::base::private::borrow;
use crate::base::real;
use crate::socket::endpoint::Endpoint;

/// Options that must have this integer value on a connection that is offered. An option may have
/// been set before the connection was made, or inherited from the listening socket, without a call
/// that the shim sees. See docs/options.md.
const MUST_BE: &[(c_int, c_int, c_int, Reason)] = &[
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP, 0, Reason::SocketOption),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 0, Reason::SocketOption),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPING, 0, Reason::SocketOption),
    (libc::SOL_SOCKET, SO_TIMESTAMP_NEW, 0, Reason::SocketOption),
    (libc::SOL_SOCKET, SO_TIMESTAMPNS_NEW, 0, Reason::SocketOption),
    (libc::SOL_SOCKET, SO_TIMESTAMPING_NEW, 0, Reason::SocketOption),
    (libc::SOL_SOCKET, libc::SO_PEEK_OFF, -1, Reason::SocketOption),
    (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, -1, Reason::SocketOption),
    (libc::IPPROTO_TCP, libc::TCP_REPAIR, 0, Reason::SocketOption),
    (libc::IPPROTO_TCP, TCP_TX_DELAY, 0, Reason::SocketOption),
];
const SO_TIMESTAMP_NEW: c_int = 63;
const SO_TIMESTAMPNS_NEW: c_int = 64;
const SO_TIMESTAMPING_NEW: c_int = 65;
const TCP_TX_DELAY: c_int = 37;

/// Reads the options that calls on a lane must respect, before an endpoint is offered. Fails if an
/// option keeps the endpoint on TCP.
pub(crate) fn learn(endpoint: &Endpoint, fd: RawFd) -> Result<(), Reason> {
    if low_water(fd) > 0 {
        return Err(Reason::LowWater);
    }
    for &(level, name, value, reason) in MUST_BE {
        // An option that the kernel does not know is not set.
        if option(fd, level, name).is_some_and(|now: c_int| now != value) {
            return Err(blame(endpoint, level, name, reason));
        }
    }
    let flags = rustix::fs::fcntl_getfl(borrow(fd)).map_or(0, |flags| flags.bits());
    if flags & libc::O_ASYNC as c_uint != 0 {
        return Err(Reason::AsyncIo);
    }
    if has_filter(fd) {
        return Err(blame(endpoint, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, Reason::SocketOption));
    }
    if has_upper_layer(fd) {
        return Err(blame(endpoint, libc::IPPROTO_TCP, libc::TCP_ULP, Reason::SocketOption));
    }
    learn_timeouts(endpoint, fd);
    learn_inq(endpoint, fd);
    // This also stores the flag in the endpoint.
    really_blocks(endpoint, fd);
    Ok(())
}

/// Records the option that keeps the endpoint on TCP, if the reason does not name it. Returns the
/// reason.
pub(crate) fn blame(endpoint: &Endpoint, level: c_int, name: c_int, reason: Reason) -> Reason {
    if reason == Reason::SocketOption {
        endpoint.blame(SocketOption { level, name });
    }
    reason
}

/// Reads SO_RCVTIMEO and SO_SNDTIMEO.
pub(crate) fn learn_timeouts(endpoint: &Endpoint, fd: RawFd) {
    let time = |name| option(fd, libc::SOL_SOCKET, name).map_or(0, nanos);
    endpoint.options.set_timeouts(time(libc::SO_RCVTIMEO), time(libc::SO_SNDTIMEO));
}

/// Returns whether TCP_INQ is set: receives then report how many bytes remain.
pub(crate) fn has_inq(fd: RawFd) -> bool {
    option(fd, libc::IPPROTO_TCP, libc::TCP_INQ).is_some_and(|asked: c_int| asked != 0)
}

pub(crate) fn learn_inq(endpoint: &Endpoint, fd: RawFd) {
    endpoint.options.set_reports_queue(has_inq(fd));
}

/// Returns whether the socket has a filter. A filter sees segments, and a lane has none.
fn has_filter(fd: RawFd) -> bool {
    // The length is the number of instructions. For a filter that may not be read, the kernel fails
    // with EACCES.
    let mut len = 0;
    // SAFETY: the buffer has no room, so only the length is written.
    let asked = quietly(|| unsafe {
        real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, std::ptr::null_mut(), &mut len)
    });
    asked.map_or_else(|errno| errno == libc::EACCES, |()| len > 0)
}

/// Returns whether the socket has an upper-layer protocol, such as kTLS.
fn has_upper_layer(fd: RawFd) -> bool {
    let mut name = [0u8; 16];
    let mut len = name.len() as socklen_t;
    // SAFETY: the buffer is `len` bytes long.
    let asked = quietly(|| unsafe {
        real::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_ULP, name.as_mut_ptr().cast(), &mut len)
    });
    asked.is_ok() && len > 0
}

/// Returns a time in nanoseconds.
pub(crate) fn nanos(time: timeval) -> u64 {
    time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1000
}

/// Returns whether calls on the socket block. The cached flag may be stale, because another process
/// may share the open file. So this queries the kernel, and is called only before a sleep.
pub(crate) fn really_blocks(endpoint: &Endpoint, fd: RawFd) -> bool {
    let Ok(flags) = rustix::fs::fcntl_getfl(crate::base::private::borrow(fd)) else { return false };
    let nonblocking = flags.contains(rustix::fs::OFlags::NONBLOCK);
    endpoint.options.set_nonblocking(nonblocking);
    !nonblocking
}
