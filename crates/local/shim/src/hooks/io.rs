//! The hooks that move bytes between a socket and the program's memory, except those for messages.
//!
//! A call with one buffer on an attached connection takes the fast path
//! ([`receive_fast`], [`send_fast`]). All others take the way in [`data_call`](super::data_call).

use std::ffi::{c_int, c_void};
use std::hint::cold_path;

use libc::{iovec, off_t, size_t, sockaddr, socklen_t, ssize_t};
use shunt_ring::user::Piece;
use shunt_sys::memory;

use super::data_call::{
    Calls, Direction, Receiving, Sending, by_kernel, is_unsettled, moving, moving_unsettled, piece, pieces,
    unsettled,
};
use crate::base::signal::{self, Shield};
use crate::base::{clib, process, real, table};
use crate::ops::{self, descriptors, receive, receive_fast, send, send_fast};
use crate::socket::endpoint::{self, Endpoint};

/// Begins a call on the fast path, if its connection is [eligible](endpoint::at_once). A call that
/// does not complete there [begins](super::data_call::begin) again on the slow path.
#[inline(always)]
fn begin_at_once(fd: c_int) -> Option<(&'static Endpoint, signal::Brief)> {
    let endpoint = endpoint::at_once(fd)?;
    if !process::is_gate_open() {
        return None;
    }
    Some((endpoint, signal::Brief::raise()?))
}

/// Receives into one buffer on the fast path. All but the most common cases take the slow path.
#[inline(always)]
fn receive_at_once(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    slowly: ops::Slowly<*mut c_void>,
) -> ssize_t {
    if flags & !receive_fast::PLAIN != 0 {
        cold_path();
        return slowly(fd, buf, len, flags);
    }
    if !memory::ends_as_of_user(buf.addr(), len) {
        cold_path();
        return slowly(fd, buf, len, flags);
    }
    let Some((endpoint, shield)) = begin_at_once(fd) else { return slowly(fd, buf, len, flags) };
    receive_fast::receive_few(endpoint, shield, fd, Piece { base: buf.cast(), len }, flags, slowly)
}

/// The slow path of a call with one buffer, for an endpoint that may have a lane.
type Unsettled<P> =
    fn(&'static Endpoint, c_int, (P, size_t, Calls), c_int, &dyn Fn(c_int) -> ssize_t) -> ssize_t;

/// Makes a call with one buffer on the slow path.
#[inline(always)]
fn one_slowly<D: Direction, P>(
    fd: c_int,
    piece: (P, size_t, Calls),
    flags: c_int,
    kernel: impl Fn(c_int) -> ssize_t,
    ours: Unsettled<P>,
) -> ssize_t {
    match unsettled::<D>(fd, || kernel(fd)) {
        Ok(endpoint) => ours(endpoint, fd, piece, flags, &kernel),
        Err(result) => result,
    }
}

#[inline(never)]
fn receive_unsettled(
    endpoint: &'static Endpoint,
    fd: c_int,
    (buf, len, of): (*mut c_void, size_t, Calls),
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> ssize_t {
    let ours = |endpoint| match piece(buf, len, of) {
        Some(piece) => receive::receive_all(endpoint, fd, &piece, flags, kernel),
        None => by_kernel(|| kernel(fd)),
    };
    moving_unsettled::<Receiving>(endpoint, fd, flags, ours, || kernel(fd))
}

/// Sends one buffer on the fast path. All but the most common cases take the slow path.
#[inline(always)]
fn send_at_once(
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    slowly: ops::Slowly<*const c_void>,
) -> ssize_t {
    if flags & !send::UNDERSTOOD != 0 {
        cold_path();
        return slowly(fd, buf, len, flags);
    }
    let Some((endpoint, shield)) = begin_at_once(fd) else { return slowly(fd, buf, len, flags) };
    send_fast::send_few(endpoint, shield, fd, Piece { base: buf.cast_mut().cast(), len }, flags, slowly)
}

#[inline(never)]
fn send_unsettled(
    endpoint: &'static Endpoint,
    fd: c_int,
    (buf, len, of): (*const c_void, size_t, Calls),
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> ssize_t {
    let ours = |endpoint| match piece(buf, len, of) {
        Some(piece) => send::send_all(endpoint, fd, &piece, flags, kernel),
        None => by_kernel(|| kernel(fd)),
    };
    moving_unsettled::<Sending>(endpoint, fd, flags, ours, || kernel(fd))
}

/// See read(2).
///
/// # Safety
/// As in C. That holds for every hook.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    receive_at_once(fd, buf, len, 0, read_slowly)
}

#[inline(never)]
fn read_slowly(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = move |fd| unsafe { real::read(fd, buf, len) };
    if len == 0 {
        // Unlike recv, an empty read does not wait.
        return kernel(fd);
    }
    one_slowly::<Receiving, _>(fd, (buf, len, Calls::Files), flags, kernel, receive_unsettled)
}

/// See write(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    send_at_once(fd, buf, len, 0, write_slowly)
}

#[inline(never)]
fn write_slowly(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = move |fd| unsafe { real::write(fd, buf, len) };
    one_slowly::<Sending, _>(fd, (buf, len, Calls::Files), flags, kernel, send_unsettled)
}

/// Implements readv. `flags` are those of recv, translated from the flags of preadv2.
unsafe fn read_list(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> ssize_t {
    // SAFETY: the program's list.
    let ours = |endpoint| match unsafe { pieces(iov, count as usize) } {
        Some(pieces) if pieces.iter().any(|piece| piece.len > 0) => {
            receive::receive(endpoint, fd, pieces, flags, kernel)
        }
        _ => by_kernel(|| kernel(fd)),
    };
    moving::<Receiving>(fd, 0, ours, || kernel(fd))
}

/// Implements writev. `flags` are those of send.
unsafe fn write_list(
    fd: c_int,
    iov: *const iovec,
    count: c_int,
    flags: c_int,
    kernel: &dyn Fn(c_int) -> ssize_t,
) -> ssize_t {
    // SAFETY: the program's list.
    let ours = |endpoint| match unsafe { pieces(iov, count as usize) } {
        // An empty writev does not reach the socket, unlike an empty sendmsg.
        Some(pieces) if pieces.iter().any(|piece| piece.len > 0) => {
            send::send(endpoint, fd, pieces, flags, kernel)
        }
        _ => by_kernel(|| kernel(fd)),
    };
    moving::<Sending>(fd, 0, ours, || kernel(fd))
}

/// See readv(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    unsafe { read_list(fd, iov, count, 0, &|fd| real::readv(fd, iov, count)) }
}

/// See writev(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    unsafe { write_list(fd, iov, count, 0, &|fd| real::writev(fd, iov, count)) }
}

