//! A lane whose sender has ended the stream. `crate::life::ending` decides what follows.

use shunt_ring::LaneHeader;
use shunt_ring::lane::End;

use crate::base::names::EndpointRef;
use crate::base::upcall::Upcall;
use crate::base::{kernel, process};
use crate::socket::endpoint::{Endpoint, RxSide};

/// Keeps a connection under observation until the end of its stream has been reported.
pub(crate) static AWAIT: Upcall<EndpointRef> = Upcall::new();

/// Starts to await the end of the stream from TCP, if the lane has reported it and has nothing to
/// read. The caller holds the lock of the receiving side.
#[inline]
pub(crate) fn notice(endpoint: &Endpoint, side: &RxSide) {
    if endpoint.corrections.keepalive.is_needed()
        && let Some(at) = side.at
        && at.incoming().0.end() != End::Open
    {
        begin(endpoint, side, at.incoming().0);
    }
}

#[cold]
fn begin(endpoint: &Endpoint, side: &RxSide, lane: &LaneHeader) {
    let may_end = match side.rx.is_attached() {
        true => is_of_dead(lane) && side.rx.on_lane() && lane.looks_empty(),
        false => ends_here(lane),
    };
    // TCP has usually reported the end already.
    let mut polled = [libc::pollfd { fd: endpoint.fd(), events: libc::POLLRDHUP, revents: 0 }];
    if may_end && !endpoint.awaits_end() && kernel::poll_now(&mut polled) == 0 {
        endpoint.await_end(process::now());
        AWAIT.call(endpoint.reference());
    }
}

/// Returns whether the stream ends at the end of the lane, which has been read.
pub(crate) fn ends_here(lane: &LaneHeader) -> bool {
    lane.is_complete() || is_of_dead(lane)
}

/// Returns whether the sender's process has died while it used the lane, and no other process can
/// go on with its socket.
pub(crate) fn is_of_dead(lane: &LaneHeader) -> bool {
    lane.end() == End::Died && !lane.was_shared() && !lane.has_left()
}
