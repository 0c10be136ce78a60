//! Socket options, fcntl and ioctl: which of them a lane honours, and which send a connection back to TCP.

use std::ffi::{c_int, c_ulong, c_void};
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::timeval;
use shunt_abi::reason::Reason;

use crate::endpoint::Endpoint;
use crate::ops::receive;
use crate::{attach, real};

/// Linux's own, which the crate does not name.
const F_SETSIG: c_int = 10;

/// Reads what calls on a lane must honour, before an endpoint is offered. `Err`: it cannot be.
pub(crate) fn learn(endpoint: &Endpoint, fd: RawFd) -> Result<(), Reason> {
    let low_water: c_int = option(fd, libc::SO_RCVLOWAT).unwrap_or(1);
    if low_water > 1 {
        return Err(Reason::LowWater);
    }
    let receive: Option<timeval> = option(fd, libc::SO_RCVTIMEO);
    let send: Option<timeval> = option(fd, libc::SO_SNDTIMEO);
    endpoint.receive_timeout.store(receive.map_or(0, nanos), Relaxed);
    endpoint.send_timeout.store(send.map_or(0, nanos), Relaxed);
    // Asks the kernel, and keeps the answer.
    crate::ops::send::really_blocks(endpoint, fd);
    Ok(())
}

fn option<T: Copy>(fd: RawFd, name: c_int) -> Option<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    let before = crate::errno::get();
    // SAFETY: the buffer is `len` bytes long.
    let result = unsafe { real::getsockopt(fd, libc::SOL_SOCKET, name, value.as_mut_ptr().cast(), &mut len) };
    crate::errno::set(before);
    // SAFETY: callers ask for integers and timevals, for which every bit pattern is valid.
    (result == 0 && len as usize == size_of::<T>()).then(|| unsafe { value.assume_init() })
}

fn nanos(time: timeval) -> u64 {
    time.tv_sec as u64 * 1_000_000_000 + time.tv_usec as u64 * 1000
}

/// Before setsockopt on an endpoint: what cannot be honoured on a lane sends it back.
pub(crate) fn before_set(endpoint: &Endpoint, level: c_int, name: c_int) {
    let reason = match (level, name) {
        (libc::SOL_SOCKET, name) => match name {
            libc::SO_REUSEADDR
            | libc::SO_REUSEPORT
            | libc::SO_KEEPALIVE
            | libc::SO_LINGER
            | libc::SO_SNDBUF
            | libc::SO_RCVBUF
            | libc::SO_SNDBUFFORCE
            | libc::SO_RCVBUFFORCE
            | libc::SO_SNDTIMEO
            | libc::SO_RCVTIMEO
            | libc::SO_DONTROUTE
            | libc::SO_PRIORITY
            | libc::SO_OOBINLINE
            | libc::SO_BUSY_POLL
            | libc::SO_INCOMING_CPU
            | libc::SO_BROADCAST => return,
            libc::SO_RCVLOWAT => Reason::LowWater,
            libc::SO_ZEROCOPY => Reason::ZeroCopy,
            _ => Reason::SocketOption,
        },
        (libc::IPPROTO_TCP, name) => match name {
            libc::TCP_NODELAY
            | libc::TCP_CORK
            | libc::TCP_QUICKACK
            | libc::TCP_KEEPIDLE
            | libc::TCP_KEEPINTVL
            | libc::TCP_KEEPCNT
            | libc::TCP_USER_TIMEOUT
            | libc::TCP_MAXSEG
            | libc::TCP_SYNCNT
            | libc::TCP_LINGER2
            | libc::TCP_DEFER_ACCEPT
            | libc::TCP_WINDOW_CLAMP
            | libc::TCP_CONGESTION
            | libc::TCP_NOTSENT_LOWAT => return,
            libc::TCP_FASTOPEN | libc::TCP_FASTOPEN_CONNECT => Reason::FastOpen,
            _ => Reason::SocketOption,
        },
        // Type of service, time to live: what they change is on the wire, and nothing is.
        (libc::IPPROTO_IP, libc::IP_TOS | libc::IP_TTL | libc::IP_MTU_DISCOVER) => return,
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS | libc::IPV6_UNICAST_HOPS | libc::IPV6_V6ONLY) => return,
        _ => Reason::SocketOption,
    };
    attach::bar(endpoint, reason);
}

/// After a setsockopt that succeeded.
pub(crate) fn after_set(endpoint: &Endpoint, fd: RawFd, level: c_int, name: c_int) {
    if level == libc::SOL_SOCKET && (name == libc::SO_RCVTIMEO || name == libc::SO_SNDTIMEO) {
        let cell = if name == libc::SO_RCVTIMEO { &endpoint.receive_timeout } else { &endpoint.send_timeout };
        cell.store(option(fd, name).map_or(0, nanos), Relaxed);
    }
}

/// ioctl on an endpoint: `Some` is the answer, errno set if it is -1.
///
/// # Safety
/// As ioctl.
pub(crate) unsafe fn ioctl(endpoint: &Endpoint, fd: RawFd, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's promise, here and below.
    let real = || unsafe { real::ioctl(fd, request, argument) };
    match request {
        libc::FIONBIO => {
            let result = real();
            if result == 0 {
                // SAFETY: the kernel has just read an int from there.
                let on = unsafe { argument.cast::<c_int>().read_unaligned() } != 0;
                endpoint.nonblocking.store(on.into(), Relaxed);
            }
            result
        }
        libc::FIONREAD => {
            let waiting = receive::available(endpoint, fd);
            let result = real();
            if result == 0 {
                // SAFETY: the kernel has just written an int there.
                unsafe {
                    let total = argument.cast::<c_int>().read_unaligned().saturating_add(waiting as c_int);
                    argument.cast::<c_int>().write_unaligned(total);
                }
            }
            result
        }
        libc::TIOCOUTQ | libc::FIOCLEX | libc::FIONCLEX => real(),
        libc::FIOASYNC => {
            attach::bar(endpoint, Reason::AsyncIo);
            real()
        }
        _ => {
            attach::bar(endpoint, Reason::Ioctl);
            real()
        }
    }
}

/// After an fcntl that succeeded on an endpoint; `before` one that must not meet a lane.
pub(crate) fn before_fcntl(endpoint: &Endpoint, command: c_int, argument: c_ulong) {
    let asynchronous = command == libc::F_SETFL && argument as c_int & libc::O_ASYNC != 0;
    if asynchronous || command == libc::F_SETOWN || command == F_SETSIG {
        attach::bar(endpoint, Reason::AsyncIo);
    }
}

/// Keeps the cached flag up to date.
pub(crate) fn after_fcntl(endpoint: &Endpoint, command: c_int, argument: c_ulong) {
    if command == libc::F_SETFL {
        endpoint.nonblocking.store((argument as c_int & libc::O_NONBLOCK != 0).into(), Relaxed);
    }
}
