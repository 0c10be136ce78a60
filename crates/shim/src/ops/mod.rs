//! What each call does: handled here, failed, or given to the kernel for a named reason. The hooks only translate.

pub(crate) mod descriptors;
pub(crate) mod epoll_wait;
pub(crate) mod exec;
pub(crate) mod held;
pub(crate) mod hold;
mod look;
pub(crate) mod options;
pub(crate) mod pipe;
pub(crate) mod poll;
pub(crate) mod receive;
pub(crate) mod ring;
pub(crate) mod select;
pub(crate) mod send;
pub(crate) mod sleep;

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::*;

use libc::ssize_t;

use crate::base::private::borrow;
use crate::base::{lock, signal};
use crate::broker::control;
use crate::socket::endpoint::{Endpoint, Stage};
use shunt_ring::bytes;
use shunt_sys::memory::{self, Access};

/// Goes on with a call on a buffer of a hook's, where it turns out not to be one that most are like.
pub(crate) type Slowly<P> = fn(RawFd, P, usize, c_int) -> ssize_t;

/// Such a call has raised the shield, and somebody has the lock.
#[cold]
#[inline(never)]
fn begin_slowly<P>(fd: RawFd, base: P, len: usize, flags: c_int, slowly: Slowly<P>) -> ssize_t {
    signal::Brief::take_over().lower(0);
    slowly(fd, base, len, flags)
}

/// Ends such a call, which has done its work.
#[inline(always)]
fn end_at_once<T>(side: lock::Brief<'static, T>, shield: signal::Brief, answer: ssize_t) -> ssize_t {
    match side.end_at_once() {
        Ok(()) => shield.lower(answer),
        Err(side) => end_slowly(side, shield, answer),
    }
}

/// The same under a lock for which others wait.
#[cold]
#[inline(never)]
fn end_slowly<T>(side: lock::Brief<'static, T>, shield: signal::Brief, answer: ssize_t) -> ssize_t {
    side.end();
    shield.lower(answer)
}

/// Whether so much of the program's memory can be touched so. `FEW`: as far as is known without asking the kernel.
#[inline(always)]
fn is_good<const FEW: bool>(base: *const u8, len: usize, access: Access) -> bool {
    match (FEW, access) {
        (true, _) => memory::is_known(base.addr(), len, access),
        (false, Access::Read) => memory::is_readable(base, len),
        (false, Access::Write) => memory::is_writable(base.cast_mut(), len),
    }
}

/// Copies so many bytes. `FEW`: if they are, which it says.
///
/// # Safety
/// As for `copy_nonoverlapping`.
#[inline(always)]
unsafe fn copy<const FEW: bool>(from: *const u8, to: *mut u8, len: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        if FEW {
            bytes::copy_few(from, to, len)
        } else {
            std::ptr::copy_nonoverlapping(from, to, len);
            true
        }
    }
}

/// A data operation begins. Those of an endpoint that is on TCP are counted, and it is considered for an offer once there were
/// enough.
#[inline]
pub(crate) fn used(endpoint: &'static Endpoint, fd: RawFd) {
    if endpoint.is_attached() {
        endpoint.remember(fd);
        control::poll_inbox();
    } else {
        used_on_tcp(endpoint, fd);
    }
}

#[inline(never)]
fn used_on_tcp(endpoint: &'static Endpoint, fd: RawFd) {
    match endpoint.stage() {
        Stage::Plain => {
            let operations = endpoint.operations.load(Relaxed) + 1;
            if operations == 1 && endpoint.was_begun() && !is_connected(fd) {
                return;
            }
            let is_first = operations == 1 && endpoint.count_use();
            if operations < endpoint.offer_after.load(Relaxed) {
                endpoint.operations.store(operations, Relaxed);
            } else if endpoint.offer_after.load(Relaxed) != u32::MAX {
                control::consider(endpoint, fd, is_first);
            } else {
                endpoint.settle();
            }
        }
        Stage::Offered => {
            control::poll_inbox();
            let operations = endpoint.operations.load(Relaxed) + 1;
            endpoint.operations.store(operations, Relaxed);
            if operations >= ALONE_AFTER {
                control::give_up_if_alone(endpoint);
            }
        }
        Stage::Attached => control::poll_inbox(),
    }
}

/// Whether a connection that was begun without waiting has come to be: programs read one that was refused, for its error.
fn is_connected(fd: RawFd) -> bool {
    rustix::net::getpeername(borrow(fd)).is_ok()
}

/// Data operations after which an endpoint that was offered, and whose peer was not, is looked at: see
/// [`control::give_up_if_alone`]. Twice as many as the peer may wait for before it is offered: see [`crate::socket::distance`].
const ALONE_AFTER: u32 = 8192;
