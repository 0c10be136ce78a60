//! Everything that moves bytes, but for messages.

use std::ffi::{c_int, c_uint, c_void};

use libc::{iovec, off_t, off64_t, size_t, sockaddr, socklen_t, ssize_t};
use shunt_abi::reason::Reason;
use shunt_ring::user::Piece;
use shunt_ring::{Sink, Source};

use crate::endpoint::Endpoint;
use crate::ops::{self, receive, send};
use crate::signal::{Held, Shield};
use crate::{attach, errno, kernel, real, signal, table};

/// The answer of an operation, as C wants it.
#[inline]
pub(super) fn answer(outcome: Result<usize, i32>) -> ssize_t {
    match outcome {
        Ok(count) => count as ssize_t,
        Err(errno) => {
            errno::set(errno);
            -1
        }
    }
}

/// A receive: the kernel's own while the endpoint is on TCP, counted as being inside the kernel (L4).
#[inline]
pub(super) fn receiving(
    fd: c_int,
    ours: impl FnOnce(&'static Endpoint) -> Result<usize, i32>,
    kernel: impl FnOnce() -> ssize_t,
) -> ssize_t {
    let Some(endpoint) = table::endpoint(fd) else { return kernel() };
    signal::point();
    let _shield = Shield::raise();
    ops::used(endpoint, fd);
    if endpoint.is_attached() || !endpoint.enter_receive() {
        return answer(ours(endpoint));
    }
    let result = signal::open(Held::Receive(endpoint), kernel);
    endpoint.leave_receive();
    if result > 0 {
        endpoint.count_received(result as usize);
    }
    result
}

/// A send, the same way.
#[inline]
pub(super) fn sending(
    fd: c_int,
    ours: impl FnOnce(&'static Endpoint) -> Result<usize, i32>,
    kernel: impl FnOnce() -> ssize_t,
) -> ssize_t {
    let Some(endpoint) = table::endpoint(fd) else { return kernel() };
    signal::point();
    let _shield = Shield::raise();
    ops::used(endpoint, fd);
    if endpoint.is_attached() || !endpoint.enter_send() {
        return answer(ours(endpoint));
    }
    let result = signal::open(Held::Send(endpoint), kernel);
    endpoint.leave_send();
    if result > 0 {
        endpoint.count_sent(result as usize);
    }
    result
}

#[inline]
fn piece(base: *const c_void, len: size_t) -> [Piece; 1] {
    [Piece { base: base.cast_mut().cast(), len: len.min(isize::MAX as usize) }]
}

/// The pieces of an iovec list, or `None` if the kernel must refuse it.
///
/// # Safety
/// `iov` points to `count` entries.
#[inline]
pub(super) unsafe fn pieces<'a>(iov: *const iovec, count: usize) -> Option<&'a [Piece]> {
    const IOV_MAX: usize = 1024;
    if iov.is_null() || count > IOV_MAX {
        return None;
    }
    // SAFETY: Piece has the layout of iovec; the rest is the caller's promise.
    Some(unsafe { std::slice::from_raw_parts(iov.cast(), count) })
}

#[inline]
pub(super) fn source<'a>(pieces: &'a [Piece]) -> Source<'a> {
    // SAFETY: the program promised the buffers of its call to be readable.
    unsafe { Source::new(pieces) }
}

#[inline]
pub(super) fn sink<'a>(pieces: &'a [Piece]) -> Sink<'a> {
    // SAFETY: the program promised the buffers of its call to be writable.
    unsafe { Sink::new(pieces) }
}

/// See read(2).
///
/// # Safety
/// As in C; so for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::read(fd, buf, len) };
    if len == 0 {
        // Unlike recv it waits for nothing.
        return kernel();
    }
    receiving(fd, |endpoint| receive::receive(endpoint, fd, &mut sink(&piece(buf, len)), 0), kernel)
}

/// See write(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::write(fd, buf, len) };
    sending(fd, |endpoint| send::send(endpoint, fd, &mut source(&piece(buf, len)), 0), kernel)
}

