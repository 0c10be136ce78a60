//! recvmsg, sendmsg and their kin.

use std::ffi::{c_int, c_uint};

use libc::{mmsghdr, msghdr, ssize_t, timespec};
use shunt_abi::reason::Reason;

use super::io::{pieces, receiving, sending, sink, source};
use crate::endpoint::Endpoint;
use crate::ops::{receive, send};
use crate::signal::{Held, Shield};
use crate::{attach, errno, real, signal, table};

/// See recvmsg(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::recvmsg(fd, message, flags) };
    if message.is_null() {
        return kernel();
    }
    // SAFETY: not null, and the program's promise.
    let Some(pieces) = (unsafe { pieces((*message).msg_iov, (*message).msg_iovlen) }) else {
        return kernel();
    };
    let ours = |endpoint| {
        let outcome = receive::receive(endpoint, fd, &mut sink(pieces), flags);
        if outcome.is_ok() {
            // SAFETY: as above.
            unsafe {
                (*message).msg_namelen = 0;
                (*message).msg_controllen = 0;
                (*message).msg_flags = 0;
            }
        }
        outcome
    };
    receiving(fd, ours, kernel)
}

/// See sendmsg(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::sendmsg(fd, message, flags) };
    // SAFETY: the program's promise, if it is not null.
    let Some(header) = (unsafe { message.as_ref() }) else { return kernel() };
    passes_on(header);
    // SAFETY: the program's promise.
    let Some(pieces) = (unsafe { pieces(header.msg_iov, header.msg_iovlen) }) else {
        return kernel();
    };
    let ours = |endpoint: &'static Endpoint| {
        if header.msg_controllen != 0 {
            attach::bar(endpoint, Reason::ControlData);
            let count = signal::open(Held::Nothing, kernel);
            return usize::try_from(count).map_err(|_| errno::get());
        }
        send::send(endpoint, fd, &mut source(pieces), flags)
    };
    sending(fd, ours, kernel)
}

/// A connection that is sent to another process goes back to TCP first.
fn passes_on(header: &msghdr) {
    if header.msg_controllen == 0 || header.msg_control.is_null() {
        return;
    }
    let _shield = Shield::raise();
    // SAFETY: the program's promise: a well-formed control buffer. The macros stay within its length.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(header);
        while !next.is_null() {
            let part = &*next;
            if part.cmsg_level == libc::SOL_SOCKET && part.cmsg_type == libc::SCM_RIGHTS {
                let count = (part.cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize) / 4;
                let fds: *const c_int = libc::CMSG_DATA(next).cast();
                for index in 0..count {
                    if let Some(endpoint) = table::endpoint(fds.add(index).read_unaligned()) {
                        attach::bar_reading(endpoint, Reason::PassedOn);
                    }
                }
            }
            next = libc::CMSG_NXTHDR(header, next);
        }
    }
}

/// See recvmmsg(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if let Some(endpoint) = table::endpoint(fd) {
        let _shield = Shield::raise();
        attach::bar_reading(endpoint, Reason::UnsupportedFlag);
    }
    // SAFETY: the program's own call.
    unsafe { real::recvmmsg(fd, messages, count, flags, timeout) }
}

/// See sendmmsg(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let ours = table::endpoint(fd).is_some_and(Endpoint::is_attached);
    if !ours || messages.is_null() {
        // SAFETY: the program's own call.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    for index in 0..count.min(1024) as usize {
        // SAFETY: the program's promise: `count` messages.
        let message = unsafe { &mut *messages.add(index) };
        let wanted = {
            let header = &message.msg_hdr;
            // SAFETY: the same.
            unsafe { pieces(header.msg_iov, header.msg_iovlen) }
                .map_or(0, |pieces| pieces.iter().map(|piece| piece.len).sum())
        };
        // SAFETY: the same.
        let sent = unsafe { sendmsg(fd, &message.msg_hdr, flags) };
        if sent < 0 {
            return if index > 0 { index as c_int } else { -1 };
        }
        message.msg_len = sent as c_uint;
        if (sent as usize) < wanted {
            return index as c_int + 1;
        }
    }
    count as c_int
}
