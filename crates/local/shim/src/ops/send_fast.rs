//! The fast paths of a send: the lane has room, and nothing is to be done but to copy into it.

use std::ffi::{c_int, c_void};
use std::hint::cold_path;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::ssize_t;
use shunt_ring::WaiterLine;
use shunt_ring::copy::Method;
use shunt_ring::user::Piece;
use shunt_sys::memory::Access;

use super::send::UNDERSTOOD;
use crate::base::signal;
use crate::life::unread_timeout;
use crate::ops::{self, Slowly};
use crate::socket::endpoint::{Endpoint, Seen, TxSide};
use crate::socket::outgoing;

/// How many bytes can be sent [`at_once`] at most.
const SHORT: usize = 4096;

/// Handles the call of a hook that has its endpoint (see [`crate::socket::endpoint::at_once`]):
/// puts a few bytes into the lane if nothing else is to be done, as in most calls. Everything else
/// is left to functions that return in its place, so that this one needs no stack frame.
#[inline(always)]
pub(crate) fn send_few(
    endpoint: &'static Endpoint,
    shield: signal::Brief,
    fd: RawFd,
    Piece { base, len }: Piece,
    flags: c_int,
    slowly: Slowly<*const c_void>,
) -> ssize_t {
    if !endpoint.tx.try_hold_briefly() {
        cold_path();
        return ops::begin_slowly(fd, base.cast_const().cast(), len, flags, slowly);
    }
    // SAFETY: held now.
    let mut side = unsafe { endpoint.tx.take_over() };
    match put::<true>(endpoint, side.value(), Piece { base, len }) {
        Some(None) if side.value().seen.is_listed.get() => {}
        Some(sleeper) => return end_put(endpoint, sleeper, len),
        None => return send_many(fd, base.cast(), len, flags, endpoint, slowly),
    }
    ops::end_at_once(side, shield, len as ssize_t)
}

/// Goes on where the bytes are many, or memory must be checked, or the fast path lacks something
/// else.
#[inline(never)]
fn send_many(
    fd: RawFd,
    base: *const c_void,
    len: usize,
    flags: c_int,
    endpoint: &'static Endpoint,
    slowly: Slowly<*const c_void>,
) -> ssize_t {
    // SAFETY: `send_few` has left both to this function.
    let (mut side, shield) = (unsafe { endpoint.tx.take_over() }, signal::Brief::take_over());
    let sent = put_all(endpoint, side.value(), Piece { base: base.cast_mut().cast(), len });
    side.end();
    let answer = shield.lower(if sent { len as ssize_t } else { -1 });
    if answer < 0 { slowly(fd, base, len, flags) } else { answer }
}

/// Ends a send whose bytes are in the lane, but that has more to do.
#[inline(never)]
fn end_put(endpoint: &'static Endpoint, sleeper: Option<&'static WaiterLine>, len: usize) -> ssize_t {
    // SAFETY: as in `send_many`.
    let (mut side, shield) = (unsafe { endpoint.tx.take_over() }, signal::Brief::take_over());
    complete(endpoint, side.value(), sleeper);
    side.end();
    shield.lower(len as ssize_t)
}

/// Sends these bytes if nothing is to be done but to put them into the lane. The endpoint must have
/// no pending error. Returns `false`, having done nothing, if [`send`](super::send::send) must find
/// out more.
#[inline(always)]
pub(crate) fn at_once(endpoint: &Endpoint, piece: Piece, flags: c_int) -> bool {
    if flags & !UNDERSTOOD != 0 {
        return false;
    }
    let mut side = endpoint.tx.briefly();
    let sent = put_all(endpoint, side.value(), piece);
    side.end();
    sent
}

/// Puts the bytes into the lane, under the lock.
#[inline(always)]
fn put_all(endpoint: &Endpoint, side: &mut TxSide, piece: Piece) -> bool {
    // From 1 byte on.
    let is_short = piece.len.wrapping_sub(1) < SHORT;
    let sleeper = if is_short { put::<false>(endpoint, side, piece) } else { None };
    if let Some(sleeper) = sleeper {
        complete(endpoint, side, sleeper);
    }
    sleeper.is_some()
}

/// Puts the bytes into the lane, and returns which waiter of the peer must be rung for them, if
/// any. Returns `None`, having done nothing, if there is more to do. `FEW`: only if they are few,
/// on memory that is known to be good.
#[inline(always)]
fn put<const FEW: bool>(
    endpoint: &Endpoint,
    side: &mut TxSide,
    Piece { base, len }: Piece,
) -> Option<Option<&'static WaiterLine>> {
    let is_good = ops::is_good::<FEW>(base, len, Access::Read);
    let TxSide { tx, at: Some(at), seen, .. } = side else { return None };
    if !is_good || outgoing::peer_has_left(at) {
        return None;
    }
    let (lane, ring) = at.outgoing();
    let found = if FEW { tx.place_on_page(len) } else { tx.place_at_once(lane, &ring, len) }?;
    // A page of the ring is one run.
    let to = ring.in_ring(found.place);
    let method = if FEW { Method::Plain } else { found.method()? };
    // SAFETY: so many bytes can be read there, and written here.
    if !unsafe { ops::copy::<FEW>(base, to, len, method) } {
        return None;
    }
    let total = found.publish(lane)?;
    endpoint.requests.unanswered.answer();
    note_progress(endpoint, total, seen);
    Some(at.mark_bytes())
}

/// Does the rest of the work: rings the waiter, and notes that the bytes must be checked again
/// (L9).
#[inline(always)]
fn complete(endpoint: &Endpoint, side: &TxSide, sleeper: Option<&'static WaiterLine>) {
    if let (Some(sleeper), Some(at)) = (sleeper, &side.at) {
        at.ring(sleeper);
    }
    unread_timeout::note_sent(endpoint, &side.seen);
}

/// Notes that bytes have come into the lane. `total`: how many lanes have carried, with these.
#[inline(always)]
pub(super) fn note_progress(endpoint: &Endpoint, total: u64, seen: &mut Seen) {
    seen.backlog.forget_wait();
    seen.sends = seen.sends.wrapping_add(1);
    if let Some(entry) = endpoint.entry() {
        entry.shm_sent.store(total, Relaxed);
    }
}