/// See readv(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::readv(fd, iov, count) };
    // SAFETY: the program's promise.
    match unsafe { pieces(iov, count as usize) } {
        Some(pieces) if pieces.iter().all(|piece| piece.len == 0) => kernel(),
        Some(pieces) => {
            receiving(fd, |endpoint| receive::receive(endpoint, fd, &mut sink(pieces), 0), kernel)
        }
        None => kernel(),
    }
}

/// See writev(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::writev(fd, iov, count) };
    // SAFETY: the program's promise.
    match unsafe { pieces(iov, count as usize) } {
        // Unlike sendmsg it does not come as far as the socket.
        Some(pieces) if pieces.iter().all(|piece| piece.len == 0) => kernel(),
        Some(pieces) => sending(fd, |endpoint| send::send(endpoint, fd, &mut source(pieces), 0), kernel),
        None => kernel(),
    }
}

/// preadv2 and pwritev2 at offset -1 are readv and writev; sockets know no other offset.
macro_rules! at_current_offset {
    ($($name:ident, $real:ident, $plain:ident;)*) => { $(
        /// See preadv2(2).
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t {
            // SAFETY: the program's own call.
            unsafe {
                match table::endpoint(fd) {
                    Some(_) if offset == -1 && flags == 0 => $plain(fd, iov, count),
                    Some(endpoint) if offset == -1 => {
                        let _shield = Shield::raise();
                        attach::bar_reading(endpoint, Reason::UnsupportedFlag);
                        signal::open(Held::Nothing, || real::$real(fd, iov, count, offset, flags))
                    }
                    _ => real::$real(fd, iov, count, offset, flags),
                }
            }
        }
    )* };
}

at_current_offset! {
    preadv2, preadv2, readv;
    preadv64v2, preadv2, readv;
    pwritev2, pwritev2, writev;
    pwritev64v2, pwritev2, writev;
}

/// See recv(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::recv(fd, buf, len, flags) };
    receiving(fd, |endpoint| receive::receive(endpoint, fd, &mut sink(&piece(buf, len)), flags), kernel)
}

/// See send(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::send(fd, buf, len, flags) };
    sending(fd, |endpoint| send::send(endpoint, fd, &mut source(&piece(buf, len)), flags), kernel)
}

/// See recvfrom(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    fromlen: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::recvfrom(fd, buf, len, flags, from, fromlen) };
    let ours = |endpoint| {
        let outcome = receive::receive(endpoint, fd, &mut sink(&piece(buf, len)), flags);
        if outcome.is_ok() && !from.is_null() && !fromlen.is_null() {
            // TCP names no sender.
            // SAFETY: the program's promise.
            unsafe { *fromlen = 0 };
        }
        outcome
    };
    receiving(fd, ours, kernel)
}

/// See sendto(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    tolen: socklen_t,
) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::sendto(fd, buf, len, flags, to, tolen) };
    if flags & libc::MSG_FASTOPEN != 0 && table::look_up(fd) == table::Entry::Unconnected {
        // It connects as well; such a socket stays unknown.
        table::replace(fd, table::Entry::None);
        return kernel();
    }
    // A connected TCP socket ignores the address.
    sending(fd, |endpoint| send::send(endpoint, fd, &mut source(&piece(buf, len)), flags), kernel)
}

/// Where a sendfile begins to read: at the offset that the program gave, else at the file's own.
fn start_of(file: c_int, offset: *const off64_t) -> Result<off64_t, rustix::io::Errno> {
    // SAFETY: null, or the program's promise.
    match unsafe { offset.as_ref() } {
        Some(offset) => Ok(*offset),
        None => rustix::fs::tell(crate::private::borrow(file)).map(|at| at as off64_t),
    }
}

