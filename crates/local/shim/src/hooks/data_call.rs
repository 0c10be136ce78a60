//! The way of a data call to the kernel or to a lane, which all hooks that move bytes share.
//!
//! ```text
//! the fd has                      the call is
//!   no endpoint, or a settled       the kernel's, uncounted
//!   an endpoint on TCP              enter -> the kernel's call -> count its bytes -> leave
//!   an attached endpoint            the shim's (`ours`), under the endpoint's locks
//! ```
//!
//! Between `enter` and `leave` the direction of the call does not move to a lane (L4): see
//! [`crate::socket::endpoint`]. The bytes are counted before `leave`, so that the offset at which it
//! moves later is right.
//!
//! Example: a thread waits in the kernel's recv while the broker pairs the connection. The endpoint
//! is attached, but its receiving direction stays on TCP. The call returns with bytes of TCP, counts
//! them, and leaves. The thread's next recv finds the endpoint attached, and is `ours`.

use std::ffi::{c_int, c_void};

use libc::{iovec, size_t, ssize_t};
use shunt_abi::reason::Reason;
use shunt_ring::user::Piece;
use shunt_sys::memory::{self, most_at_once};

use crate::base::signal::{self, Shield};
use crate::base::undo_log::Held;
use crate::base::{errno, order, process, table};
use crate::broker::control;
use crate::life::{attach, resets};
use crate::ops::{self, undo};
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
pub(super) fn unsettled<D: Direction>(
    fd: c_int,
    kernel: impl Fn() -> ssize_t,
) -> Result<&'static Endpoint, ssize_t> {
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
pub(super) fn moving_unsettled<D: Direction>(
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
pub(super) fn answer_of(endpoint: &Endpoint, outcome: Result<usize, i32>) -> ssize_t {
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
pub(super) fn piece(base: *const c_void, len: size_t, of: Calls) -> Option<[Piece; 1]> {
    let most = len.min(most_at_once());
    let checked = if of == Calls::Files { len } else { most };
    memory::is_of_user(base as usize, checked).then(|| [Piece { base: base.cast_mut().cast(), len: most }])
}

/// The family of a call, which determines how the kernel checks its buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Calls {
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

/// Returns whether `fd` is an endpoint that may have a lane.
pub(super) fn is_unsettled(fd: c_int) -> bool {
    endpoint::behind(fd).is_some_and(|endpoint| !endpoint.is_settled())
}
