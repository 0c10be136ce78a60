//! What has come by a lane, as readiness sees it.

use std::os::fd::RawFd;

use shunt_ring::lane::End;

use crate::base::private::borrow;
use crate::base::waiter::Slot;
use crate::socket::endpoint::{Endpoint, RxSide};
use crate::socket::finished;
use crate::socket::tcp::Tcp;
#[cfg(doc)]
use crate::socket::{lost, outgoing};

/// What a look at the lane finds.
#[derive(Default)]
pub(crate) struct Found {
    /// An edge is due: something has arrived, in the lane or behind what TCP still holds.
    pub(crate) arrived: bool,
    /// The lane has bytes to read now.
    pub(crate) readable: bool,
    /// The kernel may tell nobody of bytes that come: alone they are fewer than SO_RCVLOWAT asks for, with the lane's they need not be.
    pub(crate) unsaid: bool,
    /// What comes next is the lane's to tell: it has begun, has not ended and been drained, and was not taken back.
    pub(crate) on_lane: bool,
    /// The peer has given bytes back: see [`outgoing::is_returned`].
    pub(crate) returned: bool,
    /// The peer's process has died: see [`lost::is_lost`].
    pub(crate) died: bool,
    /// The peer sends nothing by it any more, be it that it has closed the connection: TCP may have that to tell.
    pub(crate) ended: bool,
}

/// What a lane has that goes on.
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    /// Bytes to read now.
    pub(crate) unread: usize,
    /// Bytes that have ever arrived by lanes, read or not.
    pub(crate) arrived: u64,
}

/// What the lane has, if that is all there is to be seen there, as it mostly is. `None`: [`look`] finds out what else.
#[inline(always)]
pub(crate) fn look_at_once(endpoint: &Endpoint) -> Option<Bytes> {
    if !endpoint.low_water.is_none() {
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

/// Looks at the lane, and for bytes if they are `wanted`.
pub(crate) fn look(endpoint: &Endpoint, fd: RawFd, wanted: bool) -> Found {
    let low_water = endpoint.low_water.of(fd);
    let mut guard = endpoint.rx.lock();
    let side = &mut *guard;
    let Some(at) = side.at else { return Found::default() };
    let (lane, ring) = at.incoming();
    let readable = wanted && side.rx.available(lane, &ring, &Tcp { endpoint, fd }) > 0;
    endpoint.report_road(side);
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
        // The kernel does not speak of bytes below it that lie before the lane.
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

/// Whether the lane has bytes to read now.
#[inline]
pub(crate) fn is_readable(endpoint: &Endpoint, fd: RawFd) -> bool {
    look(endpoint, fd, true).readable
}

/// Whether the kernel must be asked how the socket is: end of file, reset, or bytes of TCP's own.
pub(crate) fn tcp_has_news(endpoint: &Endpoint) -> bool {
    let side = endpoint.rx.lock();
    side.at.is_none_or(|at| side.rx.has_tcp_news(at.incoming().0))
}

/// Bytes that wait in the lane.
#[inline]
pub(crate) fn available(endpoint: &Endpoint, fd: RawFd) -> usize {
    let mut side = endpoint.rx.lock();
    let Some(at) = side.at else { return 0 };
    let (lane, ring) = at.incoming();
    let available = side.rx.available(lane, &ring, &Tcp { endpoint, fd });
    endpoint.report_road(&mut side);
    available
}

/// Bytes that wait in the lane, and those that do behind bytes of TCP's.
pub(crate) fn unread(endpoint: &Endpoint) -> usize {
    let mut side = endpoint.rx.lock();
    let Some(at) = side.at else { return 0 };
    let (lane, ring) = at.incoming();
    side.rx.unread(lane, &ring)
}

/// How many bytes have ever arrived by lanes, read or not.
pub(crate) fn arrived(endpoint: &Endpoint) -> u64 {
    let mut side = endpoint.rx.lock();
    let Some(at) = side.at else { return side.rx.lane_total() };
    let (lane, ring) = at.incoming();
    side.rx.arrived_total(lane, &ring)
}

/// Whether this waiter is, or may yet be, one that the peer rings for bytes.
pub(crate) fn can_be_rung(endpoint: &Endpoint, slot: Option<Slot>) -> bool {
    slot.is_some_and(|slot| !endpoint.rx.lock().at.is_some_and(|at| at.link.is_deaf_to(slot)))
}
