//! The hooks that move bytes, except those for messages.

use std::ffi::{c_int, c_uint, c_void};
use std::hint::cold_path;

use libc::{iovec, off_t, off64_t, size_t, sockaddr, socklen_t, ssize_t};
use shunt_abi::reason::Reason;
use shunt_ring::user::Piece;
use shunt_sys::memory::{self, most_at_once};

use crate::base::signal::{self, Shield};
use crate::base::undo_log::Held;
use crate::base::{clib, errno, kernel, order, process, real, table};
use crate::broker::control;
use crate::life::{attach, resets};
use crate::ops::send_file::FileStep;
use crate::ops::socket_reference::SocketReference;
use crate::ops::{self, descriptors, files, pipe, receive, receive_fast, send, send_fast, send_file, undo};
use crate::socket::endpoint::{self, Endpoint};
use crate::socket::sharing;

/// Returns the result of an operation in the form of C: a count, or -1 and errno.
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

/// The direction of a data call: how it is announced (L4) and counted.
pub(super) trait Direction {
    fn enter(endpoint: &Endpoint) -> bool;
    fn leave(endpoint: &Endpoint);
    fn held(endpoint: &'static Endpoint) -> Held;
    fn count(endpoint: &Endpoint, bytes: usize);
    /// Measures latencies before a call, if someone asks: see [`shunt_abi::latency`].
    fn measure_before(endpoint: &Endpoint);
    /// Measures them after a call that has moved bytes.
    fn measure_after(endpoint: &Endpoint);
    /// Records that the kernel has made such a call on a socket that is not an endpoint.
    fn has_passed(fd: c_int);
}

pub(super) struct Receiving;

impl Direction for Receiving {
    #[inline]
    fn enter(endpoint: &Endpoint) -> bool {
        endpoint.enter_receive()
    }

    #[inline]
    fn leave(endpoint: &Endpoint) {
        endpoint.leave_receive();
    }

    #[inline]
    fn held(endpoint: &'static Endpoint) -> Held {
        undo::receive(endpoint)
    }

    #[inline]
    fn count(endpoint: &Endpoint, bytes: usize) {
        endpoint.count_received(bytes);
    }

    #[inline(always)]
    fn measure_before(_: &Endpoint) {}

    #[inline(always)]
    fn measure_after(endpoint: &Endpoint) {
        if process::may_latency_be_wanted() {
            endpoint.note_answer();
        }
    }

    #[inline]
    fn has_passed(_: c_int) {}
}

pub(super) struct Sending;

impl Direction for Sending {
    #[inline]
    fn enter(endpoint: &Endpoint) -> bool {
        endpoint.enter_send()
    }

    #[inline]
    fn leave(endpoint: &Endpoint) {
        endpoint.leave_send();
    }

    #[inline]
    fn held(endpoint: &'static Endpoint) -> Held {
        undo::send(endpoint)
    }

    #[inline]
    fn count(endpoint: &Endpoint, bytes: usize) {
        endpoint.count_sent(bytes);
    }

    #[inline(always)]
    fn measure_before(endpoint: &Endpoint) {
        if process::may_latency_be_wanted() {
            endpoint.note_request();
        }
    }

    #[inline(always)]
    fn measure_after(_: &Endpoint) {}

