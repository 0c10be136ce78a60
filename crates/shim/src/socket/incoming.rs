//! What has come by a lane, as readiness sees it.

use std::os::fd::RawFd;

use crate::base::private::borrow;
use crate::base::waiter::Slot;
use crate::socket::endpoint::Endpoint;
use crate::socket::tcp::Tcp;

/// What has come, as a look at the lane finds it.
#[derive(Default)]
pub(crate) struct Found {
    /// An edge is due: something has arrived, in the lane or behind what TCP still holds.
    pub(crate) arrived: bool,
    /// The lane has bytes to read now.
    pub(crate) readable: bool,
    /// The kernel may tell nobody of bytes that come: alone they are fewer than SO_RCVLOWAT asks for, with the lane's they need not be.
    pub(crate) unsaid: bool,
}

/// Looks at the lane.
pub(crate) fn look(endpoint: &Endpoint, fd: RawFd) -> Found {
    let low_water = endpoint.low_water.of(fd);
    let mut guard = endpoint.rx.lock();
    let side = &mut *guard;
    let Some(at) = &side.at else { return Found::default() };
    let (lane, ring) = at.incoming();
    let readable = side.rx.available(lane, &ring, &Tcp { endpoint, fd }) > 0;
    let arrived = readable || side.rx.has_arrived_behind(lane);
    if low_water == 0 {
        return Found { arrived, readable, unsaid: false };
    }
    // The kernel does not speak of bytes below it that lie before the lane.
    let unread = side.rx.unread(lane, &ring);
    drop(guard);
    let is_enough = low_water <= unread || {
        let behind = rustix::io::ioctl_fionread(borrow(fd)).unwrap_or(0) as usize;
        unread + behind >= low_water
    };
    Found { arrived: arrived && is_enough, readable: unread > 0 && is_enough, unsaid: unread > 0 }
}

/// Whether the lane has bytes to read now.
#[inline]
pub(crate) fn is_readable(endpoint: &Endpoint, fd: RawFd) -> bool {
    look(endpoint, fd).readable
}

/// Whether the kernel must be asked how the socket is: end of file, reset, or bytes of TCP's own.
pub(crate) fn tcp_has_news(endpoint: &Endpoint) -> bool {
    let side = endpoint.rx.lock();
    side.at.is_none_or(|at| side.rx.has_tcp_news(at.incoming().0))
}

/// Whether what comes next is TCP's to tell: there is no lane, or it has not begun, or has ended and is drained, or was taken back.
pub(crate) fn is_by_tcp(endpoint: &Endpoint) -> bool {
    !endpoint.rx.lock().rx.on_lane()
}

/// Bytes that wait in the lane.
#[inline]
pub(crate) fn available(endpoint: &Endpoint, fd: RawFd) -> usize {
    let mut side = endpoint.rx.lock();
    let Some(at) = side.at else { return 0 };
    let (lane, ring) = at.incoming();
    side.rx.available(lane, &ring, &Tcp { endpoint, fd })
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
