//! A peer that has ended its stream, as its lane tells it. What becomes of that is decided in `crate::life::ending`.

use std::sync::atomic::Ordering::*;

use shunt_ring::LaneHeader;
use shunt_ring::lane::End;

use crate::base::above::Above;
use crate::base::names::EndpointRef;
use crate::base::{kernel, process};
use crate::socket::endpoint::{Endpoint, RxSide};

/// Has a connection looked at again and again until its end has come.
pub(crate) static AWAIT: Above<EndpointRef> = Above::new();

/// A look has found nothing to read. Awaits the end if the lane has told of it. Under the lock of the receiving side.
#[inline]
pub(crate) fn notice(endpoint: &Endpoint, side: &RxSide) {
    if endpoint.keepalive.is_needed()
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
    // Mostly TCP has told of it already.
    let mut polled = [libc::pollfd { fd: endpoint.fd.load(Relaxed), events: libc::POLLRDHUP, revents: 0 }];
    if may_end && !endpoint.awaits_end() && kernel::poll_now(&mut polled) == 0 {
        endpoint.end_awaited_since.store(process::now().max(1), Release);
        AWAIT.call(endpoint.reference());
    }
}

/// Returns whether the stream ends where the lane does, which has been read.
pub(crate) fn ends_here(lane: &LaneHeader) -> bool {
    lane.is_complete() || is_of_dead(lane)
}

/// Returns whether the sender's process has ended while it was on the lane, with nobody else that could go on with its socket.
pub(crate) fn is_of_dead(lane: &LaneHeader) -> bool {
    lane.end() == End::Died && !lane.was_shared() && !lane.has_left()
}
