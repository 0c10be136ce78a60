//! The fast paths of a receive: everything is in the lane, and it is only copied.

use std::ffi::{c_int, c_void};
use std::hint::cold_path;
use std::os::fd::RawFd;

use libc::ssize_t;
use shunt_ring::copy::Method;
use shunt_ring::user::Piece;
use shunt_sys::memory::Access;

use super::receive::UNDERSTOOD;
use crate::base::signal;
use crate::ops::check::tell_of_space;
use crate::ops::{self, Slowly};
use crate::socket::endpoint::{Endpoint, RxSide};

/// The flags with which a receive takes bytes, and is content with those that there are.
pub(crate) const PLAIN: c_int = UNDERSTOOD & !(libc::MSG_PEEK | libc::MSG_WAITALL | libc::MSG_TRUNC);

/// The bytes that were taken out of the lane.
struct Part {
    count: usize,
    /// How many bytes have come by lanes, with these.
    total: u64,
    /// There is nothing more to do.
    is_all: bool,
    /// See [`Pace`](crate::base::pace::Pace).
    learns: bool,
}

/// Handles the call of a hook that has its endpoint (see [`crate::socket::endpoint::at_once`]):
/// takes bytes out of the lane if nothing else is to be done, as in most calls. Everything else is
/// left to functions that return in its place, so that this one needs no stack frame.
#[inline(always)]
pub(crate) fn receive_few(
    endpoint: &'static Endpoint,
    shield: signal::Brief,
    fd: RawFd,
    Piece { base, len }: Piece,
    flags: c_int,
    slowly: Slowly<*mut c_void>,
) -> ssize_t {
    if !endpoint.rx.try_hold_briefly() {
        cold_path();
        return ops::begin_slowly(fd, base.cast(), len, flags, slowly);
    }
    match waits(endpoint, flags) {
        true => receive_in_time(fd, base.cast(), len, flags, endpoint, slowly),
        false => end_few::<false>(endpoint, shield, fd, Piece { base, len }, flags, slowly),
    }
}

/// Goes on with a call that may wait.
#[inline(never)]
fn receive_in_time(
    fd: RawFd,
    base: *mut c_void,
    len: usize,
    flags: c_int,
    endpoint: &'static Endpoint,
    slowly: Slowly<*mut c_void>,
) -> ssize_t {
    let piece = Piece { base: base.cast(), len };
    end_few::<true>(endpoint, signal::Brief::take_over(), fd, piece, flags, slowly)
}

/// Goes on under the lock.
#[inline(always)]
fn end_few<const WAITS: bool>(
    endpoint: &'static Endpoint,
    shield: signal::Brief,
    fd: RawFd,
    piece: Piece,
    flags: c_int,
    slowly: Slowly<*mut c_void>,
) -> ssize_t {
    // SAFETY: the caller holds it.
    let mut side = unsafe { endpoint.rx.take_over() };
    let Some(part) = take::<true, WAITS>(side.value(), piece) else {
        cold_path();
        return receive_many(fd, piece.base.cast(), piece.len, flags, endpoint, slowly);
    };
    let Part { count, total, is_all, learns } = part;
    endpoint.count_from_lane(total);
    if !is_all {
        return end_part(endpoint, count, learns, piece.len);
    }
    ops::end_at_once(side, shield, count as ssize_t)
}

/// Returns whether a receive may wait.
#[inline(always)]
pub(super) fn waits(endpoint: &Endpoint, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT == 0 && !endpoint.options.is_nonblocking()
}

/// Goes on where the bytes are many, or memory must be checked, or the fast path lacks something
/// else.
#[inline(never)]
fn receive_many(
    fd: RawFd,
    base: *mut c_void,
    len: usize,
    flags: c_int,
    endpoint: &'static Endpoint,
    slowly: Slowly<*mut c_void>,
) -> ssize_t {
    // SAFETY: `receive_few` has left both to this function.
    let (mut side, shield) = (unsafe { endpoint.rx.take_over() }, signal::Brief::take_over());
    let count = take_all(endpoint, side.value(), Piece { base: base.cast(), len }, flags);
    side.end();
    let answer = shield.lower(count.map_or(-1, |count| count as ssize_t));
    if answer < 0 { slowly(fd, base, len, flags) } else { answer }
}

/// Ends a receive that has taken bytes, but has more to do.
#[inline(never)]
fn end_part(endpoint: &'static Endpoint, count: usize, learns: bool, len: usize) -> ssize_t {
    // SAFETY: as in `receive_many`.
    let (mut side, shield) = (unsafe { endpoint.rx.take_over() }, signal::Brief::take_over());
    complete(endpoint, side.value(), count, learns, len);
    side.end();
    shield.lower(count as ssize_t)
}

/// Receives into this buffer if nothing is to be done but to take bytes out of the lane. Returns
/// `None`, having done nothing, if [`receive`](super::receive::receive) must find out more.
#[inline(always)]
pub(crate) fn at_once(endpoint: &Endpoint, piece: Piece, flags: c_int) -> Option<usize> {
    if flags & !PLAIN != 0 || !endpoint.options.low_water.is_none() {
        return None;
    }
    let mut side = endpoint.rx.briefly();
    let count = take_all(endpoint, side.value(), piece, flags);
    side.end();
    count
}

/// Takes the bytes, under the lock.
#[inline(always)]
fn take_all(endpoint: &Endpoint, side: &mut RxSide, piece: Piece, flags: c_int) -> Option<usize> {
    let part = match waits(endpoint, flags) {
        true => take::<false, true>(side, piece),
        false => take::<false, false>(side, piece),
    }?;
    let Part { count, total, is_all, learns } = part;
    endpoint.count_from_lane(total);
    if !is_all {
        complete(endpoint, side, count, learns, piece.len);
    }
    Some(count)
}

/// Takes bytes out of the lane. `FEW`: only if they are few, into memory that is known to be good.
/// `WAITS`: for a call that may.
#[inline(always)]
fn take<const FEW: bool, const WAITS: bool>(side: &mut RxSide, Piece { base, len }: Piece) -> Option<Part> {
    let at = side.at.as_ref()?;
    if at.outgoing().0.is_returned() {
        return None;
    }
    let (lane, ring) = (at.incoming().0, at.incoming_ring());
    let learns = WAITS && side.rx.known().is_some_and(|known| known < len);
    if learns && side.pace.waits() {
        return None;
    }
    let found = side.rx.look_at_once(lane, ring, len)?;
    let count = found.count;
    if !FEW && found.is_for_receive() {
        return None;
    }
    if !ops::is_good::<FEW>(base, count, Access::Write) {
        return None;
    }
    let from = ring.whole_run(found.place(lane), count)?;
    // SAFETY: so many bytes can be written there, and they are one run of the ring.
    if !unsafe { ops::copy::<FEW>(from, base, count, Method::Plain) } {
        return None;
    }
    let total = found.take(lane)?;
    let is_all = !learns && !lane.is_space_wanted();
    Some(Part { count, total, is_all, learns })
}

/// Does the rest of the work: updates the pace, and wakes a sender that waits for room.
#[inline(always)]
fn complete(endpoint: &Endpoint, side: &mut RxSide, count: usize, learns: bool, len: usize) {
    if learns {
        let found = count + side.rx.known().unwrap_or(0);
        side.pace.learn(found, len, &endpoint.requests.unanswered);
    }
    if side.at.is_some_and(|at| at.incoming().0.is_space_wanted()) {
        tell_of_space(endpoint, side, endpoint.fd());
    }
}
