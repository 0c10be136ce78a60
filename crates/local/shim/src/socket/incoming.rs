//! The readiness of an endpoint to receive, as far as its lane determines it.

use std::os::fd::RawFd;

use shunt_ring::lane::End;

use crate::base::private::borrow;
use crate::base::waiter::Slot;
use crate::socket::endpoint::{Endpoint, RxSide};
use crate::socket::finished;
use crate::socket::tcp::Tcp;
#[cfg(doc)]
use crate::socket::{lost, outgoing};

/// The result of a check of the lane.
#[derive(Default)]
pub(crate) struct Found {
    /// An edge is due, because bytes have arrived in the lane or behind those that TCP still holds.
    pub(crate) arrived: bool,
    /// The lane has bytes to read now.
    pub(crate) readable: bool,
    /// The kernel may not report bytes that arrive by TCP. They alone may be fewer than SO_RCVLOWAT
    /// requires, but with the lane's bytes they may be enough.
    pub(crate) unsaid: bool,
    /// The next bytes come by the lane: it has begun, has not both ended and been drained, and was
    /// not reclaimed.
    pub(crate) on_lane: bool,
    /// The peer has returned bytes: see [`outgoing::is_returned`].
    pub(crate) returned: bool,
    /// The peer's process has died: see [`lost::is_lost`].
    pub(crate) died: bool,
    /// The peer sends nothing more by the lane. It may have closed the connection, which TCP then
    /// reports.
    pub(crate) ended: bool,
}

/// The bytes in a lane that is open.
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    /// Bytes to read now.
    pub(crate) unread: usize,
    /// Bytes that have ever arrived by lanes, read or not.
    pub(crate) arrived: u64,
}

/// Returns the bytes of the lane on the fast path. Returns `None` if another condition matters; the
/// caller then uses [`look`].
#[inline(always)]
pub(crate) fn look_at_once(endpoint: &Endpoint) -> Option<Bytes> {
    if !endpoint.options.low_water.is_none() {
        return None;
    }
    let mut side = endpoint.rx.briefly();
    let found = look_at_lane(side.value());
    side.end();
    found
}

#[inline(always)]
fn look_at_lane(side: &mut RxSide) -> Option<Bytes> {
    let at = side.at.as_ref()?;
    let (lane, ring) = at.incoming();
    if at.outgoing().0.is_returned() || lane.end() != End::Open {
        return None;
    }
    let (unread, arrived) = side.rx.available_at_once(lane, &ring)?;
    Some(Bytes { unread, arrived })
}

/// Checks the lane, and checks it for bytes if they are `wanted`.
pub(crate) fn look(endpoint: &Endpoint, fd: RawFd, wanted: bool) -> Found {
    let low_water = endpoint.options.low_water.of(fd);
    let mut guard = endpoint.rx.lock();
    let side = &mut *guard;
    let Some(at) = side.at else { return Found::default() };
    let (lane, ring) = at.incoming();
    let readable = wanted && side.rx.available(lane, &ring, &Tcp { endpoint, fd }) > 0;
    endpoint.report_transport(side);
    if !readable {
        finished::notice(endpoint, side);
    }
    let mut found = Found {
        arrived: readable || wanted && side.rx.has_arrived_behind(lane),
        readable,
        unsaid: false,
        on_lane: side.rx.on_lane(),
        returned: at.outgoing().0.is_returned(),
        died: lane.end() == End::Died,
        ended: lane.end() != End::Open,
    };
    if wanted && low_water > 0 {
        // The kernel does not report bytes before the lane while they are fewer than the low water.
        let unread = side.rx.unread(lane, &ring);
        drop(guard);
        let is_enough = low_water <= unread || {
            let behind = rustix::io::ioctl_fionread(borrow(fd)).unwrap_or(0) as usize;
            unread + behind >= low_water
        };
        found.arrived &= is_enough;
        found.readable = unread > 0 && is_enough;
        found.unsaid = unread > 0;
    }
    found
}

/// Returns whether the lane has bytes to read now.
#[inline]
pub(crate) fn is_readable(endpoint: &Endpoint, fd: RawFd) -> bool {
    look(endpoint, fd, true).readable
}

/// Returns whether the kernel must be polled for an end of file, a reset, or bytes of TCP.
pub(crate) fn tcp_has_news(endpoint: &Endpoint) -> bool {
    let side = endpoint.rx.lock();
    side.at.is_none_or(|at| side.rx.has_tcp_news(at.incoming().0))
}

/// Returns the number of bytes that can be read from the lane now.
#[inline]
pub(crate) fn available(endpoint: &Endpoint, fd: RawFd) -> usize {
    let mut side = endpoint.rx.lock();
    let Some(at) = side.at else { return 0 };
    let (lane, ring) = at.incoming();
    let available = side.rx.available(lane, &ring, &Tcp { endpoint, fd });
    endpoint.report_transport(&mut side);
    available
}

/// Returns the number of bytes in the lane, including those behind bytes of TCP.
pub(crate) fn unread(endpoint: &Endpoint) -> usize {
    let mut side = endpoint.rx.lock();
    let Some(at) = side.at else { return 0 };
    let (lane, ring) = at.incoming();
    side.rx.unread(lane, &ring)
}

/// Returns the number of bytes that have ever arrived by lanes, read or not.
pub(crate) fn arrived(endpoint: &Endpoint) -> u64 {
    let mut side = endpoint.rx.lock();
    let Some(at) = side.at else { return side.rx.lane_total() };
    let (lane, ring) = at.incoming();
    side.rx.arrived_total(lane, &ring)
}

/// Returns whether the peer can notify this waiter of bytes, now or later.
pub(crate) fn can_be_rung(endpoint: &Endpoint, slot: Option<Slot>) -> bool {
    slot.is_some_and(|slot| !endpoint.rx.lock().at.is_some_and(|at| at.link.is_deaf_to(slot)))
}
