//! socket, connect, accept, shutdown, getpeername, and socket options.

use std::ffi::{c_int, c_void};

use libc::{sockaddr, socklen_t};
use shunt_abi::reason::Reason;

use crate::base::signal::Shield;
use crate::base::table::{self, Entry};
use crate::base::{errno, order, process, real};
use crate::epoll;
use crate::life::returning::Rest;
use crate::life::{attach, resets};
use crate::ops::options::Setting;
use crate::ops::{descriptors, options};
use crate::socket::endpoint;

/// See socket(2).
///
/// # Safety
/// As in C. That holds for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the program's own call.
    let fd = unsafe { real::socket(domain, kind, protocol) };
    let stream = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == libc::SOCK_STREAM;
    let tcp = matches!(domain, libc::AF_INET | libc::AF_INET6) && matches!(protocol, 0 | libc::IPPROTO_TCP);
    if fd >= 0 && stream && tcp && !process::is_off() {
        descriptors::made(fd);
    }
    fd
}

/// See connect(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    let entry = table::look_up(fd);
    if let Entry::Endpoint(name) = entry
        && let Some(endpoint) = name.resolve()
        && endpoint.is_attached()
    {
        let _shield = Shield::raise();
        attach::bar(endpoint, Reason::Disconnected);
    }
    // SAFETY: the program's own call.
    let result = unsafe { real::connect(fd, address, len) };
    let begun = result == 0 || matches!(errno::get(), libc::EINPROGRESS | libc::EINTR);
    // Another thread may have closed the descriptor meanwhile, and its number may belong to a
    // connection now.
    let is_it = |entry| matches!(entry, Entry::Unconnected(_));
    if is_it(entry) && begun && is_it(table::look_up(fd)) && table::is_home() {
        descriptors::connected(fd, result == 0);
    }
    result
}

/// See accept(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let listener = table::look_up(fd);
    // SAFETY: the program's own call.
    let new = unsafe { real::accept(fd, address, len) };
    descriptors::accepted(listener, fd, new, false);
    new
}

/// See accept4(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let listener = table::look_up(fd);
    // SAFETY: the program's own call.
    let new = unsafe { real::accept4(fd, address, len, flags) };
    descriptors::accepted(listener, fd, new, flags & libc::SOCK_NONBLOCK != 0);
    new
}

/// See shutdown(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let endpoint = endpoint::behind(fd);
    let _shield = Shield::raise();
    let rest = endpoint.map_or(Rest::Sent, |endpoint| {
        resets::notice_reset(endpoint, fd);
        attach::before_shutdown(endpoint, how)
    });
    let result = match (rest, how) {
        // The broker does this once it has sent the rest.
        (Rest::Handed, libc::SHUT_WR) => 0,
        // SAFETY: as the program's own call.
        (Rest::Handed, libc::SHUT_RDWR) => unsafe { real::shutdown(fd, libc::SHUT_RD) },
        // SAFETY: the program's own call.
        _ => unsafe { real::shutdown(fd, how) },
    };
    if let Some(endpoint) = endpoint {
        attach::after_shutdown(endpoint);
        order::note_by_tcp();
        endpoint.rx.lock().rx.note_tcp_news();
        // From now on TCP reports again whether the socket is writable.
        epoll::refresh(endpoint);
        // TCP notifies all waiters of a shutdown, which is an edge to epoll.
        epoll::tell_again(endpoint, epoll::IN);
    }
    result
}

/// See getpeername(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    if let Some(endpoint) = endpoint::behind(fd) {
        let _shield = Shield::raise();
        resets::notice_reset(endpoint, fd);
    }
    // SAFETY: the program's own call.
    unsafe { real::getpeername(fd, address, len) }
}

/// See getsockopt(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let unseen = || options::behind_unseen_duplicate(fd, (level, name));
    match endpoint::behind(fd).or_else(unseen) {
        // SAFETY: the program's own call.
        Some(endpoint) => unsafe {
            let _shield = Shield::raise();
            options::get(endpoint, fd, (level, name), value, len)
        },
        // SAFETY: the program's own call.
        None => unsafe { real::getsockopt(fd, level, name, value, len) },
    }
}

/// See setsockopt(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let endpoint = endpoint::behind(fd);
    let _shield = Shield::raise();
    if let Some(endpoint) = endpoint {
        options::before_set(endpoint, level, name, Setting::new(value, len));
    }
    // SAFETY: the program's own call.
    let result = unsafe { real::setsockopt(fd, level, name, value, len) };
    if let Some(endpoint) = endpoint {
        options::after_set(endpoint, fd, level, name, result == 0);
    }
    result
}