    /// The socket may have been connected meanwhile by another descriptor.
    #[inline]
    fn has_passed(fd: c_int) {
        if matches!(table::look_up(fd), table::Entry::Unconnected(_)) {
            order::note_by_tcp();
        }
    }
}

/// Makes a data call. While the endpoint is on TCP, it is the kernel's call, counted as a call in
/// progress in the kernel (L4). Otherwise `ours` handles it.
#[inline]
pub(super) fn moving<D: Direction>(
    fd: c_int,
    flags: c_int,
    ours: impl FnOnce(&'static Endpoint) -> Result<usize, i32>,
    kernel: impl Fn() -> ssize_t,
) -> ssize_t {
    match unsettled::<D>(fd, &kernel) {
        Ok(endpoint) => moving_unsettled::<D>(endpoint, fd, flags, ours, kernel),
        Err(result) => result,
    }
}

/// Returns the endpoint behind `fd` if a lane may be concerned. Otherwise makes the kernel's call
/// and returns its result as `Err`.
#[inline(always)]
fn unsettled<D: Direction>(fd: c_int, kernel: impl Fn() -> ssize_t) -> Result<&'static Endpoint, ssize_t> {
    let Some(endpoint) = endpoint::behind(fd) else {
        let result = kernel();
        D::has_passed(fd);
        return Err(result);
    };
    if !endpoint.is_settled() {
        return Ok(endpoint);
    }
    if control::may_have_messages() {
        take_messages();
    }
    D::measure_before(endpoint);
    let result = kernel();
    if result > 0 {
        D::count(endpoint, result as usize);
        D::measure_after(endpoint);
    }
    Err(result)
}

/// Takes messages of the broker, of which one may reopen a settled endpoint. Its process may make
/// no other calls that take them.
#[cold]
#[inline(never)]
fn take_messages() {
    let _shield = Shield::raise();
    control::poll_inbox();
}

#[inline]
fn moving_unsettled<D: Direction>(
    endpoint: &'static Endpoint,
    fd: c_int,
    flags: c_int,
    ours: impl FnOnce(&'static Endpoint) -> Result<usize, i32>,
    kernel: impl Fn() -> ssize_t,
) -> ssize_t {
    let bytes = |result: &ssize_t| usize::try_from(*result).unwrap_or(0);
    let _shield = begin(endpoint, fd, flags);
    // End of file, in a call that began to wait before bytes went to a lane. The lane may still
    // have unread bytes.
    let is_lost = |result| result == 0 && endpoint.is_attached() && resets::reset_if_lost(endpoint, fd);
    D::measure_before(endpoint);
    let result = match by_tcp::<D, _>(endpoint, kernel, bytes).filter(|result| !is_lost(*result)) {
        None => answer_of(endpoint, ours(endpoint)),
        Some(-1) => answer_of(endpoint, Err(errno::get())),
        Some(result) => result,
    };
    if result > 0 && flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) == 0 {
        D::measure_after(endpoint);
    }
    result
}

/// Returns the result of an operation, and records that the program has seen a reset if it is
/// ECONNRESET.
#[inline]
fn answer_of(endpoint: &Endpoint, outcome: Result<usize, i32>) -> ssize_t {
    if outcome == Err(libc::ECONNRESET) {
        resets::reset_is_told(endpoint);
    }
    answer(outcome)
}

/// Begins a data call on an endpoint that is on a lane, or may be moved to one.
#[inline(always)]
pub(super) fn begin(endpoint: &'static Endpoint, fd: c_int, flags: c_int) -> Shield {
    signal::point();
    let shield = Shield::raise();
    note_urgent(endpoint, flags);
    ops::used(endpoint, fd);
    shield
}

/// Makes the kernel's call, and counts it as a call in progress until its bytes are counted.
/// Returns `None` if the endpoint is not on TCP alone.
#[inline]
pub(super) fn by_tcp<D: Direction, R>(
    endpoint: &'static Endpoint,
    kernel: impl FnOnce() -> R,
    bytes: impl FnOnce(&R) -> usize,
) -> Option<R> {
    if endpoint.is_attached() || !D::enter(endpoint) {
        return None;
    }
    let result = signal::open(D::held(endpoint), kernel);
    match bytes(&result) {
        0 => {}
        bytes => D::count(endpoint, bytes),
    }
    D::leave(endpoint);
    Some(result)
}

/// Bars a connection with urgent data, which is not part of the stream, from shared memory. That
/// holds also if the urgent data came before the connection could be offered.
#[inline]
fn note_urgent(endpoint: &Endpoint, flags: c_int) {
    if flags & libc::MSG_OOB != 0 {
        attach::bar(endpoint, Reason::OutOfBand);
        // The kernel does not report to the other holders of the socket that one of them has read
        // an urgent byte, although the byte still affects its counts.
        sharing::note_change(endpoint);
    }
}

/// Makes a call that the kernel refuses, or that does not concern the stream.
pub(super) fn by_kernel(kernel: impl FnOnce() -> ssize_t) -> Result<usize, i32> {
    usize::try_from(signal::open(Held::NOTHING, kernel)).map_err(|_| errno::get())
}

/// Returns the piece of a call with one buffer, or `None` if the kernel must refuse it. For file
/// calls, the kernel checks the whole length against the address space. For socket calls, it first
/// reduces the length to the most that one call can move.
#[inline]
fn piece(base: *const c_void, len: size_t, of: Calls) -> Option<[Piece; 1]> {
    let most = len.min(most_at_once());
    let checked = if of == Calls::Files { len } else { most };
    memory::is_of_user(base as usize, checked).then(|| [Piece { base: base.cast_mut().cast(), len: most }])
}

/// The family of a call, which determines how the kernel checks its buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Calls {
    /// read and write.
    Files,
    /// recv, send and their variants.
    Sockets,
}