/// The only flag of preadv2 and pwritev2 with an effect on a socket.
const RWF_NOWAIT: c_int = 8;
const RWF_KNOWN: c_int = 0x3f;

/// Defines preadv2 and pwritev2. At offset -1 they are readv and writev, and the kernel accepts no
/// other offset for a socket.
macro_rules! at_current_offset {
    ($($name:ident, $real:ident, $plain:ident;)*) => { $(
        /// See preadv2(2).
        ///
        /// # Safety
        /// As in C.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t {
            // SAFETY: the program's own call.
            let kernel = |fd| unsafe { real::$real(fd, iov, count, offset, flags) };
            if offset != -1 || flags & !RWF_KNOWN != 0 {
                return kernel(fd);
            }
            let socket_flags = if flags & RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 };
            // SAFETY: the program's own call.
            unsafe { $plain(fd, iov, count, socket_flags, &kernel) }
        }
    )* };
}

at_current_offset! {
    preadv2, preadv2, read_list;
    preadv64v2, preadv2, read_list;
    pwritev2, pwritev2, write_list;
    pwritev64v2, pwritev2, write_list;
}

/// See recv(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    receive_at_once(fd, buf, len, flags, recv_slowly)
}

#[inline(never)]
fn recv_slowly(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = move |fd| unsafe { real::recv(fd, buf, len, flags) };
    one_slowly::<Receiving, _>(fd, (buf, len, Calls::Sockets), flags, kernel, receive_unsettled)
}

/// See send(2).
///
/// # Safety
/// As in C.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    send_at_once(fd, buf, len, flags, send_slowly)
}

#[inline(never)]
fn send_slowly(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t {
    // SAFETY: the program's own call.
    let kernel = move |fd| unsafe { real::send(fd, buf, len, flags) };
    one_slowly::<Sending, _>(fd, (buf, len, Calls::Sockets), flags, kernel, send_unsettled)
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
    let kernel = |fd| unsafe { real::recvfrom(fd, buf, len, flags, from, fromlen) };
    // Read before the kernel overwrites it.
    let is_asked = !from.is_null() && is_unsettled(fd);
    // SAFETY: the program's pointer to an integer.
    let room = is_asked.then(|| unsafe { memory::read(fromlen) }).flatten();
    let ours = |endpoint| {
        let Some(piece) = piece(buf, len, Calls::Sockets) else { return by_kernel(|| kernel(fd)) };
        let taken = receive::receive_named(endpoint, fd, &piece, flags, &kernel);
        if let (Err(_), Some(room)) = (&taken, room) {
            // The kernel may have stored a length at the end of the stream. With an error, TCP
            // leaves it unchanged, so the old value is restored.
            // SAFETY: the program passed this address for a length.
            unsafe { memory::write(fromlen, room) };
        }
        let taken = taken?;
        if !taken.by_kernel && !from.is_null() {
            name_no_sender(fromlen)?;
        }
        Ok(taken.count)
    };
    moving::<Receiving>(fd, flags, ours, || kernel(fd))
}

/// Stores the length 0, because TCP reports no sender's address. If that fails, the received bytes
/// are lost, as in the kernel.
pub(super) fn name_no_sender(len: *mut socklen_t) -> Result<(), i32> {
    // SAFETY: the program's pointer to an integer.
    if (unsafe { memory::read(len) }.ok_or(libc::EFAULT)? as c_int) < 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: the program passed this address for a length.
    if unsafe { memory::write(len, 0) } { Ok(()) } else { Err(libc::EFAULT) }
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
    let kernel = |fd| unsafe { real::sendto(fd, buf, len, flags, to, tolen) };
    if flags & libc::MSG_FASTOPEN != 0 && matches!(table::look_up(fd), table::Entry::Unconnected(_)) {
        // The call also connects the socket. Such a socket stays unknown to the shim.
        let _shield = Shield::raise();
        descriptors::forget_unconnected(fd);
        return kernel(fd);
    }
    let ours = |endpoint| match piece(buf, len, Calls::Sockets) {
        Some(piece) if is_ignored(to, tolen) => send::send(endpoint, fd, &piece, flags, &kernel),
        _ => by_kernel(|| kernel(fd)),
    };
    moving::<Sending>(fd, flags, ours, || kernel(fd))
}

/// Returns whether a connected TCP socket ignores this address. The kernel copies the address
/// before it ignores it.
pub(super) fn is_ignored(to: *const sockaddr, len: socklen_t) -> bool {
    let len = len as usize;
    to.is_null() || len <= size_of::<libc::sockaddr_storage>() && memory::is_readable(to.cast(), len)
}

/// glibc's checked variants, which programs built with _FORTIFY_SOURCE call.
mod checked {
    use super::*;

    fn check(len: size_t, room: size_t) {
        if len > room {
            clib::overflow()
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
