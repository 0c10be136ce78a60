//! What a lane has to honour of a socket's settings: read from the kernel, before an endpoint is offered and where it may have changed.

use std::ffi::{c_int, c_uint};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::{socklen_t, timeval};
use shunt_abi::option::SocketOption;
use shunt_abi::reason::Reason;

use crate::base::kernel::{low_water, option, quietly};
use crate::base::private::borrow;
use crate::base::real;
use crate::socket::endpoint::Endpoint;

/// Options that must have this value, as an integer, on a connection that is offered: set before it was made, or
/// inherited from the listening socket, they were not seen. Docs: options.md.
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

/// Reads what calls on a lane must honour, before an endpoint is offered. `Err`: it cannot be.
pub(crate) fn learn(endpoint: &Endpoint, fd: RawFd) -> Result<(), Reason> {
    if low_water(fd) > 0 {
        return Err(Reason::LowWater);
    }
    for &(level, name, value, reason) in MUST_BE {
        // What the kernel does not know is not set.
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
    // Asks the kernel, and keeps the answer.
    really_blocks(endpoint, fd);
    Ok(())
}

/// Which option it is, where the reason does not say.
pub(crate) fn blame(endpoint: &Endpoint, level: c_int, name: c_int, reason: Reason) -> Reason {
    if reason == Reason::SocketOption {
        endpoint.blame(SocketOption { level, name });
    }
    reason
}

/// Reads SO_RCVTIMEO and SO_SNDTIMEO.
pub(crate) fn learn_timeouts(endpoint: &Endpoint, fd: RawFd) {
    let time = |name| option(fd, libc::SOL_SOCKET, name).map_or(0, nanos);
    endpoint.receive_timeout.store(time(libc::SO_RCVTIMEO), Relaxed);
    endpoint.send_timeout.store(time(libc::SO_SNDTIMEO), Relaxed);
}

/// Whether receives say how much more there is.
pub(crate) fn has_inq(fd: RawFd) -> bool {
    option(fd, libc::IPPROTO_TCP, libc::TCP_INQ).is_some_and(|asked: c_int| asked != 0)
}

pub(crate) fn learn_inq(endpoint: &Endpoint, fd: RawFd) {
    endpoint.tells_waiting.store(has_inq(fd), Relaxed);
}

/// A filter sees segments, and there are none on a lane.
fn has_filter(fd: RawFd) -> bool {
    // How many instructions; a filter that cannot be shown is an error other than "unknown".
    let mut len = 0;
    // SAFETY: no room, so nothing is written but the length.
    let asked = quietly(|| unsafe {
        real::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, std::ptr::null_mut(), &mut len)
    });
    asked.map_or_else(|errno| errno == libc::EACCES, |()| len > 0)
}

/// Such as kTLS.
fn has_upper_layer(fd: RawFd) -> bool {
    let mut name = [0u8; 16];
    let mut len = name.len() as socklen_t;
    // SAFETY: the buffer is `len` bytes long.
    let asked = quietly(|| unsafe {
        real::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_ULP, name.as_mut_ptr().cast(), &mut len)
    });
    asked.is_ok() && len > 0
}

/// In nanoseconds.
pub(crate) fn nanos(time: timeval) -> u64 {
    time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1000
}

/// The cached flag may be stale: another process may share the open file. Asked before a sleep only.
pub(crate) fn really_blocks(endpoint: &Endpoint, fd: RawFd) -> bool {
    let Ok(flags) = rustix::fs::fcntl_getfl(crate::base::private::borrow(fd)) else { return false };
    let nonblocking = flags.contains(rustix::fs::OFlags::NONBLOCK);
    endpoint.nonblocking.store(nonblocking.into(), Relaxed);
    !nonblocking
}