/// See sendfile(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile64(
    out: c_int,
    from: c_int,
    offset: *mut off64_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::sendfile64(out, from, offset, count) };
    if let Some(endpoint) = table::endpoint(from) {
        let _shield = Shield::raise();
        attach::bar_reading(endpoint, Reason::Splice);
    }
    let ours = |endpoint: &'static Endpoint| {
        // A quarter of the ring may have been read when the lane turns out to have ended, so the file's offset moves
        // only when all is done.
        let begin = match start_of(from, offset) {
            Ok(begin) => begin,
            Err(_) => {
                attach::bar_reading(endpoint, Reason::Splice);
                let result = signal::open(Held::Nothing, kernel);
                return usize::try_from(result).map_err(|_| errno::get());
            }
        };
        let read_file = |to: *mut u8, len: usize, moved: usize| {
            // SAFETY: `to` has room for `len` bytes in the ring.
            unsafe { kernel::read_at(from, to, len, begin + moved as off64_t) }
        };
        match send::send_file(endpoint, out, count, read_file)? {
            send::FileStep::Moved(count) => {
                let end = begin + count as off64_t;
                // SAFETY: the offset is the program's, and was read before.
                match unsafe { offset.as_mut() } {
                    Some(offset) => *offset = end,
                    None => drop(rustix::fs::seek(
                        crate::private::borrow(from),
                        rustix::fs::SeekFrom::Start(end as u64),
                    )),
                }
                Ok(count)
            }
            send::FileStep::UseTcp => {
                // Bytes below go to TCP, so the lane must not be begun behind their back.
                endpoint.enter_send_locked();
                let result = signal::open(Held::Send(endpoint), kernel);
                endpoint.leave_send();
                usize::try_from(result).map_err(|_| errno::get())
            }
        }
    };
    sending(out, ours, kernel)
}

/// See sendfile(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sendfile(
    out: c_int,
    from: c_int,
    offset: *mut off64_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: off_t has 64 bits here.
    unsafe { sendfile64(out, from, offset, count) }
}

/// See splice(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_offset: *mut off64_t,
    to: c_int,
    to_offset: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    if let Some(endpoint) = table::endpoint(to) {
        let _shield = Shield::raise();
        attach::bar(endpoint, Reason::Splice);
    }
    if let Some(endpoint) = table::endpoint(from) {
        let _shield = Shield::raise();
        attach::bar_reading(endpoint, Reason::Splice);
        if receive::available(endpoint, from) > 0 {
            // The sender has finished, so these could not be given back.
            return answer(receive::move_to_pipe(endpoint, from, to, len));
        }
    }
    // SAFETY: the program's own call.
    unsafe { real::splice(from, from_offset, to, to_offset, len, flags) }
}

/// glibc's checked variants, which programs built with _FORTIFY_SOURCE call.
mod checked {
    use super::*;

    unsafe extern "C" {
        fn __chk_fail() -> !;
    }

    fn check(len: size_t, room: size_t) {
        if len > room {
            // SAFETY: reports the overflow and ends the program, as the checked function would.
            unsafe { __chk_fail() }
        }
    }

    /// See read(2).
    ///
    /// # Safety
    /// As in C.
    #[unsafe(no_mangle)]
    pub unsafe extern "C-unwind" fn __read_chk(
        fd: c_int,
        buf: *mut c_void,
        len: size_t,
        room: size_t,
    ) -> ssize_t {
        check(len, room);
        // SAFETY: the program's own call.
        unsafe { read(fd, buf, len) }
    }

    /// See recv(2).
    ///
    /// # Safety
    /// As in C.
    #[unsafe(no_mangle)]
    pub unsafe extern "C-unwind" fn __recv_chk(
        fd: c_int,
        buf: *mut c_void,
        len: size_t,
        room: size_t,
        flags: c_int,
    ) -> ssize_t {
        check(len, room);
        // SAFETY: the program's own call.
        unsafe { recv(fd, buf, len, flags) }
    }

    /// See recvfrom(2).
    ///
    /// # Safety
    /// As in C.
    #[unsafe(no_mangle)]
    pub unsafe extern "C-unwind" fn __recvfrom_chk(
        fd: c_int,
        buf: *mut c_void,
        len: size_t,
        room: size_t,
        flags: c_int,
        from: *mut sockaddr,
        fromlen: *mut socklen_t,
    ) -> ssize_t {
        check(len, room);
        // SAFETY: the program's own call.
        unsafe { recvfrom(fd, buf, len, flags, from, fromlen) }
    }
}