/// Returns the pieces of an iovec list, or `None` if the kernel must refuse it.
///
/// # Safety
/// As readv: `iov` points to `count` entries, or is a bad address, or the count is too large.
#[inline]
pub(super) unsafe fn pieces<'a>(iov: *const iovec, count: usize) -> Option<&'a [Piece]> {
    const IOV_MAX: usize = 1024;
    if count == 0 {
        return Some(&[]);
    }
    if count > IOV_MAX || !memory::is_readable(iov.cast(), count * size_of::<iovec>()) {
        return None;
    }
    // SAFETY: the list is readable, and Piece has the layout of iovec.
    let pieces: &[Piece] = unsafe { std::slice::from_raw_parts(iov.cast(), count) };
    // A single piece may be longer than the address space. The kernel uses only as much as one call
    // can move.
    let is_single = count == 1 && pieces[0].len <= isize::MAX as usize;
    let counted = |piece: &Piece| if is_single { piece.len.min(most_at_once()) } else { piece.len };
    pieces.iter().all(|piece| memory::is_of_user(piece.base as usize, counted(piece))).then_some(pieces)
}

/// Begins a call on the fast path, if its connection is [eligible](endpoint::at_once). A call that
/// does not complete there [begins](begin) again on the slow path.
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

/// Returns whether `fd` is an endpoint that may have a lane.
pub(super) fn is_unsettled(fd: c_int) -> bool {
    endpoint::behind(fd).is_some_and(|endpoint| !endpoint.is_settled())
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

/// Returns whether a length is negative as a signed number. The kernel refuses those.
fn is_negative(len: size_t) -> bool {
    len > isize::MAX as usize
}

/// Returns whether writes to `out` append (O_APPEND), which sendfile refuses.
fn is_appended_to(out: c_int) -> bool {
    rustix::fs::fcntl_getfl(crate::base::private::borrow(out))
        .is_ok_and(|flags| flags.contains(rustix::fs::OFlags::APPEND))
}

/// Returns where sendfile begins to read: at the program's offset if there is one, else at the
/// file's own.
fn start_of(file: c_int, offset: *const off64_t) -> Result<off64_t, i32> {
    if offset.is_null() {
        return rustix::fs::tell(crate::base::private::borrow(file))
            .map(|at| at as off64_t)
            .map_err(|errno| errno.raw_os_error());
    }
    // SAFETY: the program's pointer to an integer.
    unsafe { memory::read(offset) }.ok_or(libc::EFAULT)
}

/// Stores the new offset, in the program's variable or the file.
fn advance(file: c_int, offset: *mut off64_t, to: off64_t) -> Result<(), i32> {
    if offset.is_null() {
        let _ = rustix::fs::seek(crate::base::private::borrow(file), rustix::fs::SeekFrom::Start(to as u64));
        return Ok(());
    }
    // SAFETY: the program passed this address for the offset.
    if unsafe { memory::write(offset, to) } { Ok(()) } else { Err(libc::EFAULT) }
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
    // SAFETY: the program's own call, less the bytes that have been sent.
    let rest = |out, done| unsafe { real::sendfile64(out, from, offset, count - done) };
    let kernel = |out| rest(out, 0);
    let ours = |endpoint: &'static Endpoint| {
        // The kernel refuses a descriptor that cannot be read at an offset, such as a pipe or a
        // socket.
        let begin = match start_of(from, offset) {
            Ok(begin) if count > 0 && !is_negative(count) && !is_appended_to(out) => begin,
            _ => return by_kernel(|| kernel(out)),
        };
        match files::kind_of(from, begin) {
            files::Kind::Ordinary => {}
            files::Kind::Refused => return by_kernel(|| kernel(out)),
            files::Kind::Special => attach::bar(endpoint, Reason::SpecialFile),
        }
        let hold = SocketReference::new(endpoint, out);
        let read_file = |to: *mut u8, len: usize, moved: usize| {
            // SAFETY: `to` has room for `len` bytes in the ring.
            unsafe { kernel::read_at(from, to, len, begin.saturating_add(moved as off64_t)) }
        };
        let step = send_file::send_file(&hold, endpoint, count.min(most_at_once()), read_file);
        let outcome = match step {
            // A file that cannot be read in this way cannot be sent either. sendfile has another
            // errno for it.
            Err(libc::EISDIR) => by_kernel(|| kernel(out)),
            Err(errno) => Err(errno),
            Ok(FileStep::Moved(count)) => {
                // A quarter of the ring may have been read from the file when the lane turns out to
                // have ended. So the file's offset moves only at the end.
                advance(from, offset, begin + count as off64_t).map(|()| count)
            }
            Ok(FileStep::UseTcp(0)) => send_file::file_by_tcp(&hold, endpoint, &kernel),
            // A blocking call returns once all bytes are sent, even if the lane ends meanwhile.
            Ok(FileStep::UseTcp(count)) => advance(from, offset, begin + count as off64_t)
                .map(|()| count + send_file::rest_of_file_by_tcp(&hold, endpoint, &|out| rest(out, count))),
        };
        hold.release();
        outcome
    };
    moving::<Sending>(out, 0, ours, || kernel(out))
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

/// The flags that splice accepts.
const SPLICE_KNOWN: c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

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
    // SAFETY: the program's own call.
    let kernel = || unsafe { real::splice(from, from_offset, to, to_offset, len, flags) };
    // The kernel refuses these for any descriptors.
    if flags & !SPLICE_KNOWN != 0 || is_negative(len) {
        return kernel();
    }
    if let Some(endpoint) = endpoint::behind(to) {
        let _shield = Shield::raise();
        attach::bar(endpoint, Reason::Splice);
        if rustix::io::ioctl_fionread(crate::base::private::borrow(from)).is_ok_and(|bytes| bytes > 0)
            && let Some(errno) = endpoint.take_owed(to)
        {
            return answer(Err(errno));
        }
        endpoint.enter_send_locked();
        let outcome = usize::try_from(signal::open(undo::send(endpoint), kernel)).map_err(|_| errno::get());
        let outcome = outcome.inspect(|count| endpoint.count_sent(*count));
        endpoint.leave_send();
        return answer_of(endpoint, outcome);
    }
    let Some(endpoint) = endpoint::behind(from) else { return kernel() };
    let shield = Shield::raise();
    attach::bar(endpoint, Reason::Splice);
    let takes = from_offset.is_null() && to_offset.is_null() && len > 0;
    if takes && rustix::pipe::fcntl_getpipe_size(crate::base::private::borrow(to)).is_ok() {
        // Bytes that the lane still has come first.
        if let Some(outcome) = pipe::move_to_pipe(endpoint, from, to, len.min(most_at_once()), flags) {
            return answer(outcome);
        }
        resets::notice_reset(endpoint, from);
        if let Some(errno) = receive::take_owed(endpoint, from) {
            return answer(Err(errno));
        }
    }
    drop(shield);
    let attached = |endpoint: &'static Endpoint| {
        endpoint.enter_receive_locked();
        let outcome =
            usize::try_from(signal::open(undo::receive(endpoint), kernel)).map_err(|_| errno::get());
        endpoint.leave_receive();
        match outcome {
            // End of file, on a connection that may have unread bytes in a lane.
            Ok(0) if takes && resets::reset_if_lost(endpoint, from) => {
                endpoint.take_owed(from).map_or_else(|| by_kernel(kernel), Err)
            }
            outcome => outcome,
        }
    };
    moving::<Receiving>(from, 0, attached, kernel)
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
