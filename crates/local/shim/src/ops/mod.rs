//! The operations: each call is handled here, fails, or is given to the kernel for a named reason.
//! The hooks only translate.

mod check;
pub(crate) mod descriptors;
pub(crate) mod epoll_wait;
mod epoll_wait_step;
pub(crate) mod exec;
pub(crate) mod files;
pub(crate) mod locking;
pub(crate) mod options;
pub(crate) mod pipe;
pub(crate) mod poll;
mod poll_step;
pub(crate) mod receive;
pub(crate) mod receive_fast;
mod receive_step;
pub(crate) mod ring;
pub(crate) mod select;
mod select_now;
mod select_step;
pub(crate) mod send;
pub(crate) mod send_fast;
pub(crate) mod send_file;
mod send_step;
pub(crate) mod sleep;
pub(crate) mod socket_reference;
#[cfg(test)]
mod step_courses;
pub(crate) mod undo;

use std::ffi::c_int;
use std::os::fd::RawFd;

use libc::ssize_t;

use crate::base::private::borrow;
use crate::base::rank::Rank;
use crate::base::{lock, signal};
use crate::broker::control;
use crate::socket::endpoint::{Endpoint, NEVER, Phase};
use shunt_ring::bytes;
use shunt_ring::copy::{self, Method};
use shunt_sys::memory::{self, Access};

/// The slow path of a call on one buffer of a hook, which takes over when the fast path does not
/// suffice.
pub(crate) type Slowly<P> = fn(RawFd, P, usize, c_int) -> ssize_t;

/// Moves a call to the slow path, because another thread has the lock. The call has raised the
/// shield.
#[cold]
#[inline(never)]
fn begin_slowly<P>(fd: RawFd, base: P, len: usize, flags: c_int, slowly: Slowly<P>) -> ssize_t {
    signal::Brief::take_over().lower(0);
    slowly(fd, base, len, flags)
}

/// Ends a call on the fast path, which has done its work.
#[inline(always)]
fn end_at_once<T, const RANK: Rank>(
    side: lock::Brief<'static, T, RANK>,
    shield: signal::Brief,
    answer: ssize_t,
) -> ssize_t {
    match side.end_at_once() {
        Ok(()) => shield.lower(answer),
        Err(side) => end_slowly(side, shield, answer),
    }
}

/// Ends a call on the fast path, under a lock that other threads wait for.
#[cold]
#[inline(never)]
fn end_slowly<T, const RANK: Rank>(
    side: lock::Brief<'static, T, RANK>,
    shield: signal::Brief,
    answer: ssize_t,
) -> ssize_t {
    side.end();
    shield.lower(answer)
}

/// Returns whether this part of the program's memory may be accessed. `FEW`: only as far as that is
/// known without asking the kernel.
#[inline(always)]
fn is_good<const FEW: bool>(base: *const u8, len: usize, access: Access) -> bool {
    match (FEW, access) {
        (true, _) => memory::is_known(base.addr(), len, access),
        (false, Access::Read) => memory::is_readable(base, len),
        (false, Access::Write) => memory::is_writable(base.cast_mut(), len),
    }
}

/// Copies `len` bytes by `method`. `FEW`: only if they are few, and returns whether they are.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[inline(always)]
unsafe fn copy<const FEW: bool>(from: *const u8, to: *mut u8, len: usize, method: Method) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        if FEW {
            bytes::copy_few(from, to, len)
        } else {
            copy::copy(method, from, to, len);
            true
        }
    }
}

/// Begins a data operation. Operations of an endpoint that is on TCP are counted, and after enough
/// of them it is considered for an offer.
#[inline(always)]
pub(crate) fn used(endpoint: &'static Endpoint, fd: RawFd) {
    control::poll_inbox();
    let (operations, enough) = match endpoint.phase() {
        Phase::Attached => return endpoint.remember(fd),
        Phase::Offered => (endpoint.offer.operations(), ALONE_AFTER),
        Phase::Tcp | Phase::Settled => (endpoint.offer.operations(), endpoint.offer.limit()),
    };
    let operations = operations.wrapping_add(1);
    if operations == 1 || operations >= enough {
        return look_at_use(endpoint, fd, operations);
    }
    endpoint.offer.set_operations(operations);
}

/// Counts the first operation of an endpoint, or one that reaches the limit.
#[inline(never)]
fn look_at_use(endpoint: &'static Endpoint, fd: RawFd, operations: u32) {
    let is_first = operations == 1;
    if endpoint.phase().is_idle() {
        if is_first && endpoint.was_begun() && !is_connected(fd) {
            return;
        }
        endpoint.remember(fd);
        if is_first {
            endpoint.count_use();
        }
        match endpoint.offer.limit() {
            NEVER => endpoint.settle(),
            enough if operations < enough => endpoint.offer.set_operations(operations),
            _ => control::consider(endpoint, fd),
        }
    } else {
        endpoint.offer.set_operations(operations);
        if operations >= ALONE_AFTER && control::give_up_if_alone(endpoint) {
            endpoint.offer.set_operations(ALONE_AFTER - ASK_AGAIN_AFTER);
        }
    }
}

/// Returns whether a connection that was begun without waiting is established. Programs read from a
/// refused one to get its error.
fn is_connected(fd: RawFd) -> bool {
    rustix::net::getpeername(borrow(fd)).is_ok()
}

/// How many data operations an offered endpoint makes before it is checked whether its peer was
/// offered too: see [`control::give_up_if_alone`]. Twice as many as the peer may wait for before it
/// is offered: see [`crate::socket::peer_locality`].
const ALONE_AFTER: u32 = 8192;
/// How many more it makes if the broker must first show that it is awake, which counts for a
/// second.
const ASK_AGAIN_AFTER: u32 = 64;
